//! The transposed pattern of a block-sparse matrix: the block rows of each block column.

use super::parts::Lengths;
use super::validate::invalid;
use super::{BsrMatrix, grouping};
use crate::check::Operand;
use crate::{Device, Result};
use blockflash_safe::{BsrIndexArrays, BsrIndices, Stream, Tensor};
use std::hash::{DefaultHasher, Hash, Hasher};

/// The pattern of a [`BsrMatrix`] by block columns.
/// [`BsrMatmul::transposed`](super::BsrMatmul::transposed) needs it in addition to the matrix. It
/// holds no values, so one index serves every matrix of the same pattern.
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
    of: Pattern,
    indices: BsrIndices,
    lengths: Lengths,
}

/// The properties in which an index and its matrix must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pattern {
    rows: usize,
    cols: usize,
    block_size: usize,
    nnz_blocks: usize,
    hash: u64,
}

impl Pattern {
    pub(super) fn of(a: &BsrMatrix) -> Self {
        let (rows, cols, block_size) = (a.rows(), a.cols(), a.block_size());
        Self { rows, cols, block_size, nnz_blocks: a.nnz_blocks(), hash: a.pattern_hash }
    }

    /// Checks that the matrix `a` has this pattern. Errors call the pattern's owner `index` and the
    /// matrix `name`.
    pub(super) fn expect(&self, index: &str, name: &str, a: &BsrMatrix) -> Result<()> {
        let of_a = Self::of(a);
        if *self == of_a {
            return Ok(());
        }
        let describe = |of: &Self| {
            let Self { rows, cols, block_size, nnz_blocks, .. } = of;
            format!("{rows} x {cols} with {nnz_blocks} blocks of {block_size}")
        };
        invalid(format!(
            "the {index} belongs to another pattern, {}; {name} is {}",
            describe(self),
            describe(&of_a)
        ))
    }
}

/// Distinguishes patterns of equal size.
pub(super) fn pattern_hash(row_ptr: &[i32], col_idx: &[i32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (row_ptr, col_idx).hash(&mut hasher);
    hasher.finish()
}

impl BsrTranspose {
    /// Makes the index of this matrix, and of all with the same pattern, on the device of the
    /// matrix. The host computes it, so on a GPU this waits for the work on the stream.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch) if the stream is not on the device
    /// of the matrix; out of memory, or a failing device.
    pub fn new(a: &BsrMatrix, stream: &Stream) -> Result<Self> {
        Operand::new("a", &a.values().view()).on(stream.device())?;
        let (rows, cols) = (a.row_ptr().to_vec::<i32>(stream)?, a.col_idx().to_vec::<i32>(stream)?);
        let mut row_ptr = vec![0i32; a.block_cols() + 1];
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
            of: Pattern::of(a),
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
    /// like [`BsrMatrix::row_order`].
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
    pub(super) fn is_of(&self, a: &BsrMatrix) -> Result<()> {
        self.of.expect("transpose", "A", a)
    }
}

#[cfg(test)]
#[path = "transpose_tests.rs"]
mod tests;
