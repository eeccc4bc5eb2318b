//! Block-sparse matrices from arrays on the device that uses them, for example a GPU that computed
//! the pattern.

use super::BsrMatrix;
use super::build::VALUE_TYPES;
use super::validate::{EdgeBlock, Shape};
use crate::check::{Operand, contiguous};
use crate::float::Float;
use crate::{Error, Result};
use blockflash_safe::{Device, Stream, Tensor, View};
use blockflash_sys::DType;
use half::{bf16, f16};

impl BsrMatrix {
    /// From the three arrays of the format on the device of the stream: `row_ptr` is i32
    /// `[block_rows + 1]`, `col_idx` i32 `[nnz_blocks]`, columns ascending and unique within a
    /// block row, and `values` f16, bf16 or f32 `[nnz_blocks, block_size, block_size]`.
    ///
    /// The values are taken over without a copy. The indices are copied: the copy waits for the
    /// work that is queued by now on every stream that used their tensors, and later writes to them
    /// do not change the matrix. The copy is downloaded to the host, which validates and plans the
    /// pattern as the other constructors do.
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
    /// [`Error::InvalidBsr`] names the first bad entry; [`Error::Shape`], [`Error::DType`];
    /// [`Error::DeviceMismatch`] for an array that is not on the stream's device. On the CPU
    /// [`Error::NonzeroPadding`]; on a GPU [`Error::UncheckedPadding`] unless `rows` and `cols` are
    /// multiples of `block_size`, since nothing looks at values there. A stream that is being
    /// captured, out of memory, or a failing device.
    pub fn from_tensors(
        rows: usize,
        cols: usize,
        block_size: usize,
        row_ptr: &Tensor,
        col_idx: &Tensor,
        values: Tensor,
        stream: &Stream,
    ) -> Result<Self> {
        let shape = Shape::new(rows, cols, block_size)?;
        let nnz_blocks = check_arrays(&shape, [row_ptr, col_idx, &values], stream)?;
        let on_gpu = !stream.device().is_cpu();
        if on_gpu && shape.hangs_over() {
            return Err(Error::UncheckedPadding { what: "values on a GPU", rows, cols });
        }
        let host = Device::cpu().stream()?;
        let copies = [row_ptr.copy_to(&host)?, col_idx.copy_to(&host)?];
        let [row_ptr, col_idx] = [copies[0].view().as_slice()?, copies[1].view().as_slice()?];
        shape.check_indices(row_ptr, col_idx, nnz_blocks)?;
        let edge_blocks = shape.edge_blocks(row_ptr, col_idx);
        if !on_gpu {
            let check = match values.dtype() {
                DType::F16 => check_padding::<f16>,
                DType::BF16 => check_padding::<bf16>,
                _ => check_padding::<f32>,
            };
            check(&edge_blocks, block_size, values.view())?;
        }
        Self::of_pattern(&shape, row_ptr, col_idx, values, edge_blocks, stream)
    }
}

/// Checks types, places and shapes of `row_ptr`, `col_idx` and `values`, and says how many blocks
/// there are.
fn check_arrays(shape: &Shape, arrays: [&Tensor; 3], stream: &Stream) -> Result<usize> {
    let [row_ptr, col_idx, values] = arrays;
    let integers: &[DType] = &[DType::I32];
    for (name, tensor, types) in [
        ("row_ptr", row_ptr, integers),
        ("col_idx", col_idx, integers),
        ("values", values, &VALUE_TYPES),
    ] {
        let view = tensor.view();
        let operand = Operand::new(name, &view);
        operand.dtype_in(types)?;
        operand.on(stream.device())?;
    }
    let length = |what, tensor: &Tensor| match *tensor.shape() {
        [length] => Ok(length),
        _ => Err(Operand::new(what, &tensor.view()).wrong_shape("one dimension")),
    };
    let nnz_blocks = length("col_idx", col_idx)?;
    shape.check_lengths(length("row_ptr", row_ptr)?, nnz_blocks, nnz_blocks)?;
    let expected = [nnz_blocks, shape.block_size, shape.block_size];
    contiguous("values", &values.view(), values.dtype(), &expected)?;
    Ok(nnz_blocks)
}

fn check_padding<T: Float>(
    edge_blocks: &[EdgeBlock],
    block_size: usize,
    values: View<'_>,
) -> Result<()> {
    let values = values.as_slice::<T>()?;
    edge_blocks.iter().try_for_each(|edge| edge.check_padding(block_size, values))
}

#[cfg(test)]
#[path = "from_tensors_tests.rs"]
mod tests;
