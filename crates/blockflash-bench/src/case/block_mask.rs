//! Making a block mask on the device where attention reads it.

use super::Work;
use blockflash_sys::DType;
use serde::Serialize;

/// One of the two steps that make a causal mask in square blocks for the heads of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct BlockMaskShape {
    pub seqlen: usize,
    pub num_heads: usize,
    pub block: usize,
    pub step: MaskStep,
}

/// What is measured of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub enum MaskStep {
    /// The mean query times the mean key of each pair of blocks.
    #[allow(missing_docs)]
    Scores { head_dim: usize, dtype: DType },
    /// From such scores, which are N(0, 1) here, the best `top_k` blocks of each row among those
    /// that it sees, joined with [`SINK`] and [`WINDOW`].
    #[allow(missing_docs)]
    Choose { top_k: usize },
}

/// Blocks at the beginning that every mask visits.
pub const SINK: usize = 1;
/// Blocks before the diagonal that every mask visits.
pub const WINDOW: usize = 4;

impl BlockMaskShape {
    /// Whether such a case can be drawn and counted.
    ///
    /// # Errors
    /// What is wrong, in one line.
    pub fn check(&self) -> Result<(), String> {
        let size = match self.step {
            MaskStep::Scores { head_dim, .. } => head_dim,
            MaskStep::Choose { top_k } => top_k,
        };
        if [self.seqlen, self.num_heads, self.block, size].contains(&0) {
            return Err("making a block mask has a size of 0".to_owned());
        }
        Ok(())
    }

    /// Rows, which are also columns.
    pub fn rows(&self) -> usize {
        self.seqlen.div_ceil(self.block)
    }

    /// Element type of what is read.
    pub fn dtype(&self) -> DType {
        match self.step {
            MaskStep::Scores { dtype, .. } => dtype,
            MaskStep::Choose { .. } => DType::F32,
        }
    }

    /// Inputs once and outputs once; what one of the launches leaves to the other is not counted.
    /// Choosing has no floating-point operations, reads the scores that the causal mask shows, and
    /// lists at least the best blocks or the others.
    pub(super) fn work(&self) -> Work {
        let (heads, rows) = (self.num_heads, self.rows());
        let (flops, bytes) = match self.step {
            MaskStep::Scores { head_dim, dtype } => {
                let elements = 2 * self.seqlen * heads * head_dim;
                let scores = heads * rows * rows;
                (
                    elements + 2 * scores * head_dim,
                    elements * dtype.size() + scores * DType::F32.size(),
                )
            }
            MaskStep::Choose { top_k } => {
                let always = |row: usize| (row + 1).min(SINK + WINDOW + 1);
                let listed = |row: usize| top_k.min(row + 1).max(always(row));
                let (mut read, mut written) = (rows + 1, 2 * rows + 1);
                for row in 0..rows {
                    read += always(row) + heads * (row + 1);
                    written += listed(row);
                }
                (0, 4 * (read + heads * written))
            }
        };
        let bytes = bytes as f64;
        Work { flops: flops as f64, exps: 0.0, bytes, l2_bytes: bytes }
    }
}
