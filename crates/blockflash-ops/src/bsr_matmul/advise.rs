//! Which block size a pattern is fastest in.

use super::coarsen::LargeBlocks;
use super::cost::estimated_time;
use super::select::select;
use super::{BsrMatrix, BsrProblem};
use crate::Result;
use blockflash_safe::CudaProperties;

/// Block sizes whose kernels reach what a dense product does, the preferred one of equally fast ones first.
const LARGE: [usize; 2] = [128, 64];

impl BsrMatrix {
    /// The block size in which a product of this matrix, which is on the CPU, with `n` columns is estimated to be fastest on a GPU: its own,
    /// or 64 or 128 if they are multiples of it, by what selection knows of the kernels and by how many larger blocks the pattern
    /// has. So dense patterns of small blocks are multiplied as few large blocks with zeros in them, by
    /// [`with_block_size`](Self::with_block_size) or, where values change on a GPU, a [`BsrReblock`](super::BsrReblock).
    ///
    /// It is for products that are repeated: what a copy into larger blocks costs is not counted. Rows of B count as whole 16 bytes. Where
    /// no kernel for larger blocks has been measured (GPUs other than Hopper, values in f32) it is the block size of the matrix.
    ///
    /// # Errors
    /// A matrix that is not on the CPU.
    pub fn advised_block_size(&self, n: usize, gpu: &CudaProperties) -> Result<usize> {
        let (row_ptr, col_idx) = (self.row_ptr.view(), self.col_idx.view());
        let (row_ptr, col_idx) = (row_ptr.as_slice::<i32>()?, col_idx.as_slice::<i32>()?);
        let own = self.estimate(self.block_size, self.nnz_blocks(), row_ptr, n, gpu);
        let mut fastest = (own, self.block_size);
        for size in LARGE.into_iter().filter(|size| *size > self.block_size && size % self.block_size == 0) {
            let large = LargeBlocks::new(self, size, row_ptr, col_idx)?;
            let time = self.estimate(size, large.col_idx.len(), &large.row_ptr, n, gpu);
            if time.is_some_and(|time| fastest.0.is_none_or(|of_fastest| time < of_fastest)) {
                fastest = (time, size);
            }
        }
        Ok(fastest.1)
    }

    /// Estimated time of the matrix in blocks of this size; `None` without a kernel, or if nothing is known of it.
    fn estimate(
        &self,
        block_size: usize,
        nnz_blocks: usize,
        row_ptr: &[i32],
        n: usize,
        gpu: &CudaProperties,
    ) -> Option<f64> {
        let mnk = [self.rows, n.checked_next_multiple_of(8)?, self.cols];
        let longest = row_ptr.windows(2).map(|pair| pair[1].abs_diff(pair[0]) as usize).max();
        let problem =
            BsrProblem { longest_row: longest, ..BsrProblem::new(self.dtype(), mnk, block_size, nnz_blocks) };
        estimated_time(select(&problem, gpu).ok()?, &problem, gpu)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{gpu, gpus};
    use crate::{DType, Device, Tensor};

    const SIZE: usize = 4096;

    /// Zeros in the blocks that are chosen.
    fn matrix(block_size: usize, dtype: DType, chosen: impl Fn(usize, usize) -> bool) -> BsrMatrix {
        let blocks = SIZE / block_size;
        let (mut row_ptr, mut col_idx) = (vec![0], Vec::new());
        for row in 0..blocks {
            col_idx.extend((0..blocks).filter(|&col| chosen(row, col)).map(|col| col as i32));
            row_ptr.push(col_idx.len() as i32);
        }
        let stream = Device::cpu().stream().unwrap();
        let values = Tensor::zeros(&stream, dtype, &[col_idx.len(), block_size, block_size]).unwrap();
        BsrMatrix::from_parts(SIZE, SIZE, block_size, &row_ptr, &col_idx, values.view()).unwrap()
    }

    /// Blocks that are stored with this probability.
    fn random(block_size: usize, density: f64) -> BsrMatrix {
        let noise = |row: usize, col: usize| {
            let mixed = ((row * 65536 + col) as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            ((mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 40) as f64 / (1 << 24) as f64
        };
        matrix(block_size, DType::F16, |row, col| noise(row, col) < density)
    }

    fn h200() -> CudaProperties {
        CudaProperties { multiprocessors: 132, ..gpu(9, 0) }
    }

    #[test]
    fn dense_patterns_of_small_blocks_take_large_ones() {
        for (n, of_16) in [(1024, 128), (4096, 128), (8192, 64)] {
            for (block_size, large) in [(16, of_16), (32, 64)] {
                let advised = |density| random(block_size, density).advised_block_size(n, &h200()).unwrap();
                // Of blocks of 64 made of four random ones a sixteenth is missing, of larger ones almost none: that
                // is worth a little, and launches in clusters cost a little.
                assert_eq!(advised(0.5), large, "{n} columns, blocks of {block_size}");
                assert_eq!(advised(0.1), block_size, "{n} columns");
            }
        }
    }

    #[test]
    fn what_matters_is_how_many_large_blocks_there_are() {
        // A quarter of the blocks, all of them in a quarter of those of 128; and blocks that no kernel takes.
        let together = |block_size: usize| {
            let factor = 128 / block_size;
            matrix(block_size, DType::BF16, move |row, col| (row / factor + col / factor).is_multiple_of(4))
        };
        for block_size in [8, 16, 32, 64] {
            assert_eq!(together(block_size).advised_block_size(4096, &h200()).unwrap(), 128, "{block_size}");
        }
        assert_eq!(random(128, 0.5).advised_block_size(4096, &h200()).unwrap(), 128);
    }

    #[test]
    fn nothing_is_advised_where_nothing_is_known() {
        let dense = matrix(16, DType::F16, |_, _| true);
        for gpu in gpus().iter().filter(|gpu| gpu.compute_capability != h200().compute_capability) {
            assert_eq!(dense.advised_block_size(4096, gpu).unwrap(), 16, "{}", gpu.name);
        }
        assert_eq!(random(8, 0.1).advised_block_size(4096, &gpu(8, 0)).unwrap(), 8);
        let wide = matrix(16, DType::F32, |row, col| row == col);
        assert_eq!(wide.advised_block_size(4096, &h200()).unwrap(), 16);
        // 24 divides neither 64 nor 128.
        let odd = BsrMatrix::from_coo(100, 100, 24, DType::F16, &[(0, 0, 1.0)]).unwrap();
        assert_eq!(odd.advised_block_size(4096, &h200()).unwrap(), 24);
        let nothing = BsrMatrix::from_coo(0, 0, 16, DType::F16, &[]).unwrap();
        nothing.advised_block_size(0, &h200()).unwrap();
        assert_eq!(dense.advised_block_size(usize::MAX, &h200()).unwrap(), 16);
    }
}
