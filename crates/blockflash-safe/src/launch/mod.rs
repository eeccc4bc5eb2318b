//! Launches of the kernels: one checked way for all of them (`checked.rs`), and a file per family
//! with what is particular about it.

mod attention_fwd;
mod attention_fwd_tma;
mod block_mask;
mod block_mask_build;
mod block_scores;
mod bsr_matmul;
mod bsr_matmul_any;
#[cfg(test)]
mod bsr_matmul_fixtures;
mod bsr_matmul_maps;
mod bsr_matmul_tma;
mod bsr_parts;
mod bsr_sddmm;
mod bsr_sddmm_portable;
mod checked;
mod config;
mod fit;
mod probe;

pub use attention_fwd::AttentionFwdOperands;
pub use block_mask_build::{BlockMaskBuild, BlockMaskBuildOperands};
pub use block_scores::{BlockScores, BlockScoresOperands};
pub use bsr_matmul::BsrMatmulOperands;
pub use bsr_parts::{BsrParts, BsrPartsMemory};
pub use bsr_sddmm::BsrSddmmOperands;
pub use checked::{Launch, Operands};
pub use config::LaunchConfig;
pub use probe::PROBE_CHUNK_BYTES;
