use super::{Activation, Bias, BsrMatmul};
use crate::Result;
use crate::check::{Operand, finite, scaled, to_i64, vector};
use blockflash_safe::ViewMut;
use blockflash_sys::{DType, Major};

/// How a bias is spread over C.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BiasKind {
    /// No bias.
    None,
    /// One value per row of C.
    PerRow,
    /// One value per column of C.
    PerColumn,
}

/// A BSR matmul reduced to plain numbers: what `select` and `plan`
/// work on.
///
/// [`BsrMatmul::problem`] makes one from tensors, with all checks; [`BsrProblem::new`] makes one
/// without tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BsrProblem {
    /// Element type of A, B and the bias.
    pub dtype: DType,
    /// Element type of C.
    pub c_dtype: DType,
    /// Rows of A, or of Aᵀ, and of C.
    pub m: usize,
    /// Columns of B and C.
    pub n: usize,
    /// Columns of A, or of Aᵀ, and rows of B.
    pub k: usize,
    /// Whether Aᵀ is multiplied.
    pub a_transposed: bool,
    /// Rows and columns of a block of A.
    pub block_size: usize,
    /// Stored blocks of A.
    pub nnz_blocks: usize,
    /// Blocks of the longest block row of A, or an upper estimate; none: unknown, block rows count
    /// as equally long. It decides about the kernel only, not about the result.
    pub longest_row: Option<usize>,
    /// How many times as long as the mean the longest group of block rows takes, where block rows
    /// share B (blocks of 16 and 32); none: unknown, what [`longest_row`](Self::longest_row)
    /// suggests. As that, it decides about the kernel only.
    pub longest_group: Option<f64>,
    /// What is contiguous in B.
    pub b_major: Major,
    /// What is contiguous in C.
    pub c_major: Major,
    /// Elements between rows of B, or columns if these are contiguous.
    pub ldb: usize,
    /// Elements between rows of C, or columns if these are contiguous.
    pub ldc: usize,
    /// Factor of A·B.
    pub alpha: f32,
    /// Factor of C; 0 means that C is not read.
    pub beta: f32,
    /// How the bias is spread.
    pub bias: BiasKind,
    /// What is applied last.
    pub activation: Activation,
    /// Whether there is a workspace for sums of parts of tiles.
    pub workspace: bool,
    /// Whether rows of B, or columns if these are contiguous, start at multiples of 16 bytes.
    pub b_vectorized: bool,
    /// Whether rows of C, or columns if these are contiguous, start at multiples of 16 bytes.
    pub c_vectorized: bool,
}

impl BsrProblem {
    /// `C = A·B` with contiguous, aligned, row-major operands: the start of a plan without tensors.
    /// Not checked.
    pub fn new(dtype: DType, [m, n, k]: [usize; 3], block_size: usize, nnz_blocks: usize) -> Self {
        Self {
            dtype,
            c_dtype: dtype,
            m,
            n,
            k,
            a_transposed: false,
            block_size,
            nnz_blocks,
            longest_row: None,
            longest_group: None,
            b_major: Major::Row,
            c_major: Major::Row,
            ldb: n,
            ldc: n,
            alpha: 1.0,
            beta: 0.0,
            bias: BiasKind::None,
            activation: Activation::None,
            workspace: false,
            b_vectorized: vectorized(dtype, n),
            c_vectorized: vectorized(dtype, n),
        }
    }

    /// The same problem of A or Aᵀ and of a B and C of these layouts: without gaps, and aligned if
    /// that is possible.
    #[must_use]
    pub fn with_layouts(self, a_transposed: bool, b_major: Major, c_major: Major) -> Self {
        let line = |major, row, column| if major == Major::Row { row } else { column };
        let (ldb, ldc) = (line(b_major, self.n, self.k), line(c_major, self.n, self.m));
        let (b_vectorized, c_vectorized) =
            (vectorized(self.dtype, ldb), vectorized(self.c_dtype, ldc));
        Self { a_transposed, b_major, c_major, ldb, ldc, b_vectorized, c_vectorized, ..self }
    }

    /// Whether C has no element.
    pub fn is_empty(&self) -> bool {
        self.m == 0 || self.n == 0
    }

    /// Whether C is rows of whole 16 bytes in the type of A, and the old C is not read.
    pub(super) fn has_plain_output(&self) -> bool {
        let in_rows = self.c_major == Major::Row && self.c_vectorized && self.n.is_multiple_of(8);
        self.beta == 0.0 && in_rows && self.c_dtype == self.dtype
    }
}

impl BsrMatmul<'_> {
    /// Everything that can be checked without reading a tensor, and the result as plain numbers,
    /// for a C of this shape and layout.
    ///
    /// Whether a kernel exists is another question, which `select` answers; the
    /// CPU runs every problem.
    #[inline]
    pub fn problem(&self, c: &ViewMut<'_>) -> Result<BsrProblem> {
        let (a, dtype) = (self.a.pattern(), self.a.values().dtype());
        let (b, c_operand) = (Operand::new("b", &self.b), Operand::of_mut("c", c));
        let [m, k] = self.shape_of_a();
        self.transpose.map_or(Ok(()), |index| index.is_of(a))?;
        b.dtype_in(&[dtype])?;
        c_operand.dtype_in(&[DType::F16, DType::BF16, DType::F32])?;
        let &[_, n] = b.shape else { return Err(b.wrong_shape(format!("[{k}, n]"))) };
        b.shape_is(&[k, n])?;
        c_operand.shape_is(&[m, n])?;
        let bias = match &self.bias {
            Bias::None => BiasKind::None,
            Bias::PerRow(bias) => {
                vector("bias", bias, dtype, &[m])?;
                BiasKind::PerRow
            }
            Bias::PerColumn(bias) => {
                vector("bias", bias, dtype, &[n])?;
                BiasKind::PerColumn
            }
        };
        for (what, size) in [("m", m), ("n", n), ("k", k)] {
            to_i64(what, size)?;
        }
        // Kernels for Aᵀ copy aligned lines of B: a single column is one, where its rows of one
        // element are not.
        let (b_major, ldb) =
            b.lines(|stride| self.transpose.is_some() && !vectorized(b.dtype, stride))?;
        let (c_major, ldc) = c_operand.lines(|_| false)?;
        Ok(BsrProblem {
            dtype,
            c_dtype: c.dtype(),
            m,
            n,
            k,
            a_transposed: self.transpose.is_some(),
            block_size: a.block_size(),
            nnz_blocks: a.nnz_blocks(),
            longest_row: Some(self.transpose.map_or(a.longest_row(), |index| index.longest_row())),
            longest_group: a
                .groups()
                .filter(|_| self.transpose.is_none())
                .map(|groups| groups.skew),
            b_major,
            c_major,
            ldb,
            ldc,
            alpha: finite("alpha", self.alpha)?,
            beta: finite("beta", self.beta)?,
            bias,
            activation: self.activation,
            workspace: self.workspace.is_some(),
            b_vectorized: vectorized(b.dtype, ldb) && self.b.is_aligned(16),
            c_vectorized: vectorized(c.dtype(), ldc) && c.is_aligned(16),
        })
    }
}

/// FLOPs of a BSR matmul: `2 * nnz_blocks * block_size² * n`.
pub fn bsr_flops(problem: &BsrProblem) -> u64 {
    scaled(2, &[problem.nnz_blocks, problem.block_size, problem.block_size, problem.n])
}

/// Whether rows start at multiples of 16 bytes if the first one does.
fn vectorized(dtype: DType, stride: usize) -> bool {
    (stride % 8 * dtype.size()).is_multiple_of(16)
}

#[cfg(test)]
#[path = "problem_tests.rs"]
mod tests;
