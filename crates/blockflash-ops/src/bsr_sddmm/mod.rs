//! Sampled dense-dense product (SDDMM): `alpha·A·B` at the stored blocks of a block-sparse matrix.

mod cpu;
mod plan;
mod problem;
mod select;

pub use plan::{BsrSddmmPlan, plan};
pub use problem::{BsrSddmmProblem, DenseLayout, bsr_sddmm_flops};
pub use select::{accepts, select};

pub(crate) use select::support;

use crate::check::Operand;
use crate::operation::{Operation, Prepared, Steps};
use crate::{BsrMatrix, BsrPattern, Error, Result};
use blockflash_safe::{BsrSddmmOperands, CudaProperties, Stream, Tensor, View, ViewMut};
use blockflash_sys::manifest::{self, BsrSddmmHopper, Variant};
use blockflash_sys::{DType, Kernel};

/// `values = alpha·A·B + beta·values` at the stored blocks of a block-sparse matrix `[m, n]`, with
/// dense A `[m, k]` and B `[k, n]`.
///
/// The gradient of block-sparse weights W needs it: `dW = dYᵀ·X` on the pattern of W with A = dYᵀ,
/// a permuted view of dY, and B = X. So do the scores `Q·Kᵀ` of block-sparse attention, with A = Q
/// and B a permuted view of K.
///
/// A and B are f16 or bf16 (on the CPU also f32), and each is row- or column-major: either its rows
/// or its columns are contiguous, any distance apart. Sums are f32. A [`BsrMatrix`] serves as the
/// pattern, too; its values do not count:
///
/// ```
/// # use blockflash_ops::{BsrMatrix, BsrSddmm, DType, Device, View};
/// // One block of 16 × 16 of a 64 × 32 matrix: that with element (3, 20).
/// let weights = BsrMatrix::from_coo(64, 32, 16, DType::F32, &[(3, 20, 1.0)])?;
/// let (dy, x) = (vec![0.5f32; 8 * 64], vec![2f32; 8 * 32]);
/// let dy = View::from_slice(&dy, &[8, 64])?; // [batch, outputs]
/// let x = View::from_slice(&x, &[8, 32])?; // [batch, inputs]
///
/// let stream = Device::cpu().stream()?;
/// let gradient = BsrSddmm::new(&weights, dy.permute(&[1, 0])?, x).sddmm(DType::F32, &stream)?;
/// assert_eq!(gradient.shape(), [1, 16, 16]);
/// assert!(gradient.to_vec::<f32>(&stream)?.iter().all(|&value| value == 8.0));
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct BsrSddmm<'a> {
    /// Which blocks of the product are computed, `[m, n]`.
    pub pattern: &'a BsrPattern,
    /// The dense matrix `[m, k]`.
    pub a: View<'a>,
    /// The dense matrix `[k, n]` in the element type of A.
    pub b: View<'a>,
    /// Factor of A·B, finite.
    pub alpha: f32,
    /// Factor of the old values, finite; with 0 they are not read.
    pub beta: f32,
}

/// See [`Operation::prepare`].
pub type PreparedBsrSddmm = Prepared<BsrSddmmProblem>;

impl<'a> BsrSddmm<'a> {
    /// `A·B` at the stored blocks of `pattern`.
    pub const fn new(pattern: &'a BsrPattern, a: View<'a>, b: View<'a>) -> Self {
        Self { pattern, a, b, alpha: 1.0, beta: 0.0 }
    }

    /// Computes into values of the caller, f16, bf16 or f32 `[nnz_blocks, block_size, block_size]`
    /// without gaps: the [`values_shape`](BsrPattern::values_shape) of the pattern. What blocks
    /// at the edge have beyond the matrix becomes zero. Nothing is allocated and the stream is not
    /// synchronised on a GPU, so the call can be captured into a graph; on the CPU it returns when
    /// the result is there. A pattern without blocks is fine and launches nothing.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem) and `select`; [`Error::DeviceMismatch`] if an
    /// operand is not on the stream's device.
    pub fn sddmm_into(&self, values: ViewMut<'_>, stream: &Stream) -> Result<()> {
        self.run(values, stream)
    }

    /// Like [`sddmm_into`](Self::sddmm_into), into the values of a matrix of the same pattern. On a
    /// GPU this is the write that also supports blocks at the edge. With weights in the matrix,
    /// alpha = −rate and beta = 1 it is a step of gradient descent in one launch, rounded to the
    /// type of the weights.
    ///
    /// # Errors
    /// Also [`Error::InvalidBsr`] if the matrix has another pattern.
    pub fn sddmm_into_matrix(&self, matrix: &mut BsrMatrix, stream: &Stream) -> Result<()> {
        matrix.has_pattern_of(self.pattern)?;
        self.sddmm_into(matrix.unchecked_values_mut(), stream)
    }

    /// Allocates values in this element type, f16, bf16 or f32, and computes them.
    ///
    /// # Errors
    /// As [`sddmm_into`](Self::sddmm_into), and out of memory; [`Error::InvalidScale`] if `beta` is
    /// not 0, since there are no old values.
    pub fn sddmm(&self, dtype: DType, stream: &Stream) -> Result<Tensor> {
        if self.beta != 0.0 {
            let expected = "0 without old values";
            return Err(Error::InvalidScale { what: "beta", value: self.beta, expected });
        }
        let mut values = Tensor::empty(stream, dtype, &self.pattern.values_shape())?;
        self.sddmm_into(values.view_mut(), stream)?;
        Ok(values)
    }
}

impl Steps for BsrSddmm<'_> {
    type Problem = BsrSddmmProblem;
    type Plan = BsrSddmmPlan;
    type Out<'o> = ViewMut<'o>;

    fn is_empty(problem: &BsrSddmmProblem) -> bool {
        problem.is_empty()
    }

    #[inline]
    fn checked(&self, values: &ViewMut<'_>, stream: &Stream) -> Result<BsrSddmmProblem> {
        let problem = self.problem(values)?;
        let device = stream.device();
        Operand::new("pattern", &self.pattern.col_idx().view()).on(device)?;
        Operand::new("a", &self.a).on(device)?;
        Operand::new("b", &self.b).on(device)?;
        Operand::of_mut("values", values).on(device)?;
        Ok(problem)
    }

    fn plan(
        kernel: &'static Kernel,
        problem: &BsrSddmmProblem,
        gpu: &CudaProperties,
    ) -> Result<BsrSddmmPlan> {
        plan::planned(kernel, problem, gpu)
    }

    fn launch(
        &self,
        kernel: &Kernel,
        BsrSddmmPlan { params, config }: &BsrSddmmPlan,
        _: &BsrSddmmProblem,
        values: ViewMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let (pattern, a, b) = (self.pattern.indices(), self.a, self.b);
        let operands = BsrSddmmOperands { pattern, a, b, values };
        match kernel.variant {
            Variant::BsrSddmmHopper(_) => {
                stream.launch::<BsrSddmmHopper>(kernel, config, params, operands)?;
            }
            _ => stream.launch::<manifest::BsrSddmm>(kernel, config, params, operands)?,
        }
        Ok(())
    }

    fn compute(&self, problem: &BsrSddmmProblem, values: ViewMut<'_>, _: &Stream) -> Result<()> {
        cpu::sddmm(self, problem, values)
    }
}
