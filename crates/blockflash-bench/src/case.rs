//! What is measured: one shape of one operation, with an id that a person can read.

use crate::random;
use blockflash_ops::attention::AttentionProblem;
use blockflash_ops::bsr_matmul::BsrProblem;
use blockflash_ops::{Align, Mask, attention_flops, bsr_flops};
use blockflash_sys::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// One measured problem.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Case {
    /// Dense attention forward.
    AttentionFwd(AttentionShape),
    /// Block-sparse matrix times dense matrix.
    BsrMatmul(BsrShape),
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

/// How the blocks of a sparse matrix are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// The same number of blocks in each row, their columns drawn at random.
    Uniform,
}

/// `c[m, n] = a[m, k]·b[k, n]` with `a` in blocks of `block_size`²; output in the type of the inputs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct BsrShape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub block_size: usize,
    /// Fraction of the blocks that are stored; a row holds this rounded to whole blocks, at least one.
    pub density: f64,
    pub pattern: Pattern,
    pub dtype: DType,
}

impl Case {
    /// Name of the operation in records.
    pub fn op(&self) -> &'static str {
        match self {
            Case::AttentionFwd(_) => "attention_fwd",
            Case::BsrMatmul(_) => "bsr_matmul",
        }
    }

    /// Useful floating-point operations; the same count for ours and for every rival.
    pub fn flops(&self) -> f64 {
        match self {
            // Only a variable-length problem has no count.
            Case::AttentionFwd(shape) => attention_flops(&shape.problem()).unwrap_or(0) as f64,
            Case::BsrMatmul(shape) => bsr_flops(&shape.problem()) as f64,
        }
    }
}

impl fmt::Display for Case {
    /// The id: `b4_s4096_h32_d64_causal_bf16`, `m8192_n1024_k8192_b64_d0.1_uniform_f16`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Case::AttentionFwd(s) => {
                write!(f, "b{}_", s.batch)?;
                match s.seqlen_q == s.seqlen_kv {
                    true => write!(f, "s{}", s.seqlen_q)?,
                    false => write!(f, "q{}_kv{}", s.seqlen_q, s.seqlen_kv)?,
                }
                write!(f, "_h{}", s.num_heads_q)?;
                if s.num_heads_kv != s.num_heads_q {
                    write!(f, "kv{}", s.num_heads_kv)?;
                }
                let mask = match s.mask {
                    MaskKind::Full => "full",
                    MaskKind::Causal => "causal",
                };
                write!(f, "_d{}_{mask}_{}", s.head_dim, s.dtype)
            }
            Case::BsrMatmul(s) => {
                let pattern = match s.pattern {
                    Pattern::Uniform => "uniform",
                };
                let BsrShape { m, n, k, block_size, density, dtype, .. } = s;
                write!(f, "m{m}_n{n}_k{k}_b{block_size}_d{density}_{pattern}_{dtype}")
            }
        }
    }
}

impl AttentionShape {
    /// The problem of contiguous tensors.
    pub fn problem(&self) -> AttentionProblem {
        let Self { batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, head_dim, dtype, .. } = *self;
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

    /// Blocks in each row.
    fn blocks_per_row(&self) -> usize {
        ((self.density * self.block_columns() as f64).round() as usize).clamp(1, self.block_columns())
    }

    /// Stored blocks.
    pub fn nnz_blocks(&self) -> usize {
        self.block_rows() * self.blocks_per_row()
    }

    /// The problem of contiguous dense operands.
    pub fn problem(&self) -> BsrProblem {
        BsrProblem::new(self.dtype, [self.m, self.n, self.k], self.block_size, self.nnz_blocks())
    }

    /// `row_ptr` and `col_idx`, ascending within each row.
    pub fn pattern(&self, seed: u64) -> (Vec<i32>, Vec<i32>) {
        let each = self.blocks_per_row();
        let row_ptr = (0..=self.block_rows()).map(|row| (row * each) as i32).collect();
        let columns = |row| random::choose(each, self.block_columns(), seed, row as u64);
        let col_idx = (0..self.block_rows()).flat_map(columns).map(|column| column as i32).collect();
        (row_ptr, col_idx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ATTENTION: AttentionShape = AttentionShape {
        batch: 4,
        seqlen_q: 4096,
        seqlen_kv: 4096,
        num_heads_q: 32,
        num_heads_kv: 32,
        head_dim: 64,
        mask: MaskKind::Causal,
        dtype: DType::BF16,
    };
    const BSR: BsrShape = BsrShape {
        m: 8192,
        n: 1024,
        k: 8192,
        block_size: 64,
        density: 0.1,
        pattern: Pattern::Uniform,
        dtype: DType::F16,
    };

    #[test]
    fn ids_are_readable() {
        assert_eq!(Case::AttentionFwd(ATTENTION).to_string(), "b4_s4096_h32_d64_causal_bf16");
        let grouped = AttentionShape { num_heads_kv: 8, seqlen_q: 1, mask: MaskKind::Full, ..ATTENTION };
        assert_eq!(Case::AttentionFwd(grouped).to_string(), "b4_q1_kv4096_h32kv8_d64_full_bf16");
        assert_eq!(Case::BsrMatmul(BSR).to_string(), "m8192_n1024_k8192_b64_d0.1_uniform_f16");
    }

    #[test]
    fn flops_count_what_is_needed() {
        let causal = AttentionShape { seqlen_q: 2, seqlen_kv: 5, ..ATTENTION };
        assert_eq!(Case::AttentionFwd(causal).flops(), 4.0 * 4.0 * 32.0 * 64.0 * 9.0); // 4 + 5 pairs
        let full = Case::AttentionFwd(AttentionShape { mask: MaskKind::Full, ..ATTENTION });
        assert_eq!(full.flops(), 4.0 * 4.0 * 32.0 * 4096.0 * 4096.0 * 64.0);
        // 12.8 blocks of a row round to 13.
        assert_eq!(Case::BsrMatmul(BSR).flops(), 2.0 * 128.0 * 13.0 * 4096.0 * 1024.0);
    }

    #[test]
    fn uniform_rows_hold_the_same_number_of_ascending_columns() {
        let (row_ptr, col_idx) = BSR.pattern(7);
        assert_eq!((row_ptr.len(), row_ptr.last()), (129, Some(&(128 * 13))));
        assert_eq!(col_idx.len(), BSR.nnz_blocks());
        for row in col_idx.chunks(13) {
            assert!(row.windows(2).all(|pair| pair[0] < pair[1]) && row.iter().all(|&column| column < 128));
        }
        assert_ne!(col_idx[..13], col_idx[13..26]);
        assert_eq!(BSR.pattern(7), (row_ptr, col_idx));
    }
}
