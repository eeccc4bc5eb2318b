//! Patterns and block-sparse matrices from arrays on the device that uses them, for example a GPU
//! that computed the pattern.

use super::validate::Shape;
use super::{BsrMatrix, BsrPattern};
use crate::check::Operand;
use crate::{Error, Result};
use blockflash_safe::{Device, Stream, Tensor};
use blockflash_sys::DType;

impl BsrPattern {
    /// From the two index arrays of the format on the device of the stream: `row_ptr` is i32
    /// `[block_rows + 1]`, and `col_idx` i32 `[nnz_blocks]`, columns ascending and unique within a
    /// block row.
    ///
    /// The arrays are copied: the copy waits for the work that is queued by now on every stream
    /// that used their tensors, and later writes to them do not change the pattern. The copy is
    /// downloaded to the host, which validates and plans the pattern as the other constructors do.
    ///
    /// # Errors
    /// [`Error::InvalidBsr`] names the first bad entry; [`Error::Shape`], [`Error::DType`];
    /// [`Error::DeviceMismatch`] for an array that is not on the stream's device. A stream that is
    /// being captured, out of memory, or a failing device.
    pub fn from_tensors(
        rows: usize,
        cols: usize,
        block_size: usize,
        row_ptr: &Tensor,
        col_idx: &Tensor,
        stream: &Stream,
    ) -> Result<Self> {
        let shape = Shape::new(rows, cols, block_size)?;
        let [row_ptr_entries, blocks] = [("row_ptr", row_ptr), ("col_idx", col_idx)]
            .map(|(name, array)| entries(name, array, stream));
        let blocks = blocks?;
        shape.check_lengths(row_ptr_entries?, blocks, blocks)?;
        let host = Device::cpu().stream()?;
        let copies = [row_ptr.copy_to(&host)?, col_idx.copy_to(&host)?];
        let [row_ptr, col_idx] = [copies[0].view().as_slice()?, copies[1].view().as_slice()?];
        Self::of(&shape, row_ptr, col_idx, stream)
    }
}

/// The number of entries of an index array, after checks of its type, place and shape.
fn entries(name: &'static str, array: &Tensor, stream: &Stream) -> Result<usize> {
    let view = array.view();
    let operand = Operand::new(name, &view);
    operand.dtype_in(&[DType::I32])?;
    operand.on(stream.device())?;
    match *array.shape() {
        [entries] => Ok(entries),
        _ => Err(operand.wrong_shape("one dimension")),
    }
}

impl BsrMatrix {
    /// From the three arrays of the format on the device of the stream: those of
    /// [`BsrPattern::from_tensors`], which are copied, and `values`, f16, bf16 or f32
    /// `[nnz_blocks, block_size, block_size]`, which are taken over without a copy.
    ///
    /// ```
    /// # use blockflash_ops::{BsrMatrix, Device, Tensor};
    /// let stream = Device::cpu().stream()?; // or of a GPU
    /// let row_ptr = Tensor::from_slice(&stream, &[0, 1, 1, 3], &[4])?;
    /// let col_idx = Tensor::from_slice(&stream, &[1, 0, 1], &[3])?;
    /// let values = Tensor::from_slice(&stream, &[1.0f32; 12], &[3, 2, 2])?;
    /// let matrix = BsrMatrix::from_tensors(6, 4, 2, &row_ptr, &col_idx, values, &stream)?;
    /// assert_eq!(matrix.row_order().to_vec::<i32>(&stream)?, [2, 0, 1]);
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`BsrPattern::from_tensors`] and [`BsrMatrix::new`]; on a GPU
    /// [`Error::UncheckedPadding`] unless `rows` and `cols` are multiples of `block_size`, whether
    /// or not blocks are stored at the edge.
    pub fn from_tensors(
        rows: usize,
        cols: usize,
        block_size: usize,
        row_ptr: &Tensor,
        col_idx: &Tensor,
        values: Tensor,
        stream: &Stream,
    ) -> Result<Self> {
        if !stream.device().is_cpu() && Shape::new(rows, cols, block_size)?.hangs_over() {
            return Err(Error::UncheckedPadding { what: "values on a GPU", rows, cols });
        }
        Operand::new("values", &values.view()).on(stream.device())?;
        let pattern = BsrPattern::from_tensors(rows, cols, block_size, row_ptr, col_idx, stream)?;
        Self::new(pattern, values)
    }
}

#[cfg(test)]
#[path = "from_tensors_tests.rs"]
mod tests;
