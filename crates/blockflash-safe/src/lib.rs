//! Devices, streams, events, CUDA graphs, tensors and kernel launches of blockflash, on top of
//! `cudarc`.
//!
//! Every `unsafe` of the workspace is in this crate. What it promises, and what it leaves to its
//! users:
//!
//! - **No panic without a GPU.** No driver, an old driver, a missing GPU and out of memory are
//!   values of [`Error`]. The same calls work on the CPU, where the "device" is host memory and
//!   work runs at once.
//! - **Threads.** Everything is `Send` and `Sync`. The CUDA context is made current for the length
//!   of each call and the calling thread's previous one is restored, so several threads may share a
//!   GPU, one thread may use several GPUs, and other CUDA libraries in the same thread are not
//!   disturbed.
//! - **Lifetimes on the GPU.** Work is asynchronous, but memory is never touched before it is
//!   allocated nor after it is freed: a [`Tensor`] is freed in stream order, after everything that
//!   was queued on any stream that used it; a [`Graph`] keeps the tensors alive that were used
//!   while it was captured. The owner of another library's memory ([`Tensor::from_raw`]) is dropped
//!   after the same work.
//! - **Order.** Work on one [`Stream`] runs in order. Between streams the caller orders work with
//!   [`Event`]s or [`Stream::synchronize`]; without that, what a kernel reads or leaves in a tensor
//!   is unspecified (never a host data race, since GPU memory is not handed out as Rust
//!   references). One help is given: the first use of a tensor on another stream than its own waits
//!   for what its own stream has queued by then. A `BsrPartsMemory` is ordered by this crate:
//!   kernels that wait for words in it use it in turns, whatever their streams and graphs.
//! - **Aliasing.** [`View`] and [`ViewMut`] borrow like `&[T]` and `&mut [T]`; the borrow ends when
//!   the call returns, the order of queued work does the rest.
//! - **Bounds.** The launches in this crate check shapes, strides, element types and launch
//!   geometry against the views. Index arrays that kernels follow are types of their own
//!   ([`BsrIndices`], [`BlockLists`]): checked on the host, in memory that safe code cannot write
//!   any more.
//!
//! The parts hidden in this documentation (launches, their operands and parameter structs, tensor
//! maps) are for `blockflash-ops`. They change with the kernels, even without a new major version.

#[cfg(feature = "ndarray")]
mod arrays;
mod context;
mod copy;
mod device;
mod driver;
mod element;
mod error;
mod event;
mod fill;
mod float8;
mod foreign;
mod fork;
mod freed;
mod gpu;
mod graph;
mod host_gemm;
mod indices;
mod kernel;
mod launch;
mod layout;
mod lock;
mod map_cache;
mod mark;
mod memory;
mod nccl;
mod overlap;
mod properties;
mod queue;
mod stream;
mod tensor;
mod tensor_map;
mod tile_counter;
mod turns;
mod user;
mod view;
mod view_mut;

#[doc(hidden)]
pub use blockflash_sys::{BlockMaskKernel, manifest, params};
pub use blockflash_sys::{ComputeCapability, DType, ElementTypes, HeadDims, Kernel, Major, Target};
pub use device::Device;
pub use driver::{NEEDED_DRIVER_VERSION, cuda_driver_version, cuda_is_initialised};
pub use element::Element;
pub use error::{Error, Result};
pub use event::Event;
pub use float8::{E4M3, E5M2};
pub use fork::process_number;
pub use gpu::{CudaProperties, KernelInfo};
pub use graph::Graph;
#[doc(hidden)]
pub use host_gemm::host_gemm;
pub use indices::{
    BlockBitsScratch, BlockListArrays, BlockListScratch, BlockLists, BlockTransposeScratch,
    BsrIndexArrays, BsrIndices, BsrStageArrays,
};
#[doc(hidden)]
pub use launch::{
    AttentionBwdOperands, AttentionBwdParts, AttentionBwdPlan, AttentionCachePlan,
    AttentionCombineOperands, AttentionDecodeOperands, AttentionDecodeScalars,
    AttentionFwdOperands, AttentionFwdPlan, AttentionIndexBwdKernels, AttentionIndexBwdOperands,
    AttentionIndexBwdPlan, AttentionIndexBwdSizes, AttentionIndexOperands, AttentionIndexPlan,
    AttentionMerge, AttentionMergeOperands, AttentionScalars, BlockBitsBuild, BlockBitsOperands,
    BlockMaskBuild, BlockMaskBuildOperands, BlockMaskTranspose, BlockMaskTransposeOperands,
    BlockScores, BlockScoresOperands, BsrMatmulNarrowPlan, BsrMatmulOperands, BsrParts,
    BsrPartsMemory, BsrSddmmOperands, CodesDecode, IndexOffsets, IndexPacks, IndexRowsPlan,
    IndexScores, IndexScoresOperands, IndexScoresPlan, IndexUnionPlan, KvAppendOperands,
    KvAppendPlan, KvCacheViews, Launch, LaunchConfig, NO_MASK, NewKeys, NewScales, Operands,
    PROBE_CHUNK_BYTES, PageChoice, PageChoiceOperands, PageChoicePlan, PageSummaries,
    PageSummariesOperands, PageSummariesPlan, QuantizeOperands, QuantizePlan, QuantizeScales,
    QuantizeSizes, RowCopyOperands, STATISTICS_ROWS, ScoreTerms, TopK, TopKOperands, TopKPlan,
    TurnedQueries, attention_bwd_part_values, attention_bwd_workspace,
    attention_index_bwd_workspace, driver_time, param_bytes,
};
pub use layout::{Layout, MAX_RANK};
pub use nccl::{NcclCommunicator, NcclId};
pub use overlap::Footprint;
pub use properties::{CudaDriver, CudaStatus, cuda_status};
pub use stream::Stream;
pub use tensor::Tensor;
#[doc(hidden)]
pub use tensor_map::{Swizzle, TensorMapSpec};
pub use view::View;
pub use view_mut::ViewMut;

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
