//! New values in a matrix with a fixed pattern, for training and for weights that change.
//!
//! Kernels rely on zeros where blocks reach beyond the matrix. Every way to write preserves them:
//! it checks the values, refuses matrices that have such places, or is a kernel that writes zeros
//! there.

use super::BsrMatrix;
use super::validate::invalid;
use crate::check::{Operand, contiguous};
use crate::float::Float;
use crate::{Error, Result};
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
    /// cannot be checked then, so a matrix with [edge blocks](Self::has_edge_blocks) takes values
    /// from host memory only.
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
    /// The values stay as they were with [`Error::Shape`], [`Error::DType`],
    /// [`Error::DeviceMismatch`] if the stream is not on the device of the matrix or the values are
    /// on a third one, [`Error::NonzeroPadding`] for values in host memory that are not zero beyond
    /// the matrix, and [`Error::UncheckedPadding`] for others if there are edge blocks. Also a
    /// failing device.
    pub fn set_values(&mut self, values: &Tensor, stream: &Stream) -> Result<()> {
        let view = values.view();
        contiguous("values", &view, self.dtype(), self.values.shape())?;
        Operand::new("matrix", &self.values.view()).on(stream.device())?;
        if !view.is_cpu() {
            Operand::new("values", &view).on(stream.device())?;
            self.no_edge_blocks("values on a GPU")?;
            return Ok(self.values.copy_from(stream, values)?);
        }
        match self.dtype() {
            DType::F16 => self.set_from_host::<f16>(view.as_slice()?, stream),
            DType::BF16 => self.set_from_host::<bf16>(view.as_slice()?, stream),
            _ => self.set_from_host::<f32>(view.as_slice()?, stream),
        }
    }

    fn set_from_host<T: Float>(&mut self, values: &[T], stream: &Stream) -> Result<()> {
        self.edge_blocks.iter().try_for_each(|edge| edge.check_padding(self.block_size, values))?;
        Ok(self.values.copy_from_slice(stream, values)?)
    }

    /// The values for writing in place: `[nnz_blocks, block_size, block_size]`, on the device of
    /// the matrix.
    ///
    /// # Errors
    /// [`Error::UncheckedPadding`] for a matrix with [edge blocks](Self::has_edge_blocks), whose
    /// zeros could be overwritten.
    pub fn values_mut(&mut self) -> Result<ViewMut<'_>> {
        self.no_edge_blocks("values that are written in place")?;
        Ok(self.unchecked_values_mut())
    }

    /// Whether a stored block reaches beyond the matrix, where values have to be zero. False if
    /// both sizes are multiples of `block_size`.
    pub fn has_edge_blocks(&self) -> bool {
        !self.edge_blocks.is_empty()
    }

    /// For writers that keep the zeros beyond the matrix.
    pub(crate) fn unchecked_values_mut(&mut self) -> ViewMut<'_> {
        self.values.view_mut()
    }

    /// Checks that sizes and block positions equal the ones of `other`; devices may differ.
    pub(crate) fn has_pattern_of(&self, other: &Self) -> Result<()> {
        let pattern =
            |of: &Self| (of.rows, of.cols, of.block_size, of.nnz_blocks(), of.pattern_hash);
        if pattern(self) == pattern(other) {
            return Ok(());
        }
        let describe = |of: &Self| {
            format!(
                "{} x {} with {} blocks of {}",
                of.rows,
                of.cols,
                of.nnz_blocks(),
                of.block_size
            )
        };
        invalid(format!(
            "the matrix has another pattern, {}; expected {}",
            describe(self),
            describe(other)
        ))
    }

    fn no_edge_blocks(&self, what: &'static str) -> Result<()> {
        let Self { rows, cols, .. } = *self;
        if self.has_edge_blocks() {
            Err(Error::UncheckedPadding { what, rows, cols })
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
#[path = "values_tests.rs"]
mod tests;
