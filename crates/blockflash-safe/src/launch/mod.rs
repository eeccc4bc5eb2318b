//! Launches of the kernels: one checked way for all of them (`checked.rs`), and one file per
//! family.

mod attention_bwd;
mod attention_bwd_terms;
mod attention_bwd_tma;
mod attention_bwd_workspace;
mod attention_cache;
mod attention_combine;
mod attention_decode;
mod attention_decode_argument;
mod attention_decode_codes;
mod attention_decode_runs;
mod attention_decode_scalars;
mod attention_decode_terms;
#[cfg(test)]
mod attention_fixtures;
mod attention_fwd;
mod attention_fwd_e4m3;
mod attention_fwd_tma;
mod attention_fwd_wide;
mod attention_index;
mod attention_index_bwd;
mod attention_index_bwd_sizes;
mod attention_index_tma;
mod attention_latent;
mod attention_latent_index;
mod attention_latent_tma;
mod attention_merge;
mod attention_sizes;
mod block_bits;
mod block_mask;
mod block_mask_build;
mod block_mask_transpose;
mod block_scores;
mod bsr_matmul;
mod bsr_matmul_any;
#[cfg(test)]
mod bsr_matmul_fixtures;
mod bsr_matmul_maps;
mod bsr_matmul_narrow;
mod bsr_matmul_tma;
mod bsr_parts;
mod bsr_sddmm;
mod bsr_sddmm_portable;
mod checked;
mod config;
mod fit;
mod index_rows;
mod index_scores;
mod kv_append;
mod kv_append_codes;
mod kv_cache;
mod operand_scales;
mod page_choice;
mod probe;
mod quantize;
mod row_copy;
mod score_terms;
mod timed;
mod top_k;

pub use attention_bwd::{AttentionBwdOperands, AttentionBwdPlan};
pub use attention_bwd_workspace::{
    AttentionBwdParts, STATISTICS_ROWS, attention_bwd_part_values, attention_bwd_workspace,
};
pub use attention_cache::AttentionCachePlan;
pub use attention_combine::AttentionCombineOperands;
pub use attention_decode::AttentionDecodeOperands;
pub use attention_decode_codes::CodesDecode;
pub use attention_decode_scalars::AttentionDecodeScalars;
pub use attention_fwd::{AttentionFwdOperands, AttentionFwdPlan};
pub use attention_index::{AttentionIndexOperands, AttentionIndexPlan};
pub use attention_index_bwd::{
    AttentionIndexBwdKernels, AttentionIndexBwdOperands, AttentionIndexBwdPlan,
};
pub use attention_index_bwd_sizes::{AttentionIndexBwdSizes, attention_index_bwd_workspace};
pub use attention_index_tma::{IndexPacks, IndexUnionPlan};
pub use attention_merge::{AttentionMerge, AttentionMergeOperands};
pub use attention_sizes::AttentionScalars;
pub use block_bits::{BlockBitsBuild, BlockBitsOperands};
pub use block_mask::NO_MASK;
pub use block_mask_build::{BlockMaskBuild, BlockMaskBuildOperands};
pub use block_mask_transpose::{BlockMaskTranspose, BlockMaskTransposeOperands};
pub use block_scores::{BlockScores, BlockScoresOperands};
pub use bsr_matmul::BsrMatmulOperands;
pub use bsr_matmul_narrow::BsrMatmulNarrowPlan;
pub use bsr_parts::{BsrParts, BsrPartsMemory};
pub use bsr_sddmm::BsrSddmmOperands;
pub use checked::{Launch, Operands};
pub use config::LaunchConfig;
pub use index_rows::{IndexOffsets, IndexRowsPlan};
pub use index_scores::{IndexScores, IndexScoresOperands, IndexScoresPlan};
pub use kv_append::{KvAppendOperands, KvAppendPlan, NewKeys, NewScales, TurnedQueries};
pub use kv_cache::KvCacheViews;
pub use page_choice::{
    PageChoice, PageChoiceOperands, PageChoicePlan, PageSummaries, PageSummariesOperands,
    PageSummariesPlan,
};
pub use probe::PROBE_CHUNK_BYTES;
pub use quantize::{QuantizeOperands, QuantizePlan, QuantizeScales, QuantizeSizes};
pub use row_copy::RowCopyOperands;
pub use score_terms::ScoreTerms;
pub use timed::driver_time;
pub use top_k::{TopK, TopKOperands, TopKPlan};

use crate::Kernel;
use blockflash_sys::manifest;

/// Bytes of the host's parameter struct for a kernel; `None` for a kernel that nothing launches.
pub fn param_bytes(kernel: &Kernel) -> Option<usize> {
    fn of<L: Launch>(kernel: &Kernel) -> Option<usize> {
        L::of(kernel).map(|tile| tile.param_bytes())
    }
    [
        of::<manifest::AttentionFwd>,
        of::<manifest::AttentionFwdHopper>,
        of::<manifest::AttentionFwdSmall>,
        of::<manifest::AttentionFwdWide>,
        of::<manifest::AttentionFwdE4m3>,
        of::<manifest::AttentionBwd>,
        of::<manifest::AttentionBwdHopper>,
        of::<manifest::AttentionCacheHopper>,
        of::<manifest::AttentionCombine>,
        of::<manifest::AttentionDecode>,
        of::<CodesDecode>,
        of::<manifest::AttentionDecodeHopper>,
        of::<manifest::AttentionIndex>,
        of::<attention_index_tma::United>,
        of::<manifest::IndexUnion>,
        of::<manifest::AttentionLatent>,
        of::<manifest::AttentionLatentHopper>,
        of::<manifest::AttentionLatentIndex>,
        of::<manifest::AttentionLatentIndexFew>,
        of::<manifest::AttentionLatentIndexHopper>,
        of::<attention_index_bwd::IndexBackward>,
        of::<AttentionMerge>,
        of::<manifest::KvAppend>,
        of::<manifest::KvAppendCodes>,
        of::<manifest::BsrMatmul>,
        of::<manifest::BsrMatmulAny>,
        of::<manifest::BsrMatmulNarrow>,
        of::<manifest::BsrMatmulHopper>,
        of::<manifest::BsrSddmm>,
        of::<manifest::BsrSddmmHopper>,
        of::<BlockMaskBuild>,
        of::<BlockMaskTranspose>,
        of::<BlockBitsBuild>,
        of::<BlockScores>,
        of::<IndexScores>,
        of::<TopK>,
        of::<PageSummaries>,
        of::<PageChoice>,
        of::<manifest::Quantize>,
        of::<manifest::RowCopy>,
        of::<probe::ProbeTile>,
    ]
    .into_iter()
    .find_map(|of| of(kernel))
}

#[cfg(test)]
mod tests {
    /// Includes kernels that no available GPU loads.
    #[test]
    fn every_kernel_has_a_launch() {
        for kernel in blockflash_sys::manifest::kernels() {
            assert!(super::param_bytes(kernel).is_some(), "{}", kernel.symbol());
        }
    }
}
