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
mod launch;
mod matrix;
mod parts;
mod plan;
mod problem;
mod select;
mod stages;
mod transpose;
mod validate;
mod values;

pub use matrix::BsrMatrix;
pub use parts::BsrWorkspace;
pub use plan::{BsrPlan, plan};
pub use problem::{BiasKind, BsrProblem};
pub use select::{accepts, select};
pub use transpose::BsrTranspose;

pub(crate) use select::OP;

use crate::{Error, Result};
use blockflash_safe::{Device, Stream, Tensor, View, ViewMut};
use blockflash_sys::{DType, Row};

/// What is added to A·B, in the element type of B.
#[derive(Clone, Copy, Debug, Default)]
pub enum Bias<'a> {
    /// Nothing.
    #[default]
    None,
    /// `[m]`: one value per row of C, as a linear layer with its weights in A has it.
    PerRow(View<'a>),
    /// `[n]`: one value per column of C.
    PerColumn(View<'a>),
}

/// What is applied last, in f32.
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
    pub a: &'a BsrMatrix,
    /// The index by which A is multiplied transposed, that of its pattern; `None`: as it is.
    pub transpose: Option<&'a BsrTranspose>,
    /// The dense matrix `[k, n]` in the element type of A; each row or each column is contiguous.
    pub b: View<'a>,
    /// Factor of A·B, finite.
    pub alpha: f32,
    /// Factor of the old C, finite; with 0 C is not read.
    pub beta: f32,
    /// What is added.
    pub bias: Bias<'a>,
    /// What is applied last.
    pub activation: Activation,
    /// Memory with which several multiprocessors may share a long block row, or one of few; `None`:
    /// one computes each tile. It changes rounding and time only, and does nothing where kernels do
    /// not use it.
    pub workspace: Option<&'a BsrWorkspace>,
}

/// A call whose kernel is decided and loaded, for loops that repeat it: see [`BsrMatmul::prepare`].
#[derive(Clone, Copy, Debug)]
pub struct PreparedBsrMatmul {
    problem: BsrProblem,
    device: Device,
    /// `None` on the CPU, and where there is nothing to compute.
    row: Option<&'static Row>,
}

impl PreparedBsrMatmul {
    /// The kernel; `None` on the CPU, and where there is nothing to compute.
    pub fn row(&self) -> Option<&'static Row> {
        self.row
    }
}

impl<'a> BsrMatmul<'a> {
    /// `C = A·B`.
    pub const fn new(a: &'a BsrMatrix, b: View<'a>) -> Self {
        let (bias, activation) = (Bias::None, Activation::None);
        Self { a, transpose: None, b, alpha: 1.0, beta: 0.0, bias, activation, workspace: None }
    }

    /// `C = Aᵀ·B`, by an index of A's pattern.
    pub const fn transposed(a: &'a BsrMatrix, index: &'a BsrTranspose, b: View<'a>) -> Self {
        Self { transpose: Some(index), ..Self::new(a, b) }
    }

    /// Computes into a matrix of the caller, f16, bf16 or f32 `[m, n]` with contiguous rows or
    /// columns. Nothing is allocated and the stream is not synchronised on a GPU, so the call can
    /// be captured into a graph; on the CPU it returns when the result is there. A C without
    /// elements is fine and launches nothing.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem) and [`select`]; [`Error::DeviceMismatch`] if an
    /// operand is not on the stream's device.
    pub fn matmul_into(&self, c: ViewMut<'_>, stream: &Stream) -> Result<()> {
        let problem = launch::checked(self, &c, stream)?;
        if problem.is_empty() {
            return Ok(());
        }
        match stream.device().cuda_properties() {
            None => cpu::matmul(self, &problem, c),
            Some(gpu) => launch::launch(self, select(&problem, gpu)?, &problem, c, stream),
        }
    }

    /// Like [`matmul_into`](Self::matmul_into) with this very kernel, whatever [`select`] would
    /// take: for tests and measurements.
    ///
    /// # Errors
    /// Also [`Error::Unsupported`] if the row cannot compute this problem on this device.
    pub fn matmul_with(&self, row: &Row, c: ViewMut<'_>, stream: &Stream) -> Result<()> {
        let problem = launch::checked(self, &c, stream)?;
        let Some(gpu) = stream.device().cuda_properties() else {
            return Err(launch::no_kernel_on_cpu(row));
        };
        accepts(row, &problem, gpu)?;
        if problem.is_empty() {
            return Ok(());
        }
        launch::launch(self, row, &problem, c, stream)
    }

    /// Decides for good what [`matmul_into`](Self::matmul_into) decides anew at each call, and
    /// loads the kernel.
    ///
    /// # Errors
    /// As [`matmul_into`](Self::matmul_into), and if the kernel cannot be loaded.
    pub fn prepare(&self, c: &ViewMut<'_>, stream: &Stream) -> Result<PreparedBsrMatmul> {
        let problem = launch::checked(self, c, stream)?;
        let row = match stream.device().cuda_properties() {
            Some(gpu) if !problem.is_empty() => Some(select(&problem, gpu)?),
            _ => None,
        };
        row.map_or(Ok(()), |row| stream.device().preload(row).map(|_| ()))?;
        Ok(PreparedBsrMatmul { problem, device: *stream.device(), row })
    }

    /// Like [`matmul_into`](Self::matmul_into) with the kernel that was decided on. The matrices
    /// may be others than those that were prepared with; everything that they are checked for is
    /// checked again.
    ///
    /// # Errors
    /// Also [`Error::NotPrepared`] if sizes, strides, types, options or the device differ.
    pub fn matmul_prepared(
        &self,
        prepared: &PreparedBsrMatmul,
        c: ViewMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let problem = launch::checked(self, &c, stream)?;
        if problem != prepared.problem || *stream.device() != prepared.device {
            return Err(Error::NotPrepared { op: OP });
        }
        match prepared.row {
            Some(row) => launch::launch(self, row, &problem, c, stream),
            None if problem.is_empty() => Ok(()),
            None => cpu::matmul(self, &problem, c),
        }
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
            return Err(crate::check::Operand::new("b", &self.b).wrong_shape(format!("[{k}, n]")));
        };
        Ok([m, n])
    }

    /// m and k.
    fn shape_of_a(&self) -> [usize; 2] {
        let (rows, cols) = (self.a.rows(), self.a.cols());
        if self.transpose.is_some() { [cols, rows] } else { [rows, cols] }
    }
}
