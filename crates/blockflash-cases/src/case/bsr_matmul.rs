//! Block-sparse matrix times dense matrix.

use super::Case;
use super::bsr_data::BsrData;
use super::bsr_operands::{BsrCall, BsrOperands};
use super::grid::{each, fraction};
use super::id::{Fields, Id};
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
use std::path::Path;

/// `c[m, n] = a[m, k]·b[k, n]` with `a` in blocks of `block_size`²; output in the type of the
/// inputs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BsrShape {
    /// Rows of a and c.
    pub m: usize,
    /// Columns of b and c.
    pub n: usize,
    /// Columns of a and rows of b.
    pub k: usize,
    /// Rows, and columns, of a block.
    pub block_size: usize,
    /// Fraction of the blocks that are stored. Each block row rounds this to whole blocks, at least
    /// one.
    pub density: f64,
    /// How the stored blocks are distributed.
    pub pattern: Pattern,
    /// Element type of a, b and c.
    pub dtype: DType,
}

/// Sizes of a product and the blocks of its sparse matrix.
pub(super) struct Stored {
    pub(super) mnk: [usize; 3],
    /// Rows and columns of the sparse matrix.
    pub(super) shape: [usize; 2],
    pub(super) block_size: usize,
    pub(super) density: f64,
    pub(super) pattern: Pattern,
}

impl Stored {
    pub(super) fn check(&self) -> Result<(), String> {
        let [m, n, k] = self.mnk;
        limits::matmul(m, n, k)?;
        limits::size("block_size", self.block_size, BsrPattern::MAX_BLOCK_SIZE)?;
        fraction(self.density)?;
        limits::stored(self.count(), self.block_size)
    }

    /// Number of block rows and of block columns.
    pub(super) fn blocks(&self) -> [usize; 2] {
        self.shape.map(|size| size.div_ceil(self.block_size))
    }

    /// Number of stored blocks.
    pub(super) fn count(&self) -> usize {
        let [rows, columns] = self.blocks();
        self.pattern.nnz_blocks(rows, columns, self.density)
    }

    /// `row_ptr` and `col_idx`; columns ascend within each row.
    pub(super) fn draw(&self, seed: u64) -> (Vec<i32>, Vec<i32>) {
        let [rows, columns] = self.blocks();
        self.pattern.draw(rows, columns, self.density, seed)
    }
}

impl BsrShape {
    fn stored(&self) -> Stored {
        self.stored_in([self.m, self.k])
    }

    /// The blocks of a sparse matrix of this shape.
    pub(super) fn stored_in(&self, shape: [usize; 2]) -> Stored {
        let Self { m, n, k, block_size, density, pattern, .. } = *self;
        Stored { mnk: [m, n, k], shape, block_size, density, pattern }
    }

    /// `m8192_n1024_k8192_b64_d0.1_uniform`.
    pub(super) fn sizes(&mut self, id: &mut Id<'_>) -> Option<()> {
        id.field("m", &mut self.m)?;
        id.field("n", &mut self.n)?;
        id.field("k", &mut self.k)?;
        id.field("b", &mut self.block_size)?;
        id.field("d", &mut self.density)?;
        id.name(&mut self.pattern)
    }

    /// Number of block rows.
    pub fn block_rows(&self) -> usize {
        self.stored().blocks()[0]
    }

    /// Number of block columns.
    pub fn block_columns(&self) -> usize {
        self.stored().blocks()[1]
    }

    /// Number of stored blocks.
    pub fn nnz_blocks(&self) -> usize {
        self.stored().count()
    }

    /// The problem for contiguous dense operands.
    pub fn problem(&self) -> BsrProblem {
        BsrProblem::new(self.dtype, [self.m, self.n, self.k], self.block_size, self.nnz_blocks())
    }

    /// `row_ptr` and `col_idx`; columns ascend within each row.
    pub fn pattern(&self, seed: u64) -> (Vec<i32>, Vec<i32>) {
        self.stored().draw(seed)
    }
}

impl Fields for BsrShape {
    const EMPTY: Self = Self {
        m: 0,
        n: 0,
        k: 0,
        block_size: 0,
        density: 0.0,
        pattern: Pattern::Uniform,
        dtype: DType::F16,
    };

    /// `m8192_n1024_k8192_b64_d0.1_uniform_f16`.
    fn fields(&mut self, id: &mut Id<'_>) -> Option<()> {
        self.sizes(id)?;
        id.name(&mut self.dtype)
    }
}

impl Shape for BsrShape {
    fn check(&self) -> Result<(), String> {
        self.stored().check()
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

/// Grid of a suite file: every combination of the lists is a case, whose m and k are multiples of
/// the block size.
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
    /// The cases.
    ///
    /// # Errors
    /// One line that says which field is wrong.
    pub fn expand(&self) -> Result<Vec<Case>, String> {
        let (Self { m, k, .. }, mut cases) = (self, Vec::new());
        let (m, k) = (*m, *k);
        each!(dtype in self.dtype, n in self.n, block_size in self.block_size,
            density in self.density, pattern in self.pattern => {
            if block_size == 0 || [m, k].iter().any(|size| size % block_size != 0) {
                return Err(format!("m {m} and k {k} must be multiples of block_size {block_size}"));
            }
            let shape = BsrShape { m, n, k, block_size, density, pattern, dtype };
            shape.check()?;
            cases.push(shape.into());
        });
        Ok(cases)
    }
}
