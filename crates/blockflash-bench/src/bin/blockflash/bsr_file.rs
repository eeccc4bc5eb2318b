//! Block-sparse matrices of the command: in files, and random ones.

use crate::failure::{Failure, Result, bail, ensure};
use crate::operand::{Source, load_all};
use blockflash_bench::case::Pattern;
use blockflash_bench::io::Array;
use blockflash_ops::{BsrPattern, DType};
use std::path::Path;

/// A block-sparse matrix in a file: everything but its values.
pub struct BsrFile {
    /// Rows and columns, if the file says them.
    pub shape: Option<[usize; 2]>,
    pub block: usize,
    pub row_ptr: Vec<i32>,
    pub col_idx: Vec<i32>,
    /// `[blocks, b, b]`, not read yet.
    pub values: Source,
}

impl BsrFile {
    pub fn read(path: &Path) -> Result<Self> {
        let [row_ptr, col_idx, values] =
            Source::open_named(path, ["row_ptr", "col_idx", "values"], "")?;
        let block = match *values.shape()? {
            [_, height, width] if height == width => height,
            [blocks, height, width] => {
                bail!("values is [{blocks}, {height}, {width}], expected square blocks");
            }
            ref other => {
                bail!("values is {other:?}, expected [blocks, b, b]");
            }
        };
        let [row_ptr, col_idx] = load_all([row_ptr, col_idx], DType::I32, 0)?;
        for (name, array) in [("row_ptr", &row_ptr), ("col_idx", &col_idx)] {
            ensure!(
                array.shape().len() == 1,
                "{name} is {:?}, expected one dimension",
                array.shape()
            );
        }
        ensure!(
            !row_ptr.is_empty(),
            "row_ptr is empty, expected the number of block rows + 1 entries"
        );
        let shape = match Source::open_optional(path, "shape")? {
            None => None,
            Some(source) => match *source.load(DType::I32)?.as_i32().unwrap_or_default() {
                [rows, cols] if rows >= 0 && cols >= 0 => Some([rows as usize, cols as usize]),
                ref other => {
                    bail!("shape is {other:?}, expected the rows and columns of the matrix");
                }
            },
        };
        let indices = |array: Array| array.as_i32().unwrap_or_default().to_vec();
        let (row_ptr, col_idx) = (indices(row_ptr), indices(col_idx));
        Ok(Self { shape, block, row_ptr, col_idx, values })
    }
}

/// The stored blocks of a random matrix that messages call `what`: how many, and where.
pub struct RandomBlocks {
    blocks: [usize; 2],
    density: f64,
    pub block: usize,
    pub stored: usize,
}

impl RandomBlocks {
    /// The number of blocks, from the options `--block` and `--density`.
    pub fn new(
        what: &str,
        [rows, cols]: [usize; 2],
        block: Option<usize>,
        density: Option<f64>,
    ) -> Result<Self> {
        let (block, density) = (block.unwrap_or(64), density.unwrap_or(0.1));
        let limit = BsrPattern::MAX_BLOCK_SIZE;
        ensure!((1..=limit).contains(&block), "--block is {block}, expected 1 to {limit}");
        ensure!((0.0..=1.0).contains(&density), "--density is {density}, expected 0 to 1");
        let blocks = [rows.div_ceil(block), cols.div_ceil(block)];
        // The indices of the format are 32-bit.
        let all = blocks[0].checked_mul(blocks[1]);
        let all = all.filter(|&all| blocks[0].max(all) < i32::MAX as usize).ok_or_else(|| {
            Failure::new(format!("{what} of {rows} x {cols} has too many blocks of {block}"))
        })?;
        let stored = (all as f64 * density).round() as usize;
        Ok(Self { blocks, density, block, stored })
    }

    /// `row_ptr` and `col_idx`.
    pub fn draw(&self, seed: u64) -> (Vec<i32>, Vec<i32>) {
        let [rows, cols] = self.blocks;
        match self.stored {
            0 => (vec![0; rows + 1], Vec::new()),
            _ => Pattern::Random.draw(rows, cols, self.density, seed),
        }
    }
}
