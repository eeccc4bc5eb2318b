//! Block-sparse matrices of arrays that are where they are used: on a GPU, where a pattern may have been computed.

use super::build::VALUE_TYPES;
use super::pattern_plan::PatternPlan;
use super::validate::{EdgeBlock, Shape};
use super::{BsrMatrix, device_plan};
use crate::check::{Operand, contiguous};
use crate::float::Float;
use crate::{Error, Result};
use blockflash_safe::{Error as SafeError, Stream, Tensor, View};
use blockflash_sys::{DType, Row};
use half::{bf16, f16};

impl BsrMatrix {
    /// From the three arrays of the format on the device of the stream, which are taken over as they are: `row_ptr` is i32
    /// `[block_rows + 1]`, `col_idx` i32 `[nnz_blocks]`, columns ascending and unique within a block row, and `values` f16, bf16 or f32
    /// `[nnz_blocks, block_size, block_size]`.
    ///
    /// On a GPU everything that the other constructors do on the host is done there, with the same result: the indices are validated, the
    /// block rows ordered and grouped. Some numbers per block row come back, which waits for the work on the stream. Where no kernel does it,
    /// and for more than 4096 block rows or columns, the indices are copied to the host instead.
    ///
    /// ```
    /// # use blockflash_ops::{BsrMatrix, Device, Tensor};
    /// let stream = Device::cpu().stream()?; // or of a GPU
    /// let row_ptr = Tensor::from_slice(&stream, &[0, 1, 1, 3], &[4])?;
    /// let col_idx = Tensor::from_slice(&stream, &[1, 0, 1], &[3])?;
    /// let values = Tensor::from_slice(&stream, &[1.0f32; 12], &[3, 2, 2])?;
    /// let matrix = BsrMatrix::from_tensors(6, 4, 2, row_ptr, col_idx, values, &stream)?;
    /// assert_eq!(matrix.row_order().to_vec::<i32>(&stream)?, [2, 0, 1]);
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidBsr`] names the first bad entry; [`Error::Shape`], [`Error::DType`]; [`Error::DeviceMismatch`] for an array that is
    /// not on the stream's device. On the CPU [`Error::NonzeroPadding`]; on a GPU [`Error::UncheckedPadding`] unless `rows` and `cols` are
    /// multiples of `block_size`, since nothing looks at values there. A stream that is being captured, out of memory, or a failing device.
    pub fn from_tensors(
        rows: usize,
        cols: usize,
        block_size: usize,
        row_ptr: Tensor,
        col_idx: Tensor,
        values: Tensor,
        stream: &Stream,
    ) -> Result<Self> {
        let arrays = Arrays::new([rows, cols, block_size], [row_ptr, col_idx, values], stream)?;
        let Some(gpu) = stream.device().cuda_properties() else { return arrays.on_cpu(stream) };
        let row = device_plan::select(gpu).filter(|_| device_plan::takes(&arrays.shape));
        arrays.on_gpu(row, stream)
    }

    /// Like [`from_tensors`](Self::from_tensors) on a GPU with this very kernel, of `[rows, cols, block_size]` and
    /// `[row_ptr, col_idx, values]`: for tests and measurements.
    ///
    /// # Errors
    /// Also [`Error::Unsupported`] if the row does not plan patterns, or not such large ones, or does not run on this device.
    pub fn from_tensors_with(
        row: &Row,
        sizes: [usize; 3],
        arrays: [Tensor; 3],
        stream: &Stream,
    ) -> Result<Self> {
        let arrays = Arrays::new(sizes, arrays, stream)?;
        device_plan::accepts(row, &arrays.shape, stream)?;
        arrays.on_gpu(Some(row), stream)
    }
}

/// Arrays whose sizes, types and places are those of a matrix.
struct Arrays {
    shape: Shape,
    row_ptr: Tensor,
    col_idx: Tensor,
    values: Tensor,
}

impl Arrays {
    fn new(sizes: [usize; 3], arrays: [Tensor; 3], stream: &Stream) -> Result<Self> {
        let [rows, cols, block_size] = sizes;
        let shape = Shape::new(rows, cols, block_size)?;
        let names = ["row_ptr", "col_idx", "values"];
        for (name, tensor) in names.into_iter().zip(&arrays) {
            let view = tensor.view();
            let operand = Operand::new(name, &view);
            operand.dtype_in(if name == "values" { &VALUE_TYPES } else { &[DType::I32] })?;
            operand.on(stream.device())?;
        }
        let [row_ptr, col_idx, values] = arrays;
        let length = |what, tensor: &Tensor| match *tensor.shape() {
            [length] => Ok(length),
            _ => Err(Operand::new(what, &tensor.view()).wrong_shape("one dimension")),
        };
        let nnz_blocks = length("col_idx", &col_idx)?;
        shape.check_lengths(length("row_ptr", &row_ptr)?, nnz_blocks, nnz_blocks)?;
        contiguous("values", &values.view(), values.dtype(), &[nnz_blocks, block_size, block_size])?;
        Ok(Self { shape, row_ptr, col_idx, values })
    }

    fn on_cpu(self, stream: &Stream) -> Result<BsrMatrix> {
        let (row_ptr, col_idx, values) = (self.row_ptr.view(), self.col_idx.view(), self.values.view());
        let (row_ptr, col_idx) = (row_ptr.as_slice()?, col_idx.as_slice()?);
        self.shape.check_indices(row_ptr, col_idx, col_idx.len())?;
        let edge_blocks = self.shape.edge_blocks(row_ptr, col_idx);
        let check = match values.dtype() {
            DType::F16 => check_padding::<f16>,
            DType::BF16 => check_padding::<bf16>,
            _ => check_padding::<f32>,
        };
        check(&edge_blocks, self.shape.block_size, values)?;
        let plan = PatternPlan::on_host(&self.shape, row_ptr, col_idx, stream)?;
        Ok(self.planned(plan, edge_blocks))
    }

    /// With this kernel; by the host without one, and where it finds the indices wrong, since the host says what is wrong.
    fn on_gpu(self, row: Option<&Row>, stream: &Stream) -> Result<BsrMatrix> {
        let Shape { rows, cols, .. } = self.shape;
        if stream.is_capturing()? {
            return Err(SafeError::InCapture { what: "planning a block-sparse pattern" }.into());
        }
        if self.shape.hangs_over() {
            return Err(Error::UncheckedPadding { what: "values on a GPU", rows, cols });
        }
        let plan = row.map(|row| device_plan::plan(row, &self.shape, &self.row_ptr, &self.col_idx, stream));
        if let Some(plan) = plan.transpose()?.flatten() {
            return Ok(self.planned(plan, Vec::new()));
        }
        let [row_ptr, col_idx] = [self.row_ptr.to_vec(stream)?, self.col_idx.to_vec(stream)?];
        self.shape.check_indices(&row_ptr, &col_idx, col_idx.len())?;
        let plan = PatternPlan::on_host(&self.shape, &row_ptr, &col_idx, stream)?;
        Ok(self.planned(plan, Vec::new()))
    }

    fn planned(self, plan: PatternPlan, edge_blocks: Vec<EdgeBlock>) -> BsrMatrix {
        plan.matrix(&self.shape, self.row_ptr, self.col_idx, self.values, edge_blocks)
    }
}

fn check_padding<T: Float>(edge_blocks: &[EdgeBlock], block_size: usize, values: View<'_>) -> Result<()> {
    let values = values.as_slice::<T>()?;
    edge_blocks.iter().try_for_each(|edge| edge.check_padding(block_size, values))
}

#[cfg(test)]
#[path = "from_tensors_tests.rs"]
mod tests;
