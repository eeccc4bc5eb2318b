//! The rules that index arrays of a BSR matrix must satisfy. Kernels read them unchecked, so arrays
//! that break one never become a [`BsrPattern`](super::BsrPattern).

use crate::check::to_i32;
use crate::float::Float;
use crate::{Error, Result};
use blockflash_sys::DType;

/// Largest block size.
pub(super) const MAX_BLOCK_SIZE: usize = 1024;

/// Element types of values.
pub(super) const VALUE_TYPES: [DType; 3] = [DType::F16, DType::BF16, DType::F32];

/// Dimensions of a BSR matrix that passed [`Shape::new`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) block_size: usize,
    pub(crate) block_rows: usize,
    pub(crate) block_cols: usize,
}

impl Shape {
    pub(crate) fn new(rows: usize, cols: usize, block_size: usize) -> Result<Self> {
        if !(1..=MAX_BLOCK_SIZE).contains(&block_size) {
            return invalid(format!("block_size is {block_size}, not 1 to {MAX_BLOCK_SIZE}"));
        }
        let (block_rows, block_cols) = (rows.div_ceil(block_size), cols.div_ceil(block_size));
        // Indices are 32-bit; row_ptr has one entry more than block rows.
        to_i32("block rows", block_rows.saturating_add(1))?;
        to_i32("block columns", block_cols)?;
        Ok(Self { rows, cols, block_size, block_rows, block_cols })
    }

    /// Elements of one block.
    pub(crate) fn block_elements(&self) -> usize {
        self.block_size * self.block_size
    }

    /// Checks `row_ptr` and `col_idx` for `nnz_blocks` stored blocks; the error names the first bad
    /// entry.
    pub(crate) fn check_indices(
        &self,
        row_ptr: &[i32],
        col_idx: &[i32],
        nnz_blocks: usize,
    ) -> Result<()> {
        let Shape { block_rows, block_cols, .. } = *self;
        self.check_lengths(row_ptr.len(), col_idx.len(), nnz_blocks)?;
        if row_ptr[0] != 0 {
            return invalid(format!("row_ptr[0] is {}, not 0", row_ptr[0]));
        }
        if let Some(row) = row_ptr.windows(2).position(|pair| pair[1] < pair[0]) {
            let (from, to) = (row_ptr[row], row_ptr[row + 1]);
            return invalid(format!("row_ptr descends from {from} to {to} at block row {row}"));
        }
        if row_ptr[block_rows] as usize != nnz_blocks {
            let last = row_ptr[block_rows];
            return invalid(format!("row_ptr ends at {last}, but there are {nnz_blocks} blocks"));
        }
        for (row, pair) in row_ptr.windows(2).enumerate() {
            let mut before = -1;
            let first = pair[0] as usize;
            for (at, &col) in (first..).zip(&col_idx[first..pair[1] as usize]) {
                if col < 0 || col as usize >= block_cols {
                    return invalid(format!(
                        "col_idx[{at}] is {col} in block row {row}, not 0 to {block_cols} - 1"
                    ));
                }
                if col <= before {
                    let fault = if col == before { "twice" } else { "unsorted" };
                    return invalid(format!(
                        "block column {col} is {fault} in block row {row} (col_idx[{at}])"
                    ));
                }
                before = col;
            }
        }
        Ok(())
    }

    /// Checks how many entries the arrays have.
    pub(crate) fn check_lengths(
        &self,
        row_ptr: usize,
        col_idx: usize,
        nnz_blocks: usize,
    ) -> Result<()> {
        to_i32("nnz_blocks", nnz_blocks)?;
        let expected = self.block_rows + 1;
        if row_ptr != expected {
            return invalid(format!("row_ptr has {row_ptr} entries, expected {expected}"));
        }
        if col_idx != nnz_blocks {
            return invalid(format!(
                "col_idx has {col_idx} entries, but there are {nnz_blocks} blocks"
            ));
        }
        Ok(())
    }

    /// The order by block rows, then columns, of blocks that are given as
    /// `(block row, block column)`.
    pub(crate) fn order_of(&self, blocks: &[(usize, usize)]) -> Result<Vec<usize>> {
        let Shape { block_rows, block_cols, .. } = *self;
        let beyond = |&(row, col): &(usize, usize)| row >= block_rows || col >= block_cols;
        if let Some(at) = blocks.iter().position(beyond) {
            let (row, col) = blocks[at];
            return invalid(format!(
                "block {at} is at ({row}, {col}), beyond {block_rows} x {block_cols} blocks"
            ));
        }
        let mut order: Vec<usize> = (0..blocks.len()).collect();
        order.sort_by_key(|&at| blocks[at]);
        if let Some(pair) = order.windows(2).find(|pair| blocks[pair[0]] == blocks[pair[1]]) {
            return invalid(format!("block {:?} comes twice", blocks[pair[0]]));
        }
        Ok(order)
    }

    /// Whether block rows or columns reach beyond the matrix, whether or not blocks are stored
    /// there.
    pub(crate) fn hangs_over(&self) -> bool {
        !self.rows.is_multiple_of(self.block_size) || !self.cols.is_multiple_of(self.block_size)
    }

    /// The stored blocks that reach beyond the matrix. The indices have passed
    /// [`check_indices`](Self::check_indices).
    pub(crate) fn edge_blocks(&self, row_ptr: &[i32], col_idx: &[i32]) -> Vec<EdgeBlock> {
        let Shape { rows, cols, block_size, .. } = *self;
        let mut edge_blocks = Vec::new();
        for (block_row, pair) in row_ptr.windows(2).enumerate() {
            let rows_inside = block_size.min(rows - block_row * block_size);
            let first = pair[0] as usize;
            for (block, &col) in (first..).zip(&col_idx[first..pair[1] as usize]) {
                let block_col = col as usize;
                let cols_inside = block_size.min(cols - block_col * block_size);
                if rows_inside < block_size || cols_inside < block_size {
                    edge_blocks.push(EdgeBlock {
                        block,
                        block_row,
                        block_col,
                        rows_inside,
                        cols_inside,
                    });
                }
            }
        }
        edge_blocks
    }
}

/// A stored block that reaches beyond the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EdgeBlock {
    /// Index into the values.
    pub(crate) block: usize,
    pub(crate) block_row: usize,
    pub(crate) block_col: usize,
    pub(crate) rows_inside: usize,
    pub(crate) cols_inside: usize,
}

impl EdgeBlock {
    /// Checks that the elements beyond the matrix are zero. `values` holds all blocks.
    pub(crate) fn check_padding<T: Float>(&self, block_size: usize, values: &[T]) -> Result<()> {
        let Self { block, block_row, block_col, rows_inside, cols_inside } = *self;
        let per_block = block_size * block_size;
        for (at, value) in values[block * per_block..][..per_block].iter().enumerate() {
            let (row, col) = (at / block_size, at % block_size);
            if (row >= rows_inside || col >= cols_inside) && !value.is_zero() {
                return Err(Error::NonzeroPadding { block, block_row, block_col, row, col });
            }
        }
        Ok(())
    }
}

pub(crate) fn invalid<T>(what: String) -> Result<T> {
    Err(Error::InvalidBsr(what))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 100 × 70 in blocks of 32: 4 × 3 blocks, the last ones reach beyond the matrix.
    fn shape() -> Shape {
        Shape::new(100, 70, 32).unwrap()
    }

    fn indices(row_ptr: &[i32], col_idx: &[i32]) -> String {
        shape().check_indices(row_ptr, col_idx, col_idx.len()).unwrap_err().to_string()
    }

    #[test]
    fn good_indices() {
        shape().check_indices(&[0, 0, 0, 0, 0], &[], 0).unwrap();
        shape().check_indices(&[0, 3, 3, 4, 6], &[0, 1, 2, 1, 0, 2], 6).unwrap();
        Shape::new(0, 70, 32).unwrap().check_indices(&[0], &[], 0).unwrap();
        Shape::new(100, 0, 32).unwrap().check_indices(&[0; 5], &[], 0).unwrap();
    }

    #[test]
    fn bad_indices_are_named() {
        assert!(indices(&[0, 0], &[]).contains("row_ptr has 2 entries, expected 5"));
        assert!(indices(&[1, 1, 1, 1, 1], &[0]).contains("row_ptr[0] is 1"));
        assert!(indices(&[0, 2, 1, 2, 2], &[0, 1]).contains("descends from 2 to 1 at block row 1"));
        assert!(
            indices(&[0, 1, 1, 1, 1], &[0, 1])
                .contains("row_ptr ends at 1, but there are 2 blocks")
        );
        assert!(indices(&[0, 0, 1, 1, 1], &[3]).contains("col_idx[0] is 3 in block row 1"));
        assert!(indices(&[0, 1, 1, 1, 1], &[-1]).contains("col_idx[0] is -1"));
        assert!(
            indices(&[0, 2, 2, 2, 2], &[1, 1]).contains("block column 1 is twice in block row 0")
        );
        assert!(
            indices(&[0, 0, 0, 2, 2], &[2, 0])
                .contains("block column 0 is unsorted in block row 2")
        );
        let lengths = shape().check_indices(&[0, 1, 1, 1, 1], &[0], 2).unwrap_err().to_string();
        assert!(lengths.contains("col_idx has 1 entries, but there are 2 blocks"));
    }

    #[test]
    fn sizes_have_limits() {
        assert!(Shape::new(1, 1, 0).unwrap_err().to_string().contains("block_size is 0"));
        assert!(Shape::new(1, 1, 1025).is_err());
        assert!(matches!(
            Shape::new(usize::MAX, 1, 1),
            Err(Error::TooLarge { what: "block rows", .. })
        ));
        assert!(matches!(
            Shape::new(1, 1 << 31, 1),
            Err(Error::TooLarge { what: "block columns", .. })
        ));
        let many = shape().check_indices(&[0; 5], &[], 1 << 31);
        assert!(matches!(many, Err(Error::TooLarge { what: "nnz_blocks", .. })));
    }

    #[test]
    fn padding_is_found() {
        // Block (3, 2) keeps 4 rows and 6 columns inside the matrix.
        let (row_ptr, col_idx) = ([0, 1, 1, 1, 2], [0, 2]);
        let mut values = vec![0f32; 2 * 32 * 32];
        values[..1024].fill(1.0);
        values[1024 + 3 * 32 + 5] = 1.0;
        let edge_blocks = shape().edge_blocks(&row_ptr, &col_idx);
        let [edge] = edge_blocks[..] else { panic!("{edge_blocks:?}") };
        assert_eq!((edge.block, edge.rows_inside, edge.cols_inside), (1, 4, 6));
        let check = |values: &[f32]| edge.check_padding(32, values);
        check(&values).unwrap();
        for (row, col) in [(4, 0), (0, 6), (31, 31)] {
            let mut bad = values.clone();
            bad[1024 + row * 32 + col] = f32::NAN;
            match check(&bad) {
                Err(Error::NonzeroPadding {
                    block: 1,
                    block_row: 3,
                    block_col: 2,
                    row: r,
                    col: c,
                }) => {
                    assert_eq!((r, c), (row, col));
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
