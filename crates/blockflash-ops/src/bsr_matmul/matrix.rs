use super::BsrPattern;
use super::validate::EdgeBlock;
use crate::Result;
use crate::check::{Operand, aligned};
use crate::float::Float;
use blockflash_safe::{Stream, Tensor, View};
use blockflash_sys::DType;
use half::{bf16, f16};
use std::ops::Deref;
use std::sync::Arc;

/// A block-sparse matrix in BSR format: square blocks of `block_size`, stored by block row, on the
/// CPU or a GPU. It is a [`BsrPattern`], to which it dereferences, with values.
///
/// Where blocks at the edge reach beyond `rows` and `cols`, their values are zero. Kernels rely on
/// it: they multiply these places with rows of B that do not exist and count as zero, and NaN times
/// zero is NaN. So every way to set values keeps the zeros.
///
/// Values may change, for example weights in training, by [`set_values`](Self::set_values),
/// [`values_mut`](Self::values_mut) and
/// [`BsrSddmm::sddmm_into_matrix`](crate::BsrSddmm::sddmm_into_matrix). Values that another library
/// owns stay where they are: see [`BsrView`].
///
/// Until they change, values that came from host memory by [`to`](Self::to) or
/// [`Tensor::from_slice`](blockflash_safe::Tensor::from_slice) are known to be complete: a product
/// on Hopper loads the first of them while the work in front of it in the stream still runs. That
/// saves up to a fifth of the time where a product has few columns. Work outside of this library
/// that writes them by their address is no borrow, so it has to be complete before a product is
/// queued.
#[derive(Debug)]
pub struct BsrMatrix {
    pattern: Arc<BsrPattern>,
    pub(super) values: Tensor,
}

impl BsrMatrix {
    /// A matrix of this pattern and these values, f16, bf16 or f32
    /// [`values_shape`](BsrPattern::values_shape) on the device of the pattern. Several matrices
    /// may share the pattern.
    ///
    /// ```
    /// # use blockflash_ops::{BsrMatrix, BsrPattern, Device, Tensor};
    /// # use std::sync::Arc;
    /// let stream = Device::cpu().stream()?;
    /// let pattern = Arc::new(BsrPattern::from_blocks(4, 4, 2, &[(0, 1)])?);
    /// for value in [1f32, 2.0] {
    ///     let values = Tensor::from_slice(&stream, &[value; 4], &pattern.values_shape())?;
    ///     let layer = BsrMatrix::new(Arc::clone(&pattern), values)?;
    ///     assert_eq!(layer.to_dense()?[..4], [0.0, 0.0, value, value]);
    /// }
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape), [`Error::DType`](crate::Error::DType),
    /// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch); if there are
    /// [edge blocks](BsrPattern::has_edge_blocks), on the CPU
    /// [`Error::NonzeroPadding`](crate::Error::NonzeroPadding) for values that are not zero beyond
    /// the matrix, and on a GPU [`Error::UncheckedPadding`](crate::Error::UncheckedPadding), since
    /// nothing looks at values there.
    pub fn new(pattern: impl Into<Arc<BsrPattern>>, values: Tensor) -> Result<Self> {
        let (pattern, view) = (pattern.into(), values.view());
        pattern.check_values(&view)?;
        Operand::new("values", &view).on(&pattern.device())?;
        if view.is_cpu() {
            check_padding(&pattern, &view)?;
        } else {
            pattern.no_edge_blocks("values on a GPU")?;
        }
        Ok(Self { pattern, values })
    }

    /// The pattern, which other matrices may share.
    pub fn pattern(&self) -> &Arc<BsrPattern> {
        &self.pattern
    }

    /// Element type of the values.
    pub fn dtype(&self) -> DType {
        self.values.dtype()
    }

    /// `[nnz_blocks, block_size, block_size]`: the blocks, each row-major; zero beyond `rows` and
    /// `cols`.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// Borrows pattern and values.
    pub fn view(&self) -> BsrView<'_> {
        BsrView { pattern: &self.pattern, values: self.values.view() }
    }

    /// A copy on the stream's device.
    ///
    /// # Errors
    /// Out of memory, or a failing device.
    pub fn to(&self, stream: &Stream) -> Result<Self> {
        Ok(Self {
            pattern: Arc::new(self.pattern.to(stream)?),
            values: self.values.copy_to(stream)?,
        })
    }
}

impl Deref for BsrMatrix {
    type Target = BsrPattern;

    fn deref(&self) -> &BsrPattern {
        &self.pattern
    }
}

/// A block-sparse matrix that is multiplied: a borrowed pattern, and values in memory of a
/// [`BsrMatrix`] or of anybody else. Copyable, like a [`View`].
#[derive(Clone, Copy, Debug)]
pub struct BsrView<'a> {
    pattern: &'a BsrPattern,
    values: View<'a>,
}

impl<'a> BsrView<'a> {
    /// Values of the caller, f16, bf16 or f32 [`values_shape`](BsrPattern::values_shape) without
    /// gaps, on the device of the pattern. Nothing is copied.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape), [`Error::DType`](crate::Error::DType),
    /// [`Error::Stride`](crate::Error::Stride); on a GPU
    /// [`Error::Misaligned`](crate::Error::Misaligned) for values that do not start at a multiple
    /// of 16 bytes. [`Error::UncheckedPadding`](crate::Error::UncheckedPadding) for a pattern with
    /// [edge blocks](BsrPattern::has_edge_blocks): values beyond the matrix have to be zero, and
    /// memory of the caller may change after any check. A [`BsrMatrix`] can have such blocks.
    pub fn new(pattern: &'a BsrPattern, values: View<'a>) -> Result<Self> {
        pattern.check_values(&values)?;
        pattern.no_edge_blocks("values of the caller")?;
        aligned("values", &values)?;
        Ok(Self { pattern, values })
    }

    /// The pattern.
    pub fn pattern(&self) -> &'a BsrPattern {
        self.pattern
    }

    /// `[nnz_blocks, block_size, block_size]`: the blocks, each row-major.
    pub fn values(&self) -> View<'a> {
        self.values
    }
}

impl<'a> From<&'a BsrMatrix> for BsrView<'a> {
    fn from(matrix: &'a BsrMatrix) -> Self {
        matrix.view()
    }
}

/// Checks that values on the CPU are zero beyond the matrix.
pub(super) fn check_padding(pattern: &BsrPattern, values: &View<'_>) -> Result<()> {
    fn check<T: Float>(edges: &[EdgeBlock], block_size: usize, values: &View<'_>) -> Result<()> {
        let values = values.as_slice::<T>()?;
        edges.iter().try_for_each(|edge| edge.check_padding(block_size, values))
    }
    let check = match values.dtype() {
        DType::F16 => check::<f16>,
        DType::BF16 => check::<bf16>,
        _ => check::<f32>,
    };
    check(pattern.edge_blocks(), pattern.block_size(), values)
}
