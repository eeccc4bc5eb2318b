//! Attention and block-sparse matrix multiplication on NVIDIA GPUs with precompiled kernels, and on
//! CPUs. Most programs need [`Attention`] with a [`Mask`], a [`Device`] and its [`Stream`], and
//! [`Tensor`] or, for memory of others, [`View`].
//!
//! # Where to look
//!
//! - [`Attention`]: softmax attention with causal and window [`Mask`]s, grouped heads, softcap,
//!   sinks, variable length.
//! - [`AttentionBackward`]: its gradients.
//! - [`AttentionDecode`]: attention of new queries to a [`KvCache`], contiguous or in pages;
//!   [`AppendKv`] appends to one, [`ChoosePages`] chooses the pages to visit. [`AttentionMerge`]
//!   joins attention over parts of the keys.
//! - [`BsrMatmul`]: a block-sparse [`BsrMatrix`], or its transpose, times a dense matrix or the
//!   other way round, with bias and activation. A [`BsrView`] has values that somebody else owns.
//! - [`BsrSddmm`]: a product of dense matrices at the stored blocks of a [`BsrPattern`] only, as
//!   gradients of its values need it.
//! - [`BlockMask`]: which blocks of queries × keys block-sparse [`Attention`] visits; a
//!   [`BlockMaskBuffer`] builds one on a GPU.
//! - [`Operation`]: how any of these calls is prepared, repeated, or run with a kernel by name.
//! - [`support`]: what runs on a device, and why not otherwise.
//!
//! Every call goes one way, in `operation.rs` for all of them: the operands are validated into a
//! plain problem ([`Attention::problem`]), a kernel is selected ([`attention::select`]), the launch
//! is planned ([`attention::plan`]) and queued. The first three touch no GPU. Whatever is not
//! supported is an [`Error`]; no option is ignored.
//!
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod attention;
pub mod attention_bwd;
pub mod attention_decode;
pub mod attention_merge;
pub mod block_sparse;
pub mod bsr_matmul;
pub mod bsr_sddmm;
mod check;
mod error;
mod float;
pub mod kv_append;
pub mod kv_cache;
mod math;
mod operation;
pub mod page_choice;
mod rates;
mod recent;
mod row_copy;
mod selection;
mod support;
mod threads;
pub mod tuning;
mod verify;

pub use attention::{
    Align, Attention, AttentionOutput, AttentionProblem, BlockMaskSizes, CuSeqlens, Mask,
    PackedRows, PreparedAttention, attention_flops, attention_varlen_flops,
};
pub use attention_bwd::{
    AttentionBackward, AttentionBackwardProblem, AttentionGradients, AttentionGradientsMut,
    PreparedAttentionBackward,
};
pub use attention_decode::{
    AttentionDecode, AttentionDecodeOperands, AttentionDecodeProblem, AttentionDecodeWorkspace,
    CacheAccess, PageLists, PreparedAttentionDecode,
};
pub use attention_merge::{AttentionMerge, AttentionMergeProblem, PreparedAttentionMerge};
pub use block_sparse::{
    BlockChoice, BlockColumns, BlockGeometry, BlockMask, BlockMaskBuffer, BlockScores, BlockSource,
};
pub use bsr_matmul::{
    Activation, Bias, BsrMatmul, BsrMatrix, BsrPattern, BsrProblem, BsrTranspose, BsrView,
    BsrWorkspace, PreparedBsrMatmul, bsr_flops,
};
pub use bsr_sddmm::{BsrSddmm, BsrSddmmProblem, DenseLayout, PreparedBsrSddmm, bsr_sddmm_flops};
pub use error::{Error, Result};
pub use kv_append::{AppendKv, AppendKvProblem, PreparedAppendKv};
pub use kv_cache::{KvCache, KvCacheMut, PackedTokens, Rotary, RotaryPairs};
pub use operation::{Operation, Prepared};
pub use page_choice::{ChoosePages, SummarizePages};
pub use rates::GpuRates;
pub use row_copy::copy_beside;
#[doc(hidden)]
pub use row_copy::copy_beside_with;
pub use support::{Status, SupportRow, support, support_with};
pub use verify::{checks, set_checks};

pub use blockflash_safe::{
    ComputeCapability, CudaProperties, CudaStatus, DType, Device, Element, Event, Graph, Kernel,
    LaunchConfig, Layout, Major, Stream, Target, Tensor, View, ViewMut, cuda_status,
};

#[cfg(test)]
mod fixtures;
