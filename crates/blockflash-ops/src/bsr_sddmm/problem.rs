use super::BsrSddmm;
use crate::Result;
use crate::check::{Operand, contiguous, finite, scaled, to_i64};
use blockflash_safe::{Major, ViewMut};
use blockflash_sys::DType;

/// How a dense operand is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DenseLayout {
    /// Whether rows or columns are contiguous.
    pub major: Major,
    /// Elements between rows (row-major) or columns (column-major): the leading dimension.
    pub ld: usize,
    /// Whether each of them starts at a multiple of 16 bytes, of 16-bit elements.
    pub aligned: bool,
}

/// A sampled product reduced to plain numbers: what `select` and
/// `plan` work on.
///
/// [`BsrSddmm::problem`] makes one from tensors, with all checks; [`BsrSddmmProblem::new`] makes
/// one without tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BsrSddmmProblem {
    /// Element type of A and B.
    pub dtype: DType,
    /// Element type of the values.
    pub values_dtype: DType,
    /// Rows of A and of the pattern.
    pub m: usize,
    /// Columns of B and of the pattern.
    pub n: usize,
    /// Columns of A, rows of B.
    pub k: usize,
    /// Rows and columns of a block.
    pub block_size: usize,
    /// Blocks that are computed.
    pub nnz_blocks: usize,
    /// How A is stored.
    pub a: DenseLayout,
    /// How B is stored.
    pub b: DenseLayout,
    /// Factor of A·B.
    pub alpha: f32,
    /// Factor of the old values; 0 means that they are not read.
    pub beta: f32,
    /// Whether the values start at a multiple of 16 bytes.
    pub values_aligned: bool,
}

impl BsrSddmmProblem {
    /// `A·B` with aligned operands without gaps, A and B in these layouts: the start of a plan
    /// without tensors. Not checked.
    pub fn new(
        dtype: DType,
        [m, n, k]: [usize; 3],
        block_size: usize,
        nnz_blocks: usize,
        [a, b]: [Major; 2],
    ) -> Self {
        let layout = |major, rows, cols| {
            let ld = if major == Major::Row { cols } else { rows };
            DenseLayout { major, ld, aligned: ld.is_multiple_of(8) }
        };
        Self {
            dtype,
            values_dtype: dtype,
            m,
            n,
            k,
            block_size,
            nnz_blocks,
            a: layout(a, m, k),
            b: layout(b, k, n),
            alpha: 1.0,
            beta: 0.0,
            values_aligned: true,
        }
    }

    /// Whether there is no block.
    pub fn is_empty(&self) -> bool {
        self.nnz_blocks == 0
    }
}

/// FLOPs of a sampled product: `2 * nnz_blocks * block_size² * k`.
pub fn bsr_sddmm_flops(problem: &BsrSddmmProblem) -> u64 {
    scaled(2, &[problem.nnz_blocks, problem.block_size, problem.block_size, problem.k])
}

impl BsrSddmm<'_> {
    /// Everything that can be checked without reading a tensor, and the result as plain numbers,
    /// for values of this type and layout.
    ///
    /// Whether a kernel exists is another question, which `select` answers; the
    /// CPU runs every problem.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape), [`Error::DType`](crate::Error::DType),
    /// [`Error::Stride`](crate::Error::Stride) for a matrix of which neither rows nor columns are
    /// contiguous or for values with gaps, [`Error::InvalidScale`](crate::Error::InvalidScale),
    /// [`Error::TooLarge`](crate::Error::TooLarge).
    #[inline]
    pub fn problem(&self, values: &ViewMut<'_>) -> Result<BsrSddmmProblem> {
        let (pattern, a, b) =
            (self.pattern, Operand::new("a", &self.a), Operand::new("b", &self.b));
        let (m, n, block_size) = (pattern.rows(), pattern.cols(), pattern.block_size());
        a.dtype_in(&[DType::F16, DType::BF16, DType::F32])?;
        b.dtype_in(&[a.dtype])?;
        let &[_, k] = a.shape else { return Err(a.wrong_shape(format!("[{m}, k]"))) };
        a.shape_is(&[m, k])?;
        b.shape_is(&[k, n])?;
        Operand::of_mut("values", values).dtype_in(&[DType::F16, DType::BF16, DType::F32])?;
        contiguous("values", &values.as_view(), values.dtype(), &pattern.values_shape())?;
        for (what, size) in [("m", m), ("n", n), ("k", k)] {
            to_i64(what, size)?;
        }
        Ok(BsrSddmmProblem {
            dtype: a.dtype,
            values_dtype: values.dtype(),
            m,
            n,
            k,
            block_size,
            nnz_blocks: pattern.nnz_blocks(),
            a: DenseLayout::of(&a, self.a.is_aligned(16))?,
            b: DenseLayout::of(&b, self.b.is_aligned(16))?,
            alpha: finite("alpha", self.alpha)?,
            beta: finite("beta", self.beta)?,
            values_aligned: values.is_aligned(16),
        })
    }
}

impl DenseLayout {
    fn of(operand: &Operand<'_>, aligned: bool) -> Result<Self> {
        // A matrix of a single row or column is row- and column-major: then what a tensor map can
        // describe.
        let (major, ld) = operand.lines(|ld| ld == 0 || !ld.is_multiple_of(8))?;
        Ok(Self { major, ld, aligned: aligned && ld.is_multiple_of(8) })
    }
}

#[cfg(test)]
#[path = "problem_tests.rs"]
mod tests;
