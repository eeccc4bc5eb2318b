//! Index arrays that kernels follow without looking at them again.

mod block_bits;
mod block_lists;
mod block_transpose;
mod bsr;
mod tensor;

pub use block_bits::BlockBitsScratch;
pub use block_lists::{BlockListArrays, BlockListScratch, BlockLists};
pub use block_transpose::BlockTransposeScratch;
pub use bsr::{BsrIndexArrays, BsrIndices, BsrStageArrays};

#[cfg(test)]
mod tests;
