//! Construction of a block mask on the device where attention reads it.

use super::Case;
use super::grid::each;
use super::id::{Fields, Id};
use super::limits;
use super::mask_operands::{Choose, SINK, Scores, WINDOW};
use super::operands::Operands;
use super::shape::Shape;
use super::work::Work;
use crate::error::Result;
use blockflash_ops::{BlockGeometry, Stream};
use blockflash_sys::{DType, HeadDims};
use serde::{Deserialize, Serialize};

/// One of the two steps that make a causal mask in square blocks for the heads of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BlockMaskShape {
    /// Queries, and keys, of the sequence.
    pub seqlen: usize,
    /// Heads of q, k and the mask.
    pub num_heads: usize,
    /// Queries, and keys, of a block.
    pub block: usize,
    /// What is computed.
    pub step: MaskStep,
}

/// The step that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub enum MaskStep {
    /// Scores: the mean query times the mean key of each pair of blocks.
    Scores {
        /// Elements of a row of a head.
        head_dim: usize,
        /// Element type of q and k.
        dtype: DType,
    },
    /// The mask from such scores, which are N(0, 1) here: the best `top_k` visible blocks of each
    /// row, joined with the first block and four blocks before the diagonal.
    Choose {
        /// Blocks of a row that are chosen.
        top_k: usize,
    },
}

impl BlockMaskShape {
    /// Number of block rows, which equals the number of block columns.
    pub fn rows(&self) -> usize {
        self.seqlen.div_ceil(self.block)
    }
}

impl Fields for BlockMaskShape {
    const EMPTY: Self =
        Self { seqlen: 0, num_heads: 0, block: 0, step: MaskStep::Choose { top_k: 0 } };

    /// `mask_s32768_h16_b128_scores_d128_bf16`, `mask_s32768_h16_b128_top32`.
    fn fields(&mut self, id: &mut Id<'_>) -> Option<()> {
        id.word("mask")?;
        id.field("s", &mut self.seqlen)?;
        id.field("h", &mut self.num_heads)?;
        id.field("b", &mut self.block)?;
        if id.has("scores", false) {
            self.step = MaskStep::Scores { head_dim: 0, dtype: DType::F16 };
        }
        match &mut self.step {
            MaskStep::Scores { head_dim, dtype } => {
                id.word("scores")?;
                id.field("d", head_dim)?;
                id.name(dtype)
            }
            MaskStep::Choose { top_k } => id.field("top", top_k),
        }
    }
}

impl Shape for BlockMaskShape {
    fn check(&self) -> Result<(), String> {
        let size = match self.step {
            MaskStep::Scores { head_dim, .. } => head_dim,
            MaskStep::Choose { top_k } => top_k,
        };
        if [self.block, size].contains(&0) {
            return Err("a block-mask case has a size of 0".to_owned());
        }
        limits::attention(1, [self.seqlen; 2], [self.num_heads; 2], HeadDims::all(size))?;
        limits::elements("scores", &[self.num_heads, self.rows(), self.rows()])
    }

    fn op(&self) -> &'static str {
        "block_mask_build"
    }

    /// Element type of the inputs.
    fn dtype(&self) -> DType {
        match self.step {
            MaskStep::Scores { dtype, .. } => dtype,
            MaskStep::Choose { .. } => DType::F32,
        }
    }

    /// Inputs once and outputs once; intermediate data between the launches is not counted.
    /// Choosing has no floating-point operations, reads the scores that the causal mask leaves
    /// visible, and lists at least the best blocks or the always visited ones.
    fn work(&self) -> Work {
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

    fn group(&self) -> String {
        let what = match self.step {
            MaskStep::Scores { .. } => "scores",
            MaskStep::Choose { .. } => "mask",
        };
        format!("{what} of blocks of {0} × {0}", self.block)
    }

    fn operands(&self, stream: &Stream, seed: u64) -> Result<Box<dyn Operands>> {
        let Self { seqlen, num_heads, block, step } = *self;
        let geometry = BlockGeometry::new(seqlen, seqlen, block, block)?;
        Ok(match step {
            MaskStep::Scores { head_dim, dtype } => {
                Box::new(Scores::new(geometry, [num_heads, head_dim], dtype, stream, seed)?)
            }
            MaskStep::Choose { top_k } => {
                Box::new(Choose::new(geometry, num_heads, top_k, stream, seed)?)
            }
        })
    }
}

/// Grid of a suite file: each combination gives two cases, the scores and the mask from scores.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockMaskGrid {
    seqlen: Vec<usize>,
    num_heads: usize,
    head_dim: usize,
    block: Vec<usize>,
    top_k: usize,
    dtype: Vec<DType>,
}

impl BlockMaskGrid {
    /// The cases.
    ///
    /// # Errors
    /// One line that says which field is wrong.
    pub fn expand(&self) -> Result<Vec<Case>, String> {
        let Self { num_heads, head_dim, top_k, .. } = *self;
        let scores = self.dtype.iter().map(|&dtype| MaskStep::Scores { head_dim, dtype });
        let steps: Vec<_> = scores.chain([MaskStep::Choose { top_k }]).collect();
        let mut cases = Vec::new();
        each!(seqlen in self.seqlen, block in self.block, step in steps => {
            let shape = BlockMaskShape { seqlen, num_heads, block, step };
            shape.check()?;
            cases.push(shape.into());
        });
        Ok(cases)
    }
}
