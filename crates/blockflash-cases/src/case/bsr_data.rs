//! The data of one product of a block-sparse and a dense matrix.

use crate::error::{Error, Result};
use crate::io::Array;
use blockflash_ops::{BsrMatrix, Stream};

/// The data of one product, in host memory.
#[derive(Clone, Debug)]
pub struct BsrData {
    /// Rows and columns of the stored matrix.
    pub shape: [usize; 2],
    /// `[block rows + 1]`.
    pub row_ptr: Vec<i32>,
    /// `[blocks]`.
    pub col_idx: Vec<i32>,
    /// `[blocks, block, block]`; zero beyond the matrix.
    pub values: Array,
    /// `[k, n]`.
    pub b: Array,
    /// `[m, n]`, the previous C.
    pub c: Option<Array>,
    /// `[m]` or `[n]`.
    pub bias: Option<Array>,
}

impl BsrData {
    /// A matrix with these blocks and a B of `[k, n]`, drawn by `draw` from a name, a shape and the
    /// random stream of the seed.
    ///
    /// # Errors
    /// Those of `draw`.
    pub fn drawn<E: From<Error>>(
        shape: [usize; 2],
        block: usize,
        (row_ptr, col_idx): (Vec<i32>, Vec<i32>),
        b: [usize; 2],
        draw: impl Fn(&'static str, &[usize], u64) -> Result<Array, E>,
    ) -> Result<Self, E> {
        let values = draw("values", &[col_idx.len(), block, block], 0)?;
        let inside = rows_of(&row_ptr).zip(&col_idx).map(|(row, &col)| {
            [shape[0] - row * block, shape[1].saturating_sub(col as usize * block)]
        });
        let no_blocks = || Error::Option("the values are not [blocks, block, block]".to_owned());
        let values = values.cropped(inside).ok_or_else(no_blocks)?;
        Ok(Self { shape, row_ptr, col_idx, values, b: draw("b", &b, 1)?, c: None, bias: None })
    }

    /// Rows and columns of a block.
    pub fn block(&self) -> usize {
        self.values.shape().last().copied().unwrap_or(1)
    }

    /// `row_ptr`, `col_idx` and values of the transposed matrix, every block of it written out.
    ///
    /// # Errors
    /// If the values are not `[blocks, block, block]`.
    pub fn transposed(&self) -> Result<(Vec<i32>, Vec<i32>, Array)> {
        let rows = rows_of(&self.row_ptr).enumerate();
        let mut blocks: Vec<(i32, usize, usize)> =
            rows.zip(&self.col_idx).map(|((at, row), &col)| (col, row, at)).collect();
        blocks.sort_unstable();
        let before = |col: usize| blocks.partition_point(|block| (block.0 as usize) < col) as i32;
        let order: Vec<usize> = blocks.iter().map(|block| block.2).collect();
        let values = self.values.matrices_transposed(&order);
        let values = values.ok_or_else(|| Error::Option("the values are no blocks".to_owned()))?;
        let cols = self.shape[1].div_ceil(self.block().max(1));
        let col_idx = blocks.iter().map(|block| block.1 as i32).collect();
        Ok(((0..=cols).map(before).collect(), col_idx, values))
    }

    /// The matrix, validated by the library and copied to a device.
    ///
    /// # Errors
    /// As for [`BsrMatrix::from_parts`].
    pub fn matrix(&self, stream: &Stream) -> Result<BsrMatrix> {
        let ([rows, cols], values) = (self.shape, self.values.view()?);
        let block = self.block();
        let a = BsrMatrix::from_parts(rows, cols, block, &self.row_ptr, &self.col_idx, values)?;
        Ok(if stream.device().is_cpu() { a } else { a.to(stream)? })
    }
}

/// The block row of each stored block.
fn rows_of(row_ptr: &[i32]) -> impl Iterator<Item = usize> + '_ {
    let of_row = |(row, pair): (usize, &[i32])| (pair[0]..pair[1]).map(move |_| row);
    row_ptr.windows(2).enumerate().flat_map(of_row)
}
