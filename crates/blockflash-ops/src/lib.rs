//! Attention and block-sparse matrix products on NVIDIA GPUs from Ampere on, with precompiled
//! kernels, and on the CPU.
//!
//! ```
//! use blockflash_ops::{Attention, DType, Device, Mask, Tensor};
//!
//! let stream = Device::best().stream()?; // the first usable GPU, else the CPU
//! let q = Tensor::zeros(&stream, DType::F16, &[1, 128, 2, 64])?; // batch, seqlen, heads, head_dim
//! let (k, v) = (q.view(), q.view());
//! let attention = Attention { scores: Mask::causal().into(), ..Attention::new(q.view(), k, v) };
//! let output = attention.forward(&stream)?; // o and its log-sum-exp
//! let gradients = attention.backward(&output, q.view(), &stream)?; // q stands for that of o
//! # assert_eq!(gradients.dq.shape(), q.shape());
//! # Ok::<(), blockflash_ops::Error>(())
//! ```
//!
//! - [`Attention`]: softmax attention and its gradients, with grouped heads, packed sequences, a
//!   [`BlockMask`], and what [`Scores`] say about masks, scales and sinks.
//! - [`AttentionDecode`]: attention of new queries to a [`KvCache`], contiguous or in pages;
//!   [`AppendKv`] appends to one, [`AttentionMerge`] combines attention over disjoint keys.
//! - [`IndexAttention`]: attention of each query to the blocks of keys that a list names for it.
//! - [`IndexScores`], [`TopK`]: scores of blocks of keys for each query, and the choice of the
//!   largest of them.
//! - [`BlockMask`]: which blocks of queries × keys attention visits; a [`BlockMaskBuffer`] builds
//!   one on a GPU.
//! - [`BsrMatmul`]: a block-sparse [`BsrMatrix`], or its transpose, times a dense matrix or the
//!   other way round, with bias and [`Activation`]; a [`BsrView`] has values that another library
//!   owns.
//! - [`BsrSddmm`]: a product of dense matrices at the stored blocks of a [`BsrPattern`] only, as
//!   the gradients of its values.
//! - [`Device`], [`Stream`], [`Tensor`], [`View`]: where it runs, in which order, and on what
//!   memory.
//! - [`support`]: what runs on a device, with which kernel, and why something does not.
//!
//! An option acts or is an [`Error`] that names what is missing. `…_into` methods write into given
//! tensors; on a GPU they allocate nothing and never wait, so a [`Graph`] can capture them.
//! [`Operation`] prepares and repeats calls, and runs a kernel by name. The
//! [README](https://github.com/blockflash/blockflash/blob/main/crates/blockflash-ops/README.md)
//! lists the features of this crate, the
//! [guide](https://blockflash.github.io/blockflash/attention.html) explains each operation.
//!
//! Every call goes one way: operands are validated into a plain problem, a kernel is selected, its
//! launch is planned and queued. Problems, rules and plans are public for tools and tests, in
//! modules that are not documented here and promise nothing.

#![forbid(unsafe_code)]

#[doc(hidden)]
pub mod attention;
#[doc(hidden)]
pub mod attention_bwd;
#[doc(hidden)]
pub mod attention_decode;
#[doc(hidden)]
pub mod attention_index;
#[doc(hidden)]
pub mod attention_merge;
#[doc(hidden)]
pub mod block_sparse;
#[doc(hidden)]
pub mod bsr_matmul;
#[doc(hidden)]
pub mod bsr_sddmm;
mod check;
mod codes;
mod error;
mod float;
#[doc(hidden)]
pub mod index_choice;
#[doc(hidden)]
pub mod kv_append;
#[doc(hidden)]
pub mod kv_cache;
mod math;
mod operation;
#[doc(hidden)]
pub mod page_choice;
mod panels;
#[doc(hidden)]
pub mod quantize;
mod rates;
mod recent;
mod row_copy;
mod selection;
mod support;
mod threads;
mod verify;

pub use attention::{
    Align, Attention, AttentionOutput, CuSeqlens, MAX_SEQLEN, Mask, OperandScales,
    PreparedAttention, Scores, attention_flops, attention_varlen_flops,
};
pub use attention_bwd::{
    AttentionBackward, AttentionGradients, AttentionGradientsMut, PreparedAttentionBackward,
};
pub use attention_decode::{
    AttentionDecode, AttentionDecodeOperands, AttentionDecodeWorkspace, CacheAccess, PageLists,
    PreparedAttentionDecode,
};
pub use attention_index::{
    IndexAttention, IndexAttentionBackward, IndexAttentionOperands, IndexLists,
    PreparedIndexAttention, PreparedIndexAttentionBackward,
};
pub use attention_merge::{AttentionMerge, PreparedAttentionMerge};
pub use block_sparse::{
    BlockChoice, BlockColumns, BlockGeometry, BlockMask, BlockMaskBuffer, BlockScores, BlockSource,
    TokenChoice, TokenSource, block_mean_scores,
};
pub use bsr_matmul::{
    Activation, Bias, BsrMatmul, BsrMatrix, BsrPattern, BsrTranspose, BsrView, BsrWorkspace,
    PreparedBsrMatmul, bsr_flops,
};
pub use bsr_sddmm::{BsrSddmm, DenseLayout, PreparedBsrSddmm, bsr_sddmm_flops};
pub use error::{Error, Result};
pub use index_choice::{BlockReduction, IndexScores, PreparedIndexScores, PreparedTopK, TopK};
pub use kv_append::{AppendKv, AppendLatentCodes, LatentCodesMut, PreparedAppendKv};
pub use kv_cache::{
    CacheScale, CacheValues, KvCache, KvCacheMut, PackedTokens, Rotary, RotaryPairs,
};
pub use operation::{Operation, Prepared};
pub use page_choice::{ChoosePages, SummarizePages};
pub use quantize::{Quantize, QuantizeOutput, QuantizeOutputMut, QuantizeScale};
pub use rates::GpuRates;
pub use row_copy::copy_beside;
pub use support::{Status, SupportRow, support, support_with};
pub use verify::{checks, set_checks};

pub use blockflash_safe::{
    ComputeCapability, CudaProperties, CudaStatus, DType, Device, E4M3, E5M2, Element, Event,
    Graph, Kernel, LaunchConfig, Layout, Major, Stream, Target, Tensor, View, ViewMut, cuda_status,
};

// For tools and tests: problems, and what they are made of.
#[doc(hidden)]
pub use blockflash_safe::{ElementTypes, HeadDims};
#[doc(hidden)]
pub use {
    attention::{AttentionProblem, BiasProblem, BlockMaskSizes, PackedRows, ScoresProblem},
    attention_bwd::AttentionBackwardProblem,
    attention_decode::AttentionDecodeProblem,
    attention_index::{IndexAttentionBackwardProblem, IndexAttentionProblem, IndexListSizes},
    attention_merge::AttentionMergeProblem,
    bsr_matmul::BsrProblem,
    bsr_sddmm::BsrSddmmProblem,
    index_choice::{IndexRows, IndexScoresProblem, TopKProblem},
    kv_append::AppendKvProblem,
    row_copy::copy_beside_with,
};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(test)]
mod fixtures;
