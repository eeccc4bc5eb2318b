//! The one oracle of blockflash: every operation again, slowly and independently of the library, in
//! f64, beside a plain computation in the precision of its tensors. The test suites and
//! `blockflash … --check` share it.
//!
//! - [`attention_row`], [`index_attention_row`], [`merged_row`], [`rotated`], [`ProductRow`],
//!   [`Dot`] and [`BlockMean`] compute one row or element, [`AttentionGradients`] what one query
//!   adds to gradients; what a correct computation is free to round is in [`Rounding`].
//! - [`tolerance`] judges whole tensors: the rule of the test suites.
//! - [`page_summary`] and [`page_choice`] judge one page, and one list of pages;
//!   [`index_scores_row`] and [`largest_columns`] scores of blocks for a query and their choice.
//! - [`attention`], [`attention_backward`], [`bsr_matmul`], [`bsr_sddmm`] and [`block_scores`]
//!   judge results of any size by a sample of their rows: the rule of `--check`, which needs one
//!   row at a time.
#![forbid(unsafe_code)]

mod attention;
mod attention_backward;
mod attention_gradients;
mod attention_merge;
mod attention_row;
mod block_scores;
mod blocks;
mod bsr_matmul;
mod bsr_sddmm;
mod code_row;
mod comparison;
mod elements;
mod index_attention;
mod index_choice;
mod page_choice;
mod product;
mod rotary;
mod rounding;
mod scores;
mod sequences;
pub mod tolerance;

pub use attention::{attention, attention_output};
pub use attention_backward::{AttentionBackwardCase, attention_backward};
pub use attention_gradients::{AttentionGradients, GradientSums, Pair, Query};
pub use attention_merge::merged_row;
pub use attention_row::{AttentionRow, Precision, attention_row, visible};
pub use block_scores::{BlockMean, block_scores};
pub use blocks::{Bits, Blocks};
pub use bsr_matmul::{BsrCase, bsr_matmul};
pub use bsr_sddmm::{SddmmCase, bsr_sddmm};
pub use code_row::{CODE_PRODUCTS, CodeRow};
pub use comparison::{Comparison, Mismatch};
pub use elements::{Element, Elements, round};
pub use index_attention::{index_attention_row, listed_keys};
pub use index_choice::{IndexQuery, index_block, index_scores_row, largest_columns};
pub use page_choice::{PageScore, page_choice, page_summary};
pub use product::{Activation, Dot, Epilogue, ProductRow};
pub use rotary::rotated;
pub use rounding::{
    CODE_TRUNCATION, PRODUCTS, PartialSums, ProductSum, Rounding, Sizes, TRUNCATION,
    subnormal_roundoff, unit_roundoff,
};
pub use scores::{Added, Scores};
pub use sequences::AttentionCase;

#[cfg(test)]
mod sequences_tests;
#[cfg(test)]
mod tests;
