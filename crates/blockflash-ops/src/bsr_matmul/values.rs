//! New values in a matrix with a fixed pattern, for training and for weights that change.
//!
//! Kernels rely on zeros where blocks reach beyond the matrix. Every way to write preserves them:
//! it checks the values, refuses matrices that have such places, or is a kernel that writes zeros
//! there.

use super::BsrMatrix;
use super::matrix::check_padding;
use crate::Result;
use crate::check::{Operand, contiguous};
use blockflash_safe::{Stream, Tensor, ViewMut};
use blockflash_sys::DType;
use half::{bf16, f16};

impl BsrMatrix {
    /// Copies new values into the matrix: `[nnz_blocks, block_size, block_size]` in its element
    /// type, in host memory or on its device. Nothing else changes, including the address of the
    /// values: a captured graph computes with the new ones when it is launched again, and an index
    /// ([`BsrTranspose`](super::BsrTranspose)) of the matrix remains valid.
    ///
    /// Values in a tensor on the GPU of the matrix are copied asynchronously on the stream. They
    /// cannot be checked then, so a matrix with [edge blocks] takes values from host memory only.
    ///
    /// ```
    /// # use blockflash_ops::{BsrMatrix, DType, Device, Tensor};
    /// let stream = Device::cpu().stream()?;
    /// let mut weights = BsrMatrix::from_coo(4, 4, 2, DType::F32, &[(0, 3, 1.0)])?;
    /// let values = Tensor::from_slice(&stream, &[5.0f32, 6.0, 7.0, 8.0], &[1, 2, 2])?;
    /// weights.set_values(&values, &stream)?;
    /// assert_eq!(weights.to_dense()?[..8], [0.0, 0.0, 5.0, 6.0, 0.0, 0.0, 7.0, 8.0]);
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// # Errors
    /// The values stay as they were with [`Error::Shape`](crate::Error::Shape),
    /// [`Error::DType`](crate::Error::DType),
    /// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch) if the stream is not on the device
    /// of the matrix or the values are on a third one,
    /// [`Error::NonzeroPadding`](crate::Error::NonzeroPadding) for values in host memory that are
    /// not zero beyond the matrix, and
    /// [`Error::UncheckedPadding`](crate::Error::UncheckedPadding) for others if there are edge
    /// blocks. Also a failing device.
    ///
    /// [edge blocks]: super::BsrPattern::has_edge_blocks
    pub fn set_values(&mut self, values: &Tensor, stream: &Stream) -> Result<()> {
        let view = values.view();
        contiguous("values", &view, self.dtype(), self.values.shape())?;
        Operand::new("matrix", &self.values.view()).on(stream.device())?;
        if !view.is_cpu() {
            Operand::new("values", &view).on(stream.device())?;
            self.no_edge_blocks("values on a GPU")?;
            return Ok(self.values.copy_from(stream, values)?);
        }
        check_padding(self, &view)?;
        match view.dtype() {
            DType::F16 => self.values.copy_from_slice::<f16>(stream, view.as_slice()?)?,
            DType::BF16 => self.values.copy_from_slice::<bf16>(stream, view.as_slice()?)?,
            _ => self.values.copy_from_slice::<f32>(stream, view.as_slice()?)?,
        }
        Ok(())
    }

    /// The values for writing in place: `[nnz_blocks, block_size, block_size]`, on the device of
    /// the matrix.
    ///
    /// # Errors
    /// [`Error::UncheckedPadding`](crate::Error::UncheckedPadding) for a matrix with
    /// [edge blocks](super::BsrPattern::has_edge_blocks), whose zeros could be overwritten.
    pub fn values_mut(&mut self) -> Result<ViewMut<'_>> {
        self.no_edge_blocks("values that are written in place")?;
        Ok(self.unchecked_values_mut())
    }

    /// For writers that keep the zeros beyond the matrix.
    pub(crate) fn unchecked_values_mut(&mut self) -> ViewMut<'_> {
        self.values.view_mut()
    }
}

#[cfg(test)]
#[path = "values_tests.rs"]
mod tests;
