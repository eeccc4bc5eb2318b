//! Attention: cases, their data, the oracle, and the harness that runs a case on a device and
//! judges every output.

mod block_cases;
mod blocks;
mod case;
mod codes;
mod data;
mod edges;
mod kernels;
mod oracle;
pub mod persistent;
mod run;
mod strategy;
mod terms;

pub use block_cases::{block_cases, block_tile_cases};
pub use blocks::{BlockCase, BlockPattern, Blocks, MaskHeads, Pairs, smallest_block};
pub use case::{AttentionCase, Content, Lengths, Sequence};
pub use codes::{Codes, MoreContent, OperandScale};
pub use data::AttentionData;
pub use edges::{edge_cases, many_heads, special_cases, tile_cases};
pub use kernels::{
    KernelGroup, KernelGroups, dims_of_tile, kernel_groups, run_or_refuse, same_bits, takes_blocks,
    takes_lists_of, takes_packed,
};
pub use oracle::{AttentionReference, visible_keys};
pub use run::{AttentionInputs, AttentionOutputs, Choice, run_and_check, run_case};
pub(crate) use run::{placed, written};
pub(crate) use strategy::biases;
pub use strategy::{Limits, attention_cases, block_sparse_cases, head_dims, masks, with_terms};
pub use terms::{AlibiCase, BiasCase, BiasContent, Terms};
