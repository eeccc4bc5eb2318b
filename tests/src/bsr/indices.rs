//! Index arrays of patterns that kernels group and cut into stages, without numbers.

use crate::number::rng;
use blockflash_ops::{DType, Stream, Tensor};
use rand::Rng;

/// How many blocks the block rows of a pattern have, and where.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// Each with this probability.
    Random(f64),
    /// So many in each block row.
    Uniform(usize),
    /// As many as a power of the row says: a few long ones.
    PowerLaw,
    /// Block rows of four clusters in turns, each with a quarter of the columns.
    Clustered,
    /// Every second block row is empty.
    EmptyRows(f64),
    /// Every second block row has what the one before it has, and a block more.
    Pairs,
}

/// A pattern and its index arrays.
#[derive(Clone, Debug)]
pub struct Indices {
    /// Rows and columns of a block.
    pub block_size: usize,
    /// Block rows.
    pub rows: usize,
    /// Block columns.
    pub cols: usize,
    /// `[rows + 1]`.
    pub row_ptr: Vec<i32>,
    /// `[nnz blocks]`.
    pub col_idx: Vec<i32>,
}

impl Indices {
    /// Indices of `[block rows, block columns]`.
    pub fn new(block_size: usize, [rows, cols]: [usize; 2], kind: Kind, seed: u64) -> Self {
        let mut random = rng(seed);
        let (mut row_ptr, mut col_idx) = (vec![0], Vec::new());
        let mut before = Vec::new();
        for row in 0..rows {
            let mut draw = |density: f64| -> Vec<usize> {
                (0..cols).filter(|_| random.random_bool(density.min(1.0))).collect()
            };
            let columns = match kind {
                Kind::Random(density) => draw(density),
                Kind::Uniform(count) if count > cols => (0..cols).collect(),
                Kind::Uniform(count) => (0..count).map(|i| (i * cols + row * 7 % cols) / count).collect(),
                Kind::PowerLaw => draw(1.0 / (1.0 + 0.3 * (row * 11 % rows) as f64)),
                Kind::Clustered => draw(0.6).into_iter().filter(|col| col * 4 / cols == row % 4).collect(),
                Kind::EmptyRows(_) if row % 2 == 0 => Vec::new(),
                Kind::EmptyRows(density) => draw(density),
                Kind::Pairs if row % 2 == 0 => draw(0.2),
                Kind::Pairs => {
                    let more: Vec<usize> = (0..cols).filter(|col| !before.contains(col)).take(1).collect();
                    let mut columns = [before.clone(), more].concat();
                    columns.sort_unstable();
                    columns
                }
            };
            col_idx.extend(columns.iter().map(|&col| col as i32));
            row_ptr.push(col_idx.len() as i32);
            before = columns;
        }
        Self { block_size, rows, cols, row_ptr, col_idx }
    }

    /// Rows and columns of the matrix, and the block size.
    pub fn sizes(&self) -> [usize; 3] {
        [self.rows * self.block_size, self.cols * self.block_size, self.block_size]
    }

    /// The arrays of the format on a device; the values are zeros.
    pub fn upload(&self, stream: &Stream) -> Result<[Tensor; 3], String> {
        let index = |numbers: &[i32]| Tensor::from_slice(stream, numbers, &[numbers.len()]);
        let shape = [self.col_idx.len(), self.block_size, self.block_size];
        let values = Tensor::zeros(stream, DType::F16, &shape);
        Ok([
            index(&self.row_ptr).map_err(|error| error.to_string())?,
            index(&self.col_idx).map_err(|error| error.to_string())?,
            values.map_err(|error| error.to_string())?,
        ])
    }
}
