//! What is measured: one shape of one operation, with an id that a person can read.

mod block_mask;
mod block_sparse;
mod bsr_sddmm;
mod parse;
mod pattern;
mod varlen;
mod work;

pub use block_mask::{BlockMaskShape, MaskStep, SINK as MASK_SINK, WINDOW as MASK_WINDOW};
pub use block_sparse::BlockSparseShape;
pub use bsr_sddmm::SddmmShape;
pub use pattern::Pattern;
pub use varlen::{Lengths, LengthsError, VarlenShape};
pub use work::{TILE_COLUMNS, TILE_ROWS, Work};

use blockflash_ops::attention::AttentionProblem;
use blockflash_ops::bsr_matmul::BsrProblem;
use blockflash_ops::{Align, Mask};
use blockflash_sys::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// One measured problem.
#[derive(Clone, Debug, PartialEq)]
pub enum Case {
    /// Dense attention forward.
    AttentionFwd(AttentionShape),
    /// Attention forward over packed sequences of different lengths; in records the operation of
    /// the dense one.
    VarlenFwd(VarlenShape),
    /// Attention forward over a mask of blocks.
    BlockSparseFwd(BlockSparseShape),
    /// Scores of blocks, or a mask of blocks from scores.
    BlockMaskBuild(BlockMaskShape),
    /// Block-sparse matrix times dense matrix.
    BsrMatmul(BsrShape),
    /// Dense times dense at the blocks of a sparse matrix.
    BsrSddmm(SddmmShape),
}

/// Masks that suites know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum MaskKind {
    Full,
    /// The diagonal ends at the last key.
    Causal,
}

/// Dense attention over `[batch, seqlen, num_heads, head_dim]`, contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[allow(missing_docs)]
pub struct AttentionShape {
    pub batch: usize,
    pub seqlen_q: usize,
    pub seqlen_kv: usize,
    pub num_heads_q: usize,
    pub num_heads_kv: usize,
    pub head_dim: usize,
    pub mask: MaskKind,
    pub dtype: DType,
}

/// `c[m, n] = a[m, k]·b[k, n]` with `a` in blocks of `block_size`²; output in the type of the
/// inputs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct BsrShape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub block_size: usize,
    /// Fraction of the blocks that are stored; a row holds this rounded to whole blocks, at least
    /// one.
    pub density: f64,
    pub pattern: Pattern,
    pub dtype: DType,
}

impl Case {
    /// Name of the operation in records.
    pub fn op(&self) -> &'static str {
        match self {
            Case::AttentionFwd(_) | Case::VarlenFwd(_) => "attention_fwd",
            Case::BlockSparseFwd(_) => "block_sparse_fwd",
            Case::BlockMaskBuild(_) => "block_mask_build",
            Case::BsrMatmul(_) => "bsr_matmul",
            Case::BsrSddmm(_) => "bsr_sddmm",
        }
    }

    /// Element type of the inputs.
    pub fn dtype(&self) -> DType {
        match self {
            Case::AttentionFwd(shape) => shape.dtype,
            Case::VarlenFwd(shape) => shape.dtype,
            Case::BlockSparseFwd(shape) => shape.dtype,
            Case::BlockMaskBuild(shape) => shape.dtype(),
            Case::BsrMatmul(shape) => shape.dtype,
            Case::BsrSddmm(shape) => shape.dtype,
        }
    }
}

impl fmt::Display for MaskKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MaskKind::Full => "full",
            MaskKind::Causal => "causal",
        })
    }
}

/// `s4096_h32`, `q1_kv8192_h32kv8`.
fn sizes(f: &mut fmt::Formatter<'_>, seqlens: [usize; 2], heads: [usize; 2]) -> fmt::Result {
    match seqlens {
        [q, kv] if q == kv => write!(f, "s{q}")?,
        [q, kv] => write!(f, "q{q}_kv{kv}")?,
    }
    shared(f, heads)
}

/// `_h32`, `_h32kv8`.
fn shared(f: &mut fmt::Formatter<'_>, heads: [usize; 2]) -> fmt::Result {
    match heads {
        [q, kv] if q == kv => write!(f, "_h{q}"),
        [q, kv] => write!(f, "_h{q}kv{kv}"),
    }
}

impl fmt::Display for Case {
    /// The id: `b4_s4096_h32_d64_causal_bf16`, `varlen4096+512x2_h16_d128_causal_bf16`,
    /// `b1_s16384_h16_d128_q128kv128_d0.25_uniform_full_bf16`,
    /// `mask_s32768_h16_b128_scores_d128_bf16`, `mask_s32768_h16_b128_top32`,
    /// `m8192_n1024_k8192_b64_d0.1_uniform_f16`,
    /// `sddmm_m4096_n4096_k1024_b64_d0.1_uniform_column_row_f16`. It can be read back.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Case::AttentionFwd(s) => {
                write!(f, "b{}_", s.batch)?;
                sizes(f, [s.seqlen_q, s.seqlen_kv], [s.num_heads_q, s.num_heads_kv])?;
                write!(f, "_d{}_{}_{}", s.head_dim, s.mask, s.dtype)
            }
            Case::VarlenFwd(s) => {
                write!(f, "varlen{}", s.lengths)?;
                shared(f, [s.num_heads_q, s.num_heads_kv])?;
                write!(f, "_d{}_{}_{}", s.head_dim, s.mask, s.dtype)
            }
            Case::BlockSparseFwd(s) => {
                write!(f, "b{}_", s.batch)?;
                sizes(f, [s.seqlen_q, s.seqlen_kv], [s.num_heads_q, s.num_heads_kv])?;
                if s.mask_heads != s.num_heads_q {
                    write!(f, "m{}", s.mask_heads)?;
                }
                write!(f, "_d{}_q{}kv{}_d{}_", s.head_dim, s.block_q, s.block_kv, s.density)?;
                write!(f, "{}_{}_{}", s.pattern, s.mask, s.dtype)
            }
            Case::BlockMaskBuild(BlockMaskShape { seqlen, num_heads, block, step }) => {
                write!(f, "mask_s{seqlen}_h{num_heads}_b{block}_")?;
                match step {
                    MaskStep::Scores { head_dim, dtype } => write!(f, "scores_d{head_dim}_{dtype}"),
                    MaskStep::Choose { top_k } => write!(f, "top{top_k}"),
                }
            }
            Case::BsrMatmul(s) => {
                let BsrShape { m, n, k, block_size, density, pattern, dtype } = s;
                write!(f, "m{m}_n{n}_k{k}_b{block_size}_d{density}_{pattern}_{dtype}")
            }
            Case::BsrSddmm(s) => {
                let SddmmShape { m, n, k, block_size, density, pattern, a_major, b_major, dtype } =
                    s;
                let (a, b) = (a_major.name(), b_major.name());
                write!(f, "sddmm_m{m}_n{n}_k{k}_b{block_size}_d{density}_{pattern}_{a}_{b}_{dtype}")
            }
        }
    }
}

impl AttentionShape {
    /// The problem of contiguous tensors.
    pub fn problem(&self) -> AttentionProblem {
        let Self { batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, head_dim, dtype, .. } =
            *self;
        let sizes = [batch, seqlen_q, seqlen_kv];
        let problem = AttentionProblem::dense(dtype, sizes, [num_heads_q, num_heads_kv], head_dim);
        AttentionProblem { mask: self.mask(), ..problem }
    }

    /// The mask as the library takes it.
    pub fn mask(&self) -> Mask {
        match self.mask {
            MaskKind::Full => Mask::Full,
            MaskKind::Causal => Mask::Causal { align: Align::BottomRight },
        }
    }
}

impl BsrShape {
    /// Rows of blocks.
    pub fn block_rows(&self) -> usize {
        self.m.div_ceil(self.block_size)
    }

    /// Columns of blocks.
    pub fn block_columns(&self) -> usize {
        self.k.div_ceil(self.block_size)
    }

    /// Stored blocks.
    pub fn nnz_blocks(&self) -> usize {
        self.pattern.nnz_blocks(self.block_rows(), self.block_columns(), self.density)
    }

    /// The problem of contiguous dense operands.
    pub fn problem(&self) -> BsrProblem {
        BsrProblem::new(self.dtype, [self.m, self.n, self.k], self.block_size, self.nnz_blocks())
    }

    /// `row_ptr` and `col_idx`, ascending within each row.
    pub fn pattern(&self, seed: u64) -> (Vec<i32>, Vec<i32>) {
        self.pattern.draw(self.block_rows(), self.block_columns(), self.density, seed)
    }
}

#[cfg(test)]
mod tests;
