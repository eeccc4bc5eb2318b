//! Constructors of [`BsrMatrix`] and [`BsrPattern`] from data on the host. They sort inputs whose
//! order is free and reject invalid ones.

use super::validate::{Shape, VALUE_TYPES, invalid};
use super::{BsrMatrix, BsrPattern};
use crate::check::{Operand, contiguous, extend, filled, reserved, to_i32};
use crate::float::Float;
use crate::{Error, Result};
use blockflash_safe::{Device, Tensor, View};
use blockflash_sys::DType;
use half::{bf16, f16};

impl BsrPattern {
    /// From blocks in any order, as `(block row, block column)`; on the CPU. The values of the
    /// pattern are in ascending order of block rows, then columns.
    ///
    /// # Errors
    /// [`Error::InvalidBsr`] names a block beyond the matrix or one that comes twice, or a block
    /// size beyond [`MAX_BLOCK_SIZE`](Self::MAX_BLOCK_SIZE); [`Error::TooLarge`].
    pub fn from_blocks(
        rows: usize,
        cols: usize,
        block_size: usize,
        blocks: &[(usize, usize)],
    ) -> Result<Self> {
        let shape = Shape::new(rows, cols, block_size)?;
        let mut parts = Parts::new(&shape, 0)?;
        for at in shape.order_of(blocks)? {
            parts.push(blocks[at])?;
        }
        parts.pattern(&shape)
    }
}

impl BsrMatrix {
    /// Keeps the blocks of a dense matrix that have a value other than zero (NaN is one).
    ///
    /// `dense` is f16, bf16 or f32 `[rows, cols]` on the CPU, with any strides; the values are
    /// rounded to `dtype`.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`], [`Error::InvalidBsr`] for a block size beyond
    /// [`MAX_BLOCK_SIZE`](BsrPattern::MAX_BLOCK_SIZE); a view that is not on the CPU.
    pub fn from_dense(dense: View<'_>, block_size: usize, dtype: DType) -> Result<Self> {
        Operand::new("dense", &dense).dtype_in(&VALUE_TYPES)?;
        match dense.dtype() {
            DType::F16 => from_dense::<f16>(dense, block_size, dtype),
            DType::BF16 => from_dense::<bf16>(dense, block_size, dtype),
            _ => from_dense::<f32>(dense, block_size, dtype),
        }
    }

    /// From `(row, column, value)` triplets of single elements, in any order. A block is stored
    /// when it has a triplet, even if the value is zero.
    ///
    /// # Errors
    /// [`Error::InvalidBsr`] names a triplet beyond the matrix or one that comes twice.
    pub fn from_coo(
        rows: usize,
        cols: usize,
        block_size: usize,
        dtype: DType,
        triplets: &[(usize, usize, f32)],
    ) -> Result<Self> {
        let shape = Shape::new(rows, cols, block_size)?;
        if let Some(at) = triplets.iter().position(|&(row, col, _)| row >= rows || col >= cols) {
            let (row, col, _) = triplets[at];
            return invalid(format!("triplet {at} is at ({row}, {col}), beyond {rows} x {cols}"));
        }
        let block = |&(row, col, _): &(usize, usize, f32)| (row / block_size, col / block_size);
        let mut sorted = triplets.to_vec();
        sorted.sort_by_key(|triplet| (block(triplet), triplet.0, triplet.1));
        if let Some(pair) =
            sorted.windows(2).find(|pair| (pair[0].0, pair[0].1) == (pair[1].0, pair[1].1))
        {
            return invalid(format!("element ({}, {}) comes twice", pair[0].0, pair[0].1));
        }
        let mut parts = Parts::new(&shape, shape.block_elements())?;
        parts.reserve(sorted.chunk_by(|a, b| block(a) == block(b)).count())?;
        for triplets in sorted.chunk_by(|a, b| block(a) == block(b)) {
            let values = parts.push(block(&triplets[0]))?;
            for &(row, col, value) in triplets {
                values[row % block_size * block_size + col % block_size] = value;
            }
        }
        parts.finish(&shape, dtype)
    }

    /// From a matrix in CSR format; columns may be in any order within a row. See
    /// [`from_coo`](Self::from_coo).
    ///
    /// # Errors
    /// [`Error::InvalidBsr`] names the first bad entry.
    pub fn from_csr(
        rows: usize,
        cols: usize,
        block_size: usize,
        dtype: DType,
        row_ptr: &[i32],
        col_idx: &[i32],
        values: &[f32],
    ) -> Result<Self> {
        if row_ptr.len() != rows.saturating_add(1) {
            let found = row_ptr.len();
            return invalid(format!("CSR row_ptr has {found} entries, expected {rows} + 1"));
        }
        if row_ptr[0] != 0 {
            return invalid(format!("CSR row_ptr[0] is {}, not 0", row_ptr[0]));
        }
        if let Some(row) = row_ptr.windows(2).position(|pair| pair[1] < pair[0]) {
            let (from, to) = (row_ptr[row], row_ptr[row + 1]);
            return invalid(format!("CSR row_ptr descends from {from} to {to} at row {row}"));
        }
        if row_ptr[rows] as usize != values.len() || col_idx.len() != values.len() {
            let (end, columns, values) = (row_ptr[rows], col_idx.len(), values.len());
            return invalid(format!(
                "CSR row_ptr ends at {end}, with {columns} columns and {values} values; expected \
                 the same number"
            ));
        }
        if let Some(at) = col_idx.iter().position(|&col| col < 0) {
            return invalid(format!("CSR col_idx[{at}] is {}, not 0 to {cols} - 1", col_idx[at]));
        }
        let triplets: Vec<_> = row_ptr
            .windows(2)
            .enumerate()
            .flat_map(|(row, pair)| (pair[0] as usize..pair[1] as usize).map(move |at| (row, at)))
            .map(|(row, at)| (row, col_idx[at] as usize, values[at]))
            .collect();
        Self::from_coo(rows, cols, block_size, dtype, &triplets)
    }

    /// From blocks in any order: a `(block row, block column)` for each, and their values
    /// `[blocks.len(), block_size, block_size]`, rounded to `dtype`.
    ///
    /// # Errors
    /// [`Error::InvalidBsr`] names a block beyond the matrix or one that comes twice;
    /// [`Error::NonzeroPadding`] if a block at the edge has a value other than zero beyond the
    /// matrix.
    pub fn from_blocks(
        rows: usize,
        cols: usize,
        block_size: usize,
        dtype: DType,
        blocks: &[(usize, usize)],
        values: &[f32],
    ) -> Result<Self> {
        let shape = Shape::new(rows, cols, block_size)?;
        let per_block = shape.block_elements();
        if blocks.len().checked_mul(per_block) != Some(values.len()) {
            return invalid(format!(
                "{} values, expected {} blocks of {per_block}",
                values.len(),
                blocks.len()
            ));
        }
        let mut parts = Parts::new(&shape, per_block)?;
        for at in shape.order_of(blocks)? {
            parts.push(blocks[at])?.copy_from_slice(&values[at * per_block..][..per_block]);
        }
        parts.finish(&shape, dtype)
    }

    /// From the three arrays of the format, fully validated. `values` is contiguous f16, bf16 or
    /// f32 `[nnz_blocks, block_size, block_size]` on the CPU.
    ///
    /// # Errors
    /// [`Error::InvalidBsr`] names the first bad entry; [`Error::NonzeroPadding`],
    /// [`Error::Shape`], [`Error::DType`], [`Error::Stride`].
    pub fn from_parts(
        rows: usize,
        cols: usize,
        block_size: usize,
        row_ptr: &[i32],
        col_idx: &[i32],
        values: View<'_>,
    ) -> Result<Self> {
        Operand::new("values", &values).dtype_in(&VALUE_TYPES)?;
        contiguous("values", &values, values.dtype(), &[col_idx.len(), block_size, block_size])?;
        let pattern = BsrPattern::from_parts(rows, cols, block_size, row_ptr, col_idx)?;
        Self::new(pattern, values.to_tensor(&Device::cpu().stream()?)?)
    }

    /// The dense matrix, row-major `[rows, cols]`.
    ///
    /// # Errors
    /// A matrix that is not on the CPU; out of memory.
    pub fn to_dense(&self) -> Result<Vec<f32>> {
        match self.dtype() {
            DType::F16 => to_dense::<f16>(self),
            DType::BF16 => to_dense::<bf16>(self),
            _ => to_dense::<f32>(self),
        }
    }
}

/// The arrays while blocks are appended in order. Values stay f32, which holds every other type
/// exactly, until they are rounded at the end.
struct Parts {
    row_ptr: Vec<i32>,
    col_idx: Vec<i32>,
    values: Vec<f32>,
    per_block: usize,
}

impl Parts {
    /// For blocks with this many values each.
    fn new(shape: &Shape, per_block: usize) -> Result<Self> {
        let row_ptr = reserved(shape.block_rows + 1)?;
        Ok(Self { row_ptr, col_idx: Vec::new(), values: Vec::new(), per_block })
    }

    /// Makes room for the values of this many blocks.
    fn reserve(&mut self, blocks: usize) -> Result<()> {
        to_i32("nnz_blocks", blocks)?;
        self.values = reserved(blocks.saturating_mul(self.per_block))?;
        Ok(())
    }

    /// Appends a block of zeros and returns it. Its position must follow the previous one. A single
    /// element may need a block of a million, so the memory of values is asked for.
    fn push(&mut self, (block_row, block_col): (usize, usize)) -> Result<&mut [f32]> {
        self.row_ptr.resize(block_row + 1, self.col_idx.len() as i32);
        self.col_idx.push(block_col as i32);
        let start = self.values.len();
        extend(&mut self.values, self.per_block, 0.0)?;
        Ok(&mut self.values[start..])
    }

    fn pattern(&mut self, shape: &Shape) -> Result<BsrPattern> {
        self.row_ptr.resize(shape.block_rows + 1, self.col_idx.len() as i32);
        BsrPattern::of(shape, &self.row_ptr, &self.col_idx, &Device::cpu().stream()?)
    }

    fn finish(mut self, shape: &Shape, dtype: DType) -> Result<BsrMatrix> {
        let pattern = self.pattern(shape)?;
        let values = match dtype {
            DType::F16 => rounded::<f16>(&self.values, &pattern)?,
            DType::BF16 => rounded::<bf16>(&self.values, &pattern)?,
            DType::F32 => on_cpu(&self.values, &pattern)?,
            found => {
                let expected = "f16, bf16 or f32".into();
                return Err(Error::DType { what: "values", expected, found });
            }
        };
        BsrMatrix::new(pattern, values)
    }
}

fn rounded<T: Float>(values: &[f32], pattern: &BsrPattern) -> Result<Tensor> {
    let mut rounded = vec![T::zeroed(); values.len()];
    T::narrow(values, &mut rounded);
    on_cpu(&rounded, pattern)
}

fn on_cpu<T: Float>(values: &[T], pattern: &BsrPattern) -> Result<Tensor> {
    Ok(Tensor::from_slice(&Device::cpu().stream()?, values, &pattern.values_shape())?)
}

fn from_dense<T: Float>(dense: View<'_>, block_size: usize, dtype: DType) -> Result<BsrMatrix> {
    let (&[rows, cols], &[row_stride, col_stride]) = (dense.shape(), dense.strides()) else {
        return Err(Operand::new("dense", &dense).wrong_shape("[rows, cols]"));
    };
    let shape = Shape::new(rows, cols, block_size)?;
    let elements = dense.as_slice::<T>()?;
    let mut parts = Parts::new(&shape, shape.block_elements())?;
    let mut block = vec![0.0; shape.block_elements()];
    for (block_row, block_col) in
        (0..shape.block_rows).flat_map(|row| (0..shape.block_cols).map(move |col| (row, col)))
    {
        let (first_row, first_col) = (block_row * block_size, block_col * block_size);
        let (height, width) = (block_size.min(rows - first_row), block_size.min(cols - first_col));
        block.fill(0.0);
        for row in 0..height {
            let start = (first_row + row) * row_stride + first_col * col_stride;
            for col in 0..width {
                let element = &elements[start + col * col_stride..][..1];
                T::widen(element, &mut block[row * block_size + col..][..1]);
            }
        }
        if block.iter().any(|&value| value != 0.0) {
            parts.push((block_row, block_col))?.copy_from_slice(&block);
        }
    }
    parts.finish(&shape, dtype)
}

fn to_dense<T: Float>(matrix: &BsrMatrix) -> Result<Vec<f32>> {
    let (rows, cols, block_size) = (matrix.rows(), matrix.cols(), matrix.block_size());
    let (row_ptr, col_idx) = (matrix.row_ptr().view(), matrix.col_idx().view());
    let (row_ptr, col_idx) = (row_ptr.as_slice::<i32>()?, col_idx.as_slice::<i32>()?);
    let values = matrix.values.view();
    let values = values.as_slice::<T>()?;
    let mut dense = filled(0.0, &[rows, cols])?;
    for (block_row, pair) in row_ptr.windows(2).enumerate() {
        for block in pair[0] as usize..pair[1] as usize {
            let first_col = col_idx[block] as usize * block_size;
            let width = block_size.min(cols - first_col);
            for row in 0..block_size.min(rows - block_row * block_size) {
                let source = &values[(block * block_size + row) * block_size..][..width];
                T::widen(
                    source,
                    &mut dense[(block_row * block_size + row) * cols + first_col..][..width],
                );
            }
        }
    }
    Ok(dense)
}

#[cfg(test)]
#[path = "build_tests.rs"]
mod tests;
