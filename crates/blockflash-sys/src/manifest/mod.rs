//! The table of kernels: every image that exists, with its tile sizes. Nothing else in the
//! workspace writes a tile size.
//!
//! A kernel family is one file here and one implementation of [`Family`]. Tiles differ between
//! targets because of shared memory: sm_80 and sm_90 have 163 KB and more per CTA, every other
//! GPU 99 KB. Rows with equal [`Kernel::symbol`] are the same source with the same tiles for
//! different targets.

mod attention;
mod attention_bwd;
mod attention_bwd_sm80;
mod attention_bwd_sm90a;
mod attention_cache_sm90a;
mod attention_combine_sm90a;
mod attention_decode_sm80;
mod attention_decode_sm90a;
mod attention_fwd_e4m3_sm90a;
mod attention_fwd_sm80;
mod attention_fwd_sm90a;
mod attention_fwd_small_sm90a;
mod attention_fwd_wide_sm90a;
mod attention_index_bwd;
mod attention_index_sm80;
mod attention_index_sm90a;
mod attention_latent_index_few_sm90a;
mod attention_latent_index_sm80;
mod attention_latent_index_sm90a;
mod attention_latent_sm80;
mod attention_latent_sm90a;
mod attention_merge_sm80;
mod block_mask;
mod bsr_matmul;
mod bsr_matmul_any_sm80;
mod bsr_matmul_narrow_sm80;
mod bsr_matmul_sm80;
mod bsr_matmul_sm90a;
mod bsr_sddmm;
mod bsr_sddmm_sm80;
mod bsr_sddmm_sm90a;
mod family;
mod index_choice;
mod index_union_sm80;
mod kernel;
mod kv_append_codes_sm80;
mod kv_append_sm80;
mod major;
mod page_choice;
mod probe;
mod quantize_sm80;
mod row_copy_sm80;
mod variant;

pub use attention::{AttentionTile, Lse};
pub use attention_bwd::{AttentionBwdStep, AttentionBwdTile};
pub use attention_bwd_sm80::AttentionBwd;
pub use attention_bwd_sm90a::AttentionBwdHopper;
pub use attention_cache_sm90a::AttentionCacheHopper;
pub use attention_combine_sm90a::AttentionCombine;
pub use attention_decode_sm80::AttentionDecode;
pub use attention_decode_sm90a::AttentionDecodeHopper;
pub use attention_fwd_e4m3_sm90a::AttentionFwdE4m3;
pub use attention_fwd_sm80::AttentionFwd;
pub use attention_fwd_sm90a::AttentionFwdHopper;
pub use attention_fwd_small_sm90a::AttentionFwdSmall;
pub use attention_fwd_wide_sm90a::AttentionFwdWide;
pub use attention_index_bwd::{AttentionIndexBwd, AttentionIndexBwdTile};
pub use attention_index_sm80::AttentionIndex;
pub use attention_index_sm90a::AttentionIndexHopper;
pub use attention_latent_index_few_sm90a::AttentionLatentIndexFew;
pub use attention_latent_index_sm80::AttentionLatentIndex;
pub use attention_latent_index_sm90a::AttentionLatentIndexHopper;
pub use attention_latent_sm80::AttentionLatent;
pub use attention_latent_sm90a::AttentionLatentHopper;
pub use attention_merge_sm80::AttentionMerge;
pub use block_mask::BlockMaskKernel;
pub use bsr_matmul::BsrMatmulTile;
pub use bsr_matmul_any_sm80::BsrMatmulAny;
pub use bsr_matmul_narrow_sm80::BsrMatmulNarrow;
pub use bsr_matmul_sm80::BsrMatmul;
pub use bsr_matmul_sm90a::BsrMatmulHopper;
pub use bsr_sddmm::BsrSddmmTile;
pub use bsr_sddmm_sm80::BsrSddmm;
pub use bsr_sddmm_sm90a::BsrSddmmHopper;
pub use family::{Family, Size, Support};
pub use index_choice::{IndexColumns, IndexKernel};
pub use index_union_sm80::IndexUnion;
pub use kernel::{Kernel, kernels};
pub use kv_append_codes_sm80::KvAppendCodes;
pub use kv_append_sm80::KvAppend;
pub use major::Major;
pub use page_choice::PageKernel;
pub use probe::Probe;
pub use quantize_sm80::Quantize;
pub use row_copy_sm80::RowCopy;
pub use variant::Variant;
