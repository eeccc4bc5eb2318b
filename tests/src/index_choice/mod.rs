//! Scores of blocks of keys for each query, and the choice of the largest of them.

mod case;
mod choices;
mod garbage;
mod scores;
mod top_k_case;

pub use case::{Keys, RowsCase, ScoresCase};
pub use choices::{choice_replays, run_top_k};
pub use garbage::index_choice_survives_garbage;
pub use scores::{run_index_scores, scores_replay};
pub use top_k_case::TopKCase;

use crate::attention::Choice;
use blockflash_ops::{DType, Stream, Tensor};
use blockflash_sys::Kernel;

/// The kernels of both steps.
#[derive(Clone, Copy)]
pub struct IndexKernels {
    /// Scores.
    pub scores: Choice,
    /// Chooses.
    pub top_k: Choice,
}

impl IndexKernels {
    /// The ones that the library selects.
    pub const SELECTED: Self = Self { scores: Choice::Selected, top_k: Choice::Selected };

    /// This kernel for the step that it computes.
    pub fn with(kernel: &'static Kernel) -> Self {
        let this = Choice::This(kernel);
        match kernel.symbol().contains("top_k") {
            true => Self { top_k: this, ..Self::SELECTED },
            false => Self { scores: this, ..Self::SELECTED },
        }
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn ints(stream: &Stream, values: &[i32], shape: &[usize]) -> Result<Tensor, String> {
    Tensor::from_slice(stream, values, shape).map_err(text)
}

/// Columns behind the rows of outputs and inputs, which stay as they are or are not read.
const GAP: usize = 5;

/// Poisoned `[groups, rows, columns + GAP]`.
fn with_gap(stream: &Stream, dtype: DType, sizes: [usize; 3]) -> Result<Tensor, String> {
    let [groups, rows, columns] = sizes;
    crate::host::poisoned(stream, dtype, &[groups, rows, columns + GAP])
}

/// Checks that nothing was written between the rows of `[groups, rows, columns + GAP]`.
fn gaps_stay(bits: &[u32], columns: usize, poison: u32) -> Result<(), String> {
    for (row, bits) in bits.chunks_exact(columns + GAP).enumerate() {
        if bits[columns..].iter().any(|&bits| bits != poison) {
            return Err(format!("something is written behind row {row}"));
        }
    }
    Ok(())
}
