//! The same matrix in larger blocks.

use super::BsrMatrix;
use super::validate::{Shape, invalid};
use crate::Result;
use crate::float::Float;
use blockflash_safe::View;
use blockflash_sys::DType;
use half::{bf16, f16};
use rayon::prelude::*;

impl BsrMatrix {
    /// The same matrix in blocks of `block_size`, a multiple of its own: a block holds those that lie in it, and zeros. On the CPU.
    ///
    /// Small blocks cost more per element than large ones, so where most of a large block is stored it may be the faster one: on an H200, blocks of
    /// 16 and 32 of which half are stored take longer than a dense product ([`longest_row`](Self::longest_row) and
    /// [`density`](Self::density) of the result tell what has become of the pattern, and
    /// [`advised_block_size`](Self::advised_block_size) whether it is worth it). Values that change on a GPU go into larger blocks by a
    /// [`BsrReblock`](super::BsrReblock).
    ///
    /// ```
    /// # use blockflash_ops::{BsrMatrix, DType};
    /// let small = BsrMatrix::from_coo(64, 64, 16, DType::F16, &[(3, 5, 1.0), (20, 20, 2.0), (40, 3, 4.0)])?;
    /// let large = small.with_block_size(32)?;
    /// assert_eq!((small.nnz_blocks(), large.nnz_blocks()), (3, 2));
    /// assert_eq!(small.to_dense()?, large.to_dense()?);
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidBsr`](crate::Error::InvalidBsr) for a size that is no multiple of the matrix' own or beyond
    /// [`MAX_BLOCK_SIZE`](Self::MAX_BLOCK_SIZE); a matrix that is not on the CPU.
    pub fn with_block_size(&self, block_size: usize) -> Result<Self> {
        let (row_ptr, col_idx) = (self.row_ptr.view(), self.col_idx.view());
        let blocks = LargeBlocks::new(self, block_size, row_ptr.as_slice()?, col_idx.as_slice()?)?;
        match self.dtype() {
            DType::F16 => in_blocks::<f16>(self, &blocks),
            DType::BF16 => in_blocks::<bf16>(self, &blocks),
            _ => in_blocks::<f32>(self, &blocks),
        }
    }
}

/// A pattern in larger blocks, and where its blocks lie in them.
pub(super) struct LargeBlocks {
    pub(super) shape: Shape,
    /// Rows and columns of blocks in a large one.
    pub(super) factor: usize,
    pub(super) row_ptr: Vec<i32>,
    pub(super) col_idx: Vec<i32>,
    /// `[large blocks, factor, factor]`: which block lies there, −1: none.
    pub(super) block_idx: Vec<i32>,
}

impl LargeBlocks {
    /// Of the index arrays of `matrix`, which may be elsewhere.
    ///
    /// # Errors
    /// Those of [`BsrMatrix::with_block_size`].
    pub(super) fn new(
        matrix: &BsrMatrix,
        block_size: usize,
        row_ptr: &[i32],
        col_idx: &[i32],
    ) -> Result<Self> {
        if !block_size.is_multiple_of(matrix.block_size) {
            return invalid(format!("block_size {block_size} is no multiple of {}", matrix.block_size));
        }
        let shape = Shape::new(matrix.rows, matrix.cols, block_size)?;
        let factor = block_size / matrix.block_size;
        let (mut ends, mut columns, mut block_idx) = (vec![0], Vec::new(), Vec::new());
        for rows in row_ptr.windows(2).collect::<Vec<_>>().chunks(factor) {
            // Column of the large block, then which part of it, and its place among all.
            let mut inside: Vec<(usize, usize, i32)> = Vec::new();
            for (row, pair) in rows.iter().enumerate() {
                inside.extend((pair[0]..pair[1]).map(|block| {
                    let col = col_idx[block as usize] as usize;
                    (col / factor, row * factor + col % factor, block)
                }));
            }
            inside.sort_unstable();
            for large in inside.chunk_by(|a, b| a.0 == b.0) {
                columns.push(large[0].0 as i32);
                let first = block_idx.len();
                block_idx.resize(first + factor * factor, -1);
                large.iter().for_each(|&(_, part, block)| block_idx[first + part] = block);
            }
            ends.push(columns.len() as i32);
        }
        Ok(Self { shape, factor, row_ptr: ends, col_idx: columns, block_idx })
    }

    /// The matrix with these values.
    pub(super) fn matrix<T: Float>(&self, values: &[T]) -> Result<BsrMatrix> {
        let Shape { rows, cols, block_size, .. } = self.shape;
        let values = View::from_slice(values, &[self.col_idx.len(), block_size, block_size])?;
        BsrMatrix::from_parts(rows, cols, block_size, &self.row_ptr, &self.col_idx, values)
    }
}

/// Copies blocks of `size` to where `block_idx` says that they lie in blocks of `large`, and zeros where none lies.
pub(super) fn copy_blocks<T: Float>(block_idx: &[i32], [size, large]: [usize; 2], from: &[T], to: &mut [T]) {
    let factor = large / size;
    let pairs = to.par_chunks_exact_mut(large * large).zip(block_idx.par_chunks_exact(factor * factor));
    pairs.for_each(|(to, blocks)| {
        for (row, to) in to.chunks_exact_mut(large).enumerate() {
            for (to, &block) in to.chunks_exact_mut(size).zip(&blocks[row / size * factor..]) {
                match usize::try_from(block) {
                    Ok(block) => to.copy_from_slice(&from[(block * size + row % size) * size..][..size]),
                    Err(_) => to.fill(T::zeroed()),
                }
            }
        }
    });
}

fn in_blocks<T: Float>(matrix: &BsrMatrix, blocks: &LargeBlocks) -> Result<BsrMatrix> {
    let (size, large) = (matrix.block_size, blocks.shape.block_size);
    let mut values = vec![T::zeroed(); blocks.col_idx.len() * large * large];
    copy_blocks(&blocks.block_idx, [size, large], matrix.values.view().as_slice()?, &mut values);
    blocks.matrix(&values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use crate::fixtures::values;

    /// 100 × 90, about a third of the elements in blocks of 8.
    fn matrix(dtype: DType) -> BsrMatrix {
        let (noise, chosen) = (values(100 * 90, 3), values(13 * 12, 4));
        let triplets: Vec<(usize, usize, f32)> = (0..100)
            .flat_map(|row| (0..90).map(move |col| (row, col)))
            .filter(|(row, col)| chosen[row / 8 * 12 + col / 8] > 0.3)
            .map(|(row, col)| (row, col, noise[row * 90 + col]))
            .collect();
        BsrMatrix::from_coo(100, 90, 8, dtype, &triplets).unwrap()
    }

    #[test]
    fn no_element_changes() {
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            let small = matrix(dtype);
            for block_size in [8, 16, 24, 64, 128] {
                let large = small.with_block_size(block_size).unwrap();
                assert_eq!((large.block_size(), large.dtype()), (block_size, dtype));
                assert_eq!(large.to_dense().unwrap(), small.to_dense().unwrap());
                assert!(large.nnz_blocks() <= small.nnz_blocks());
            }
        }
        let nothing = BsrMatrix::from_coo(40, 0, 8, DType::F32, &[]).unwrap();
        assert_eq!(nothing.with_block_size(16).unwrap().nnz_blocks(), 0);
    }

    #[test]
    fn only_blocks_that_have_something_are_stored() {
        let small = BsrMatrix::from_coo(64, 64, 16, DType::F32, &[(0, 0, 1.0), (17, 17, 1.0), (63, 0, 1.0)]);
        let large = small.unwrap().with_block_size(32).unwrap();
        assert_eq!(large.col_idx().view().as_slice::<i32>().unwrap(), [0, 0]);
        assert_eq!(large.row_ptr().view().as_slice::<i32>().unwrap(), [0, 1, 2]);
    }

    #[test]
    fn other_sizes_are_refused() {
        for block_size in [0, 4, 12, 2048] {
            let found = matrix(DType::F32).with_block_size(block_size);
            assert!(matches!(found, Err(Error::InvalidBsr(_))), "{block_size}: {found:?}");
        }
    }
}
