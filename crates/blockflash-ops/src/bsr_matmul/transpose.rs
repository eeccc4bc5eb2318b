//! The transposed pattern of a block-sparse matrix: the block rows of each block column.

use super::parts::Lengths;
use super::pattern::Identity;
use super::validate::invalid;
use super::{BsrPattern, grouping};
use crate::check::{Operand, filled};
use crate::{Device, Result};
use blockflash_safe::{BsrIndexArrays, BsrIndices, Stream, Tensor};

/// A [`BsrPattern`] by block columns. [`BsrMatmul::transposed`](super::BsrMatmul::transposed) needs
/// it in addition to the matrix. It holds no values, so one index serves all values of the pattern.
///
/// ```
/// # use blockflash_ops::{BsrMatmul, BsrMatrix, BsrTranspose, DType, Device, View};
/// let stream = Device::cpu().stream()?;
/// let a = BsrMatrix::from_coo(2, 3, 1, DType::F32, &[(0, 2, 5.0), (1, 0, 7.0)])?;
/// let index = BsrTranspose::new(&a, &stream)?;
/// let b = View::from_slice(&[1.0f32, 10.0], &[2, 1])?;
/// let c = BsrMatmul::transposed(&a, &index, b).matmul(DType::F32, &stream)?;
/// assert_eq!(c.to_vec::<f32>(&stream)?, [70.0, 0.0, 5.0]);
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
#[derive(Debug)]
pub struct BsrTranspose {
    of: Identity,
    indices: BsrIndices,
    lengths: Lengths,
}

impl BsrTranspose {
    /// Makes the index of this pattern, which is that of a matrix, too, on the device of the
    /// pattern. The host computes it, so on a GPU this waits for the work on the stream.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch) if the stream is not on the device
    /// of the pattern; out of memory, or a failing device.
    pub fn new(a: &BsrPattern, stream: &Stream) -> Result<Self> {
        Operand::new("a", &a.col_idx().view()).on(stream.device())?;
        let (rows, cols) = (a.row_ptr().to_vec::<i32>(stream)?, a.col_idx().to_vec::<i32>(stream)?);
        let mut row_ptr = filled(0i32, &[a.block_cols() + 1])?;
        cols.iter().for_each(|&col| row_ptr[col as usize + 1] += 1);
        (1..row_ptr.len()).for_each(|row| row_ptr[row] += row_ptr[row - 1]);
        // Block rows are visited in ascending order, so each list of them ascends.
        let mut next = row_ptr.clone();
        let (mut col_idx, mut block_idx) = (vec![0i32; cols.len()], vec![0i32; cols.len()]);
        for (row, pair) in rows.windows(2).enumerate() {
            for block in pair[0] as usize..pair[1] as usize {
                let place = &mut next[cols[block] as usize];
                col_idx[*place as usize] = row as i32;
                block_idx[*place as usize] = block as i32;
                *place += 1;
            }
        }
        let order = grouping::row_order(a.block_size(), a.block_rows(), &row_ptr, &col_idx);
        let arrays = BsrIndexArrays {
            block_cols: a.block_rows(),
            row_ptr: &row_ptr,
            col_idx: &col_idx,
            row_order: &order,
            block_idx: Some(&block_idx),
            stages: None,
        };
        Ok(Self {
            of: a.identity(),
            indices: BsrIndices::new(&arrays, stream)?,
            lengths: Lengths::of_rows(&row_ptr, &order),
        })
    }

    /// Where the index is.
    pub fn device(&self) -> Device {
        self.indices.device()
    }

    /// i32 `[block columns of the matrix + 1]`: the entries of block column `i` are
    /// `row_ptr[i]..row_ptr[i + 1]`.
    pub fn row_ptr(&self) -> &Tensor {
        self.indices.row_ptr()
    }

    /// i32 `[nnz_blocks]`: the block row of each entry, ascending and unique within a block column.
    pub fn col_idx(&self) -> &Tensor {
        self.indices.col_idx()
    }

    /// i32 `[block columns of the matrix]`: the order in which a kernel takes the block columns,
    /// like [`BsrPattern::row_order`].
    pub fn row_order(&self) -> &Tensor {
        self.indices.row_order()
    }

    /// Number of stored blocks of the longest block column; 0 for a matrix without block columns.
    pub fn longest_row(&self) -> usize {
        self.lengths.longest()
    }

    /// A copy on the stream's device.
    ///
    /// # Errors
    /// Out of memory, or a failing device.
    pub fn to(&self, stream: &Stream) -> Result<Self> {
        Ok(Self {
            of: self.of,
            indices: self.indices.copy_to(stream)?,
            lengths: self.lengths.clone(),
        })
    }

    pub(super) fn indices(&self) -> &BsrIndices {
        &self.indices
    }

    /// The lengths of the block columns in their order.
    pub(super) fn lengths(&self) -> &Lengths {
        &self.lengths
    }

    /// Checks that the index belongs to the pattern of `a`.
    pub(super) fn is_of(&self, a: &BsrPattern) -> Result<()> {
        let (of, found) = (self.of, a.identity());
        if of == found {
            return Ok(());
        }
        invalid(format!("the transpose is that of another pattern, {of}; A is {found}"))
    }
}

#[cfg(test)]
#[path = "transpose_tests.rs"]
mod tests;
