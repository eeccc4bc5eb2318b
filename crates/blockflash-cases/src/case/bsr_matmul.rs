//! Block-sparse matrix times dense matrix.

use super::bsr_operands::{BsrCall, BsrData, BsrOperands};
use super::grid::{fraction, pairs};
use super::id::{dtype, number, pattern};
use super::limits;
use super::operands::{Operands, normal};
use super::pattern::Pattern;
use super::peer::{PeerCase, PeerCaseError};
use super::shape::Shape;
use super::work::{TILE_COLUMNS, Work};
use crate::error::Result;
use blockflash_ops::bsr_matmul::BsrProblem;
use blockflash_ops::{BsrPattern, Stream, bsr_flops};
use blockflash_sys::DType;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;

/// `c[m, n] = a[m, k]·b[k, n]` with `a` in blocks of `block_size`²; output in the type of the
/// inputs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct BsrShape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub block_size: usize,
    /// Fraction of the blocks that are stored. Each block row rounds this to whole blocks, at least
    /// one.
    pub density: f64,
    pub pattern: Pattern,
    pub dtype: DType,
}

impl BsrShape {
    /// Number of block rows.
    pub fn block_rows(&self) -> usize {
        self.m.div_ceil(self.block_size)
    }

    /// Number of block columns.
    pub fn block_columns(&self) -> usize {
        self.k.div_ceil(self.block_size)
    }

    /// Number of stored blocks.
    pub fn nnz_blocks(&self) -> usize {
        self.pattern.nnz_blocks(self.block_rows(), self.block_columns(), self.density)
    }

    /// The problem for contiguous dense operands.
    pub fn problem(&self) -> BsrProblem {
        BsrProblem::new(self.dtype, [self.m, self.n, self.k], self.block_size, self.nnz_blocks())
    }

    /// `row_ptr` and `col_idx`; columns ascend within each row.
    pub fn pattern(&self, seed: u64) -> (Vec<i32>, Vec<i32>) {
        self.pattern.draw(self.block_rows(), self.block_columns(), self.density, seed)
    }
}

impl fmt::Display for BsrShape {
    /// `m8192_n1024_k8192_b64_d0.1_uniform_f16`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { m, n, k, block_size, density, pattern, dtype } = self;
        write!(f, "m{m}_n{n}_k{k}_b{block_size}_d{density}_{pattern}_{dtype}")
    }
}

impl Shape for BsrShape {
    fn parse(parts: &[&str]) -> Option<Self> {
        let &[m, n, k, block, density, pattern_name, dtype_name] = parts else { return None };
        Some(Self {
            m: number(m, "m")?,
            n: number(n, "n")?,
            k: number(k, "k")?,
            block_size: number(block, "b").filter(|&size| size > 0)?,
            density: number(density, "d")?,
            pattern: pattern(pattern_name)?,
            dtype: dtype(dtype_name)?,
        })
    }

    fn check(&self) -> Result<(), String> {
        let Self { m, n, k, block_size, density, .. } = *self;
        limits::matmul(m, n, k)?;
        limits::size("block_size", block_size, BsrPattern::MAX_BLOCK_SIZE)?;
        fraction(density)?;
        limits::stored(self.nnz_blocks(), block_size)
    }

    fn op(&self) -> &'static str {
        "bsr_matmul"
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn work(&self) -> Work {
        let Self { m, n, k, block_size, dtype, .. } = *self;
        let (blocks, size) = (self.nnz_blocks(), dtype.size());
        let values = blocks * block_size * block_size * size;
        let indices = 4 * (blocks + self.block_rows() + 1);
        Work {
            flops: bsr_flops(&self.problem()) as f64,
            exps: 0.0,
            bytes: (values + indices + (k * n + m * n) * size) as f64,
            l2_bytes: (blocks * block_size * size) as f64 * n as f64
                + values as f64 * n.div_ceil(TILE_COLUMNS) as f64,
        }
    }

    fn group(&self) -> String {
        match self.pattern {
            Pattern::Uniform => format!("blocks of {0} × {0}", self.block_size),
            // The distribution of row lengths matters more than the block size.
            pattern => format!("pattern {pattern}"),
        }
    }

    fn peer_case(&self, seed: u64, folder: &Path) -> Result<PeerCase, PeerCaseError> {
        let pattern = self.pattern(seed);
        PeerCase::new(self.op(), self, seed)?.with_pattern(folder, &format!("{self}_"), pattern)
    }

    fn operands(&self, stream: &Stream, seed: u64) -> Result<Box<dyn Operands>> {
        let (shape, b) = ([self.m, self.k], [self.k, self.n]);
        let draw = |_: &str, shape: &[usize], lane| normal(shape, self.dtype, seed, lane);
        let data = BsrData::drawn(shape, self.block_size, self.pattern(seed), b, draw)?;
        Ok(Box::new(BsrOperands::new(BsrCall::new(self.dtype), data, stream)?))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BsrGrid {
    m: usize,
    k: usize,
    n: Vec<usize>,
    block_size: Vec<usize>,
    density: Vec<f64>,
    pattern: Vec<Pattern>,
    dtype: Vec<DType>,
}

impl BsrGrid {
    pub fn expand<C: From<BsrShape>>(&self, cases: &mut Vec<C>) -> Result<(), String> {
        let Self { m, k, .. } = *self;
        for ((dtype, n), block_size) in pairs(&pairs(&self.dtype, &self.n)?, &self.block_size)? {
            if n == 0 || [m, k].iter().any(|size| *size == 0 || !size.is_multiple_of(block_size)) {
                return Err(format!(
                    "m {m}, n {n}, k {k}: sizes must be positive, and m and k multiples of \
                     block_size {block_size}"
                ));
            }
            for (density, pattern) in pairs(&self.density, &self.pattern)? {
                fraction(density)?;
                cases.push(BsrShape { m, n, k, block_size, density, pattern, dtype }.into());
            }
        }
        Ok(())
    }
}
