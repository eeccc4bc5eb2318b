//! Block-sparse (BSR) times dense: `C = activation(alpha·A·B + beta·C + bias)`, also with Aᵀ; and
//! dense times block-sparse.

mod block_diagonal;
mod build;
mod coarsen;
mod cost;
mod cpu;
mod dense_sparse;
mod from_tensors;
mod grouping;
mod matrix;
mod narrow;
mod parts;
mod pattern;
mod plan;
mod portable;
mod problem;
mod select;
mod stages;
mod transpose;
mod validate;
mod values;

pub use matrix::{BsrMatrix, BsrView};
pub use parts::BsrWorkspace;
pub use pattern::BsrPattern;
pub use plan::{BsrMatmulPlan, plan};
pub use problem::{BiasKind, BsrProblem, bsr_flops};
pub use select::{accepts, select};
pub use transpose::BsrTranspose;

pub(crate) use select::support;

use crate::check::Operand;
use crate::operation::{Operation, Prepared, Steps};
use crate::{Error, Result};
use blockflash_safe::{BsrMatmulOperands, BsrParts, CudaProperties, Stream, Tensor, View, ViewMut};
use blockflash_sys::manifest::{self, BsrMatmulAny, BsrMatmulHopper, BsrMatmulNarrow, Variant};
use blockflash_sys::{DType, Kernel};

/// The bias that is added to A·B, in the element type of B.
#[derive(Clone, Copy, Debug, Default)]
pub enum Bias<'a> {
    /// Nothing.
    #[default]
    None,
    /// `[m]`: one value per row of C, as in a linear layer whose weights are A.
    PerRow(View<'a>),
    /// `[n]`: one value per column of C.
    PerColumn(View<'a>),
}

/// The activation, which is applied last, in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// Nothing.
    #[default]
    None,
    /// `max(x, 0)`.
    Relu,
    /// `x·Φ(x)` with the exact normal distribution (erf), not the tanh approximation.
    Gelu,
    /// `x / (1 + exp(-x))`.
    Silu,
}

/// `C = activation(alpha·A·B + beta·C + bias)` with a block-sparse A `[m, k]` and dense B `[k, n]`
/// and C `[m, n]`; with [`transpose`](Self::transpose) the block-sparse matrix is `[k, m]`, and Aᵀ
/// takes the place of A.
///
/// A and B are f16 or bf16 (on the CPU also f32), C is f16, bf16 or f32. Sums are f32. B and C are
/// row-major or, as a permuted view of a row-major matrix is, column-major, each as it likes. Their
/// rows or columns may be any number of elements apart and start anywhere; 16-byte aligned ones are
/// faster, and some kernels take no others of B. Dense times block-sparse is this product of
/// transposed views: [`linear`](Self::linear), [`dense_sparse`](Self::dense_sparse); a batch of
/// products with a pattern each is this product of a block diagonal: [`batched`](Self::batched).
/// Fields left at their default do nothing:
///
/// ```
/// # use blockflash_ops::{Activation, BsrMatmul, BsrMatrix, DType, View};
/// # let a = BsrMatrix::from_coo(64, 64, 16, DType::F32, &[(3, 5, 1.0)])?;
/// # let data = vec![1f32; 64 * 8];
/// # let b = View::from_slice(&data, &[64, 8])?;
/// let layer = BsrMatmul { activation: Activation::Relu, ..BsrMatmul::new(&a, b) };
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct BsrMatmul<'a> {
    /// The block-sparse matrix, `[m, k]` or, transposed, `[k, m]`.
    pub a: BsrView<'a>,
    /// The transposed index of A's pattern, by which Aᵀ is multiplied; `None` multiplies A.
    pub transpose: Option<&'a BsrTranspose>,
    /// The dense matrix `[k, n]` in the element type of A; each row or each column is contiguous.
    pub b: View<'a>,
    /// Factor of A·B, finite.
    pub alpha: f32,
    /// Factor of the old C, finite; with 0 C is not read.
    pub beta: f32,
    /// The bias.
    pub bias: Bias<'a>,
    /// The activation.
    pub activation: Activation,
    /// Memory with which several SMs may share a long block row, or each tile when tiles are few;
    /// `None` assigns each tile to one SM. It affects only rounding and time, and kernels without
    /// support for it ignore it.
    pub workspace: Option<&'a BsrWorkspace>,
}

/// See [`Operation::prepare`].
pub type PreparedBsrMatmul = Prepared<BsrProblem>;

impl<'a> BsrMatmul<'a> {
    /// `C = A·B`, of a [`BsrMatrix`] or of a [`BsrView`] with values of the caller.
    pub fn new(a: impl Into<BsrView<'a>>, b: View<'a>) -> Self {
        let (a, bias, activation) = (a.into(), Bias::None, Activation::None);
        Self { a, transpose: None, b, alpha: 1.0, beta: 0.0, bias, activation, workspace: None }
    }

    /// `C = Aᵀ·B`, by an index of A's pattern.
    pub fn transposed(a: impl Into<BsrView<'a>>, index: &'a BsrTranspose, b: View<'a>) -> Self {
        Self { transpose: Some(index), ..Self::new(a, b) }
    }

    /// Computes into the caller's matrix, f16, bf16 or f32 `[m, n]` with contiguous rows or
    /// columns. On a GPU nothing is allocated and the stream is not synchronised, so a graph can
    /// capture the call. On the CPU it returns when the result is there. A C without elements is
    /// valid and launches nothing.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem) and `select`; [`Error::DeviceMismatch`] if an
    /// operand is not on the stream's device.
    pub fn matmul_into(&self, c: ViewMut<'_>, stream: &Stream) -> Result<()> {
        self.run(c, stream)
    }

    /// Allocates C in this element type, f16, bf16 or f32, and computes it.
    ///
    /// # Errors
    /// As [`matmul_into`](Self::matmul_into), and out of memory; [`Error::InvalidScale`] if `beta`
    /// is not 0, since there is no old C.
    pub fn matmul(&self, dtype: DType, stream: &Stream) -> Result<Tensor> {
        let mut c = Tensor::empty(stream, dtype, &self.new_c()?)?;
        self.matmul_into(c.view_mut(), stream)?;
        Ok(c)
    }

    /// Shape of a C that is allocated for the result.
    fn new_c(&self) -> Result<[usize; 2]> {
        if self.beta != 0.0 {
            return Err(Error::InvalidScale {
                what: "beta",
                value: self.beta,
                expected: "0 without an old C",
            });
        }
        let [m, k] = self.shape_of_a();
        let &[_, n] = self.b.shape() else {
            return Err(Operand::new("b", &self.b).wrong_shape(format!("[{k}, n]")));
        };
        Ok([m, n])
    }

    /// m and k.
    fn shape_of_a(&self) -> [usize; 2] {
        let (rows, cols) = (self.a.pattern().rows(), self.a.pattern().cols());
        if self.transpose.is_some() { [cols, rows] } else { [rows, cols] }
    }

    /// The parts of long tiles along K, for kernels that support it and callers who lend memory for
    /// the partial sums.
    fn parts(&self, kernel: &Kernel, n: usize, most: usize) -> Option<BsrParts<'a>> {
        let (Variant::BsrMatmulHopper(tile), Some(workspace)) = (&kernel.variant, self.workspace)
        else {
            return None;
        };
        let pattern = self.a.pattern();
        let lengths = match (self.transpose, pattern.groups()) {
            (Some(index), _) => index.lengths(),
            (None, Some(groups)) if tile.gathers() => &groups.lengths,
            (None, _) => pattern.lengths(),
        };
        workspace.parts(tile, lengths, tile.tile().tiles_n(n as u64) as usize, most)
    }
}

impl<'a> Bias<'a> {
    fn view(&self) -> Option<View<'a>> {
        match *self {
            Bias::None => None,
            Bias::PerRow(bias) | Bias::PerColumn(bias) => Some(bias),
        }
    }
}

impl Steps for BsrMatmul<'_> {
    type Problem = BsrProblem;
    type Plan = BsrMatmulPlan;
    type Out<'o> = ViewMut<'o>;

    fn is_empty(problem: &BsrProblem) -> bool {
        problem.is_empty()
    }

    #[inline]
    fn checked(&self, c: &ViewMut<'_>, stream: &Stream) -> Result<BsrProblem> {
        let problem = self.problem(c)?;
        let device = stream.device();
        Operand::new("the pattern of a", &self.a.pattern().row_ptr().view()).on(device)?;
        Operand::new("a", &self.a.values()).on(device)?;
        if let Some(index) = self.transpose {
            Operand::new("transpose", &index.row_ptr().view()).on(device)?;
        }
        Operand::new("b", &self.b).on(device)?;
        Operand::of_mut("c", c).on(device)?;
        self.workspace.map_or(Ok(()), |workspace| workspace.on(device))?;
        self.bias.view().map_or(Ok(()), |bias| Operand::new("bias", &bias).on(device))?;
        Ok(problem)
    }

    fn plan(
        kernel: &'static Kernel,
        problem: &BsrProblem,
        gpu: &CudaProperties,
    ) -> Result<BsrMatmulPlan> {
        plan::planned(kernel, problem, gpu)
    }

    fn launch(
        &self,
        kernel: &Kernel,
        plan: &BsrMatmulPlan,
        problem: &BsrProblem,
        c: ViewMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let mut config = plan.config;
        let parts = self.parts(kernel, problem.n, plan.parts);
        if let (Some(parts), Some(gpu)) = (&parts, stream.device().cuda_properties()) {
            config = plan.with_parts(parts.begin[0] as usize, kernel, problem, gpu)?;
        }
        let operands = BsrMatmulOperands {
            indices: self.transpose.map_or(self.a.pattern().indices(), BsrTranspose::indices),
            values: self.a.values(),
            parts,
            b: self.b,
            c,
            bias: self.bias.view(),
        };
        let (config, params) = (&config, &plan.params);
        match kernel.variant {
            Variant::BsrMatmulHopper(_) => {
                stream.launch::<BsrMatmulHopper>(kernel, config, params, operands)?;
            }
            Variant::BsrMatmulNarrow(tile) => {
                let lengths = self.a.pattern().lengths();
                let (narrow, config) = narrow::launch(&tile, params, config, plan.share, lengths)?;
                stream.launch::<BsrMatmulNarrow>(kernel, &config, &narrow, operands)?;
            }
            Variant::BsrMatmulAny(_) => {
                stream.launch::<BsrMatmulAny>(
                    kernel,
                    config,
                    &plan.any_params(problem),
                    operands,
                )?;
            }
            _ => stream.launch::<manifest::BsrMatmul>(kernel, config, params, operands)?,
        }
        Ok(())
    }

    fn compute(&self, problem: &BsrProblem, c: ViewMut<'_>, _: &Stream) -> Result<()> {
        cpu::matmul(self, problem, c)
    }
}
