//! Dense weights whose blocks differ in norm, and the selection of the blocks that are kept when
//! small ones are dropped.
//!
//! The recipe: N(0, 1) values are multiplied by exp(spread · g) for each level of blocks of 128,
//! 64, 32 and 16, where g ~ N(0, 1) is drawn once per block of that level. Large values therefore
//! come in clusters, blocks of every size have unequal norms, and small blocks follow the clusters
//! more closely than large ones. All values are then scaled so that a row preserves the variance of
//! its input. With a spread of 0 all blocks are alike, and dropping one costs as much as dropping
//! any other.

use blockflash_bench::{Error, Result, random};
use blockflash_ops::bsr_matmul::BsrMatrix;
use blockflash_ops::{DType, View};
use half::bf16;
use ndarray::{Array2, ArrayView2, Axis};
use rayon::prelude::*;

/// Sizes of the blocks that the recipe scales.
const LEVELS: [usize; 4] = [128, 64, 32, 16];
/// The finest level.
const FINEST: usize = 16;

/// The dense weights of a projection, `[rows, cols]`: it maps `cols` features to `rows`.
pub struct Weights(pub Array2<bf16>);

/// The stored blocks of a matrix, as BSR indices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    pub block_size: usize,
    /// Shape `[block rows + 1]`.
    pub row_ptr: Vec<i32>,
    /// Ascending within a block row.
    pub col_idx: Vec<i32>,
}

/// All blocks of a matrix in order of descending norm.
pub struct Ranking {
    block_size: usize,
    block_rows: usize,
    block_cols: usize,
    /// Block numbers, `block row * block_cols + block column`.
    blocks: Vec<usize>,
}

impl Weights {
    /// Draws weights. Equal seeds and lanes give equal weights.
    ///
    /// # Errors
    /// If there is too little memory.
    pub fn draw([rows, cols]: [usize; 2], spread: f32, seed: u64, lane: u64) -> Result<Self> {
        let noise =
            random::normal(DType::F32, &[rows, cols], seed, lane, |_| ()).map_err(out_of_memory)?;
        let (fine_rows, fine_cols) = (rows.div_ceil(FINEST), cols.div_ceil(FINEST));
        let mut exponents = Array2::<f32>::zeros((fine_rows, fine_cols));
        for level in LEVELS {
            let (step, wide) = (level / FINEST, cols.div_ceil(level));
            let drawn =
                random::normals(rows.div_ceil(level) * wide, seed ^ (lane << 32 | level as u64));
            for ((row, col), exponent) in exponents.indexed_iter_mut() {
                *exponent += spread * drawn[row / step * wide + col / step];
            }
        }
        let squares: f64 = exponents.iter().map(|&exponent| f64::from(2.0 * exponent).exp()).sum();
        let unit = (squares / exponents.len().max(1) as f64 * cols as f64).sqrt() as f32;
        let mut values = Array2::from_elem((rows, cols), bf16::ZERO);
        values.outer_iter_mut().enumerate().par_bridge().for_each(|(row, mut values)| {
            let noise = noise.to_f32(row * cols..(row + 1) * cols);
            for ((col, value), noise) in values.iter_mut().enumerate().zip(noise) {
                let exponent: f32 = exponents[[row / FINEST, col / FINEST]];
                *value = bf16::from_f32(noise * exponent.exp() / unit);
            }
        });
        Ok(Self(values))
    }

    /// Orders the blocks of the whole matrix by their Frobenius norms. Block rows may therefore
    /// keep different numbers of blocks.
    ///
    /// # Errors
    /// If the block size does not divide both sizes.
    pub fn rank(&self, block_size: usize) -> Result<Ranking> {
        let (rows, cols) = self.0.dim();
        if block_size == 0 || rows % block_size != 0 || cols % block_size != 0 {
            return Err(Error::Option(format!(
                "blocks of {block_size} do not divide weights of {rows} x {cols}"
            )));
        }
        let (block_rows, block_cols) = (rows / block_size, cols / block_size);
        let squares = |block: ArrayView2<'_, bf16>| -> f64 {
            block.iter().map(|value| value.to_f64().powi(2)).sum()
        };
        let squares: Vec<f64> = self.blocks(block_size).into_par_iter().map(squares).collect();
        let mut blocks: Vec<_> = (0..squares.len()).collect();
        // The sort is stable: of blocks with equal norms the first ones are kept.
        blocks.sort_by(|&a, &b| squares[b].total_cmp(&squares[a]));
        Ok(Ranking { block_size, block_rows, block_cols, blocks })
    }

    /// All blocks, row by row.
    fn blocks(&self, size: usize) -> Vec<ArrayView2<'_, bf16>> {
        self.0.exact_chunks((size, size)).into_iter().collect()
    }

    /// The kept blocks as a matrix of the library, in host memory.
    ///
    /// # Errors
    /// As the library reports them.
    pub fn bsr(&self, kept: &Kept) -> Result<BsrMatrix> {
        let ((rows, cols), size) = (self.0.dim(), kept.block_size);
        let blocks = self.blocks(size);
        let kept_blocks = kept.blocks().map(|(row, col)| blocks[row * (cols / size) + col]);
        let values = ndarray::stack(Axis(0), &kept_blocks.collect::<Vec<_>>())
            .map_err(|error| Error::Option(format!("blocks of {size}: {error}")))?;
        let values = View::try_from(values.view())?;
        Ok(BsrMatrix::from_parts(rows, cols, size, &kept.row_ptr, &kept.col_idx, values)?)
    }
}

impl Ranking {
    /// Keeps this fraction of the blocks with the greatest norms, rounded to whole blocks, at least
    /// one.
    pub fn keep(&self, density: f64) -> Kept {
        let Self { block_size, block_rows, block_cols, ref blocks } = *self;
        let count = ((density * blocks.len() as f64).round() as usize).max(1).min(blocks.len());
        let mut kept = blocks[..count].to_vec();
        kept.sort_unstable();
        let before = |row: usize| kept.partition_point(|&block| block < row * block_cols) as i32;
        Kept {
            block_size,
            row_ptr: (0..=block_rows).map(before).collect(),
            col_idx: kept.iter().map(|block| (block % block_cols) as i32).collect(),
        }
    }
}

impl Kept {
    /// Block row and block column of each kept block.
    pub fn blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        let rows = self.row_ptr.windows(2).enumerate();
        rows.flat_map(|(row, ends)| (ends[0]..ends[1]).map(move |at| (row, at as usize)))
            .map(|(row, at)| (row, self.col_idx[at] as usize))
    }

    /// Number of stored elements.
    pub fn elements(&self) -> usize {
        self.col_idx.len() * self.block_size * self.block_size
    }
}

/// The error that [`random::normal`] reports when memory runs out.
pub fn out_of_memory(bytes: u64) -> Error {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    Error::Device(blockflash_safe::Error::OutOfMemory { bytes })
}
