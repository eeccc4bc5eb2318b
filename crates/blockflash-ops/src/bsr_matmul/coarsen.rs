//! The same matrix in larger blocks.

use super::BsrMatrix;
use super::validate::{Shape, invalid};
use crate::Result;
use crate::check::extend;
use crate::float::Float;
use blockflash_safe::View;
use blockflash_sys::DType;
use half::{bf16, f16};

impl BsrMatrix {
    /// The same matrix in blocks of `block_size`, a multiple of its own: a block holds those that
    /// are in it, and zeros. On the CPU.
    ///
    /// Small blocks cost more per element than large ones, so where most of a large block is stored
    /// it may be the faster one: on an H200, blocks of 16 and 32 of which half are stored take
    /// longer than a dense product. [`longest_row`](super::BsrPattern::longest_row) and
    /// [`density`](super::BsrPattern::density) of the result tell what has become of the pattern.
    ///
    /// ```
    /// # use blockflash_ops::{BsrMatrix, DType};
    /// let entries = [(3, 5, 1.0), (20, 20, 2.0), (40, 3, 4.0)];
    /// let small = BsrMatrix::from_coo(64, 64, 16, DType::F16, &entries)?;
    /// let large = small.with_block_size(32)?;
    /// assert_eq!((small.nnz_blocks(), large.nnz_blocks()), (3, 2));
    /// assert_eq!(small.to_dense()?, large.to_dense()?);
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidBsr`](crate::Error::InvalidBsr) for a size that is no multiple of the
    /// matrix' own or beyond [`MAX_BLOCK_SIZE`](super::BsrPattern::MAX_BLOCK_SIZE); a matrix that
    /// is not on the CPU.
    pub fn with_block_size(&self, block_size: usize) -> Result<Self> {
        if !block_size.is_multiple_of(self.block_size()) {
            return invalid(format!(
                "block_size {block_size} is no multiple of {}",
                self.block_size()
            ));
        }
        let shape = Shape::new(self.rows(), self.cols(), block_size)?;
        match self.dtype() {
            DType::F16 => in_blocks::<f16>(self, &shape),
            DType::BF16 => in_blocks::<bf16>(self, &shape),
            _ => in_blocks::<f32>(self, &shape),
        }
    }
}

fn in_blocks<T: Float>(matrix: &BsrMatrix, shape: &Shape) -> Result<BsrMatrix> {
    let (size, large) = (matrix.block_size(), shape.block_size);
    let factor = large / size;
    let (row_ptr, col_idx) = (matrix.row_ptr().view(), matrix.col_idx().view());
    let (row_ptr, col_idx) = (row_ptr.as_slice::<i32>()?, col_idx.as_slice::<i32>()?);
    let values = matrix.values.view();
    let values = values.as_slice::<T>()?;
    let (mut ends, mut columns, mut blocks) = (vec![0], Vec::new(), Vec::new());
    for rows in row_ptr.windows(2).collect::<Vec<_>>().chunks(factor) {
        // Column of the large block, then the rows and columns of elements before it there, and its
        // values.
        let mut inside = Vec::new();
        for (row, pair) in rows.iter().enumerate() {
            let first = pair[0] as usize;
            for (block, &col) in (first..).zip(&col_idx[first..pair[1] as usize]) {
                let col = col as usize;
                inside.push((col / factor, row * size, col % factor * size, block));
            }
        }
        inside.sort_unstable();
        for of_large in inside.chunk_by(|a, b| a.0 == b.0) {
            columns.push(of_large[0].0 as i32);
            let first = blocks.len();
            extend(&mut blocks, large * large, T::zeroed())?;
            for &(_, above, left, block) in of_large {
                for row in 0..size {
                    let from = &values[(block * size + row) * size..][..size];
                    blocks[first + (above + row) * large + left..][..size].copy_from_slice(from);
                }
            }
        }
        ends.push(columns.len() as i32);
    }
    let blocks = View::from_slice(&blocks, &[columns.len(), large, large])?;
    BsrMatrix::from_parts(shape.rows, shape.cols, large, &ends, &columns, blocks)
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
        let small = BsrMatrix::from_coo(
            64,
            64,
            16,
            DType::F32,
            &[(0, 0, 1.0), (17, 17, 1.0), (63, 0, 1.0)],
        );
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
