//! Constructors of [`BlockMask`] from data. All run on the host, in a fixed order.

use super::validate::{Sizes, invalid};
use super::{BlockGeometry, BlockMask};
use crate::check::{append, reserved, to_i32};
use crate::{Mask, Result};
use blockflash_safe::{BlockListArrays, BlockLists, Device, Stream};
use std::cmp::{Ordering, Reverse};

impl BlockMask {
    /// From the arrays of the format, fully validated. `row_ptr` `[batch, heads, rows + 1]` holds
    /// offsets into `col_idx`, and each head starts where the previous one ends. Columns ascend
    /// strictly within a row.
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`](crate::Error::InvalidBlockMask) names the first bad entry;
    /// [`Error::TooLarge`](crate::Error::TooLarge) if indices do not fit i32.
    pub fn from_parts(
        geometry: BlockGeometry,
        batch: usize,
        heads: usize,
        row_ptr: &[i32],
        col_idx: &[i32],
    ) -> Result<Self> {
        Sizes::new(geometry, batch, heads)?.check_indices(row_ptr, col_idx)?;
        let stream: &Stream = &Device::cpu().stream()?;
        let rows = geometry.rows();
        let order = row_order(row_ptr, rows)?;
        let arrays = BlockListArrays {
            groups: &[batch, heads],
            rows,
            cols: geometry.cols(),
            row_ptr,
            col_idx,
            row_order: &order,
            cu_rows: None,
        };
        let lists = BlockLists::new(&arrays, stream)?;
        Ok(Self { geometry, batch, heads, lists, packed: None, transpose: None })
    }

    /// The blocks that are true in `blocks`, `[batch, heads, rows, cols]` row-major.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) for another number of values; the errors of
    /// [`from_parts`](Self::from_parts).
    pub fn from_bool(
        geometry: BlockGeometry,
        batch: usize,
        heads: usize,
        blocks: &[bool],
    ) -> Result<Self> {
        let cols = geometry.cols();
        let sizes = Sizes::new(geometry, batch, heads)?;
        sizes.check_length("blocks", cols, blocks.len())?;
        let count = blocks.iter().filter(|&&visited| visited).count();
        sizes.build(count, |group, row, columns| {
            let blocks = &blocks[(group * geometry.rows() + row) * cols..][..cols];
            columns.extend(
                blocks.iter().zip(0..).filter(|&(&visited, _)| visited).map(|(_, col)| col),
            );
            Ok(())
        })
    }

    /// From lists of up to `k` columns per row, `[batch, heads, rows, k]` row-major, in any order.
    /// Entries of −1 are skipped.
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`](crate::Error::InvalidBlockMask) names the first column that does
    /// not exist or comes twice in its row; [`Error::Shape`](crate::Error::Shape) for another
    /// number of columns; the errors of [`from_parts`](Self::from_parts).
    pub fn from_top_k(
        geometry: BlockGeometry,
        batch: usize,
        heads: usize,
        k: usize,
        columns: &[i32],
    ) -> Result<Self> {
        let (rows, cols) = (geometry.rows(), geometry.cols());
        let sizes = Sizes::new(geometry, batch, heads)?;
        sizes.check_length("columns", k, columns.len())?;
        let mut had = vec![0; cols];
        let count = columns.iter().filter(|&&col| col != -1).count();
        sizes.build(count, |group, row, out| {
            let at = group * rows + row;
            let listed = columns[at * k..][..k].iter().enumerate().filter(|&(_, &col)| col != -1);
            sizes.take_columns(listed, [group, row], &mut had, out)?;
            out.sort_unstable();
            Ok(())
        })
    }

    /// The `k` blocks of each row with the largest scores, or all blocks if there are no more. Ties
    /// go to the smaller column. Blocks that the token mask hides entirely are never chosen.
    /// Infinite scores are allowed.
    ///
    /// `scores` is `[batch, heads, rows, cols]` row-major, as
    /// [`block_mean_scores`](super::block_mean_scores) returns it.
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`](crate::Error::InvalidBlockMask) names the first score that is
    /// NaN, including scores of hidden blocks; [`Error::Shape`](crate::Error::Shape) for another
    /// number of scores; the errors of [`from_parts`](Self::from_parts).
    pub fn top_k_from_scores(
        geometry: BlockGeometry,
        batch: usize,
        heads: usize,
        scores: &[f32],
        k: usize,
        mask: Mask,
    ) -> Result<Self> {
        let (rows, cols) = (geometry.rows(), geometry.cols());
        let sizes = Sizes::new(geometry, batch, heads)?;
        sizes.check_length("scores", cols, scores.len())?;
        let mut candidates = Vec::new();
        let of_row = |row| geometry.visible_cols(row, mask).len().min(k);
        let count = sizes.groups().saturating_mul((0..rows).map(of_row).sum());
        sizes.build(count, |group, row, columns| {
            let scores = &scores[(group * rows + row) * cols..][..cols];
            if let Some(position) = scores.iter().position(|score| score.is_nan()) {
                return invalid(format!(
                    "score is NaN at {}, position {position}",
                    sizes.place(group, row)
                ));
            }
            candidates.clear();
            candidates.extend(geometry.visible_cols(row, mask));
            if k < candidates.len() {
                let descending = |a: f32, b: f32| b.partial_cmp(&a).unwrap_or(Ordering::Equal);
                candidates.select_nth_unstable_by(k, |&a, &b| {
                    descending(scores[a], scores[b]).then(a.cmp(&b))
                });
                candidates.truncate(k);
                candidates.sort_unstable();
            }
            columns.extend(candidates.iter().map(|&col| col as i32));
            Ok(())
        })
    }
}

impl Sizes {
    /// Builds a mask row by row: `push` gets a group, a row and an empty list, to which it appends
    /// the columns of this row. They are `at_least` columns over all rows, so a mask that is too
    /// large is refused before its first row is made.
    pub(super) fn build(
        &self,
        at_least: usize,
        mut push: impl FnMut(usize, usize, &mut Vec<i32>) -> Result<()>,
    ) -> Result<BlockMask> {
        to_i32("nnz", at_least)?;
        let rows = self.geometry.rows();
        let mut row_ptr = reserved(self.groups() * (rows + 1))?;
        let (mut col_idx, mut columns) = (reserved(at_least)?, Vec::new());
        for group in 0..self.groups() {
            row_ptr.push(col_idx.len() as i32);
            for row in 0..rows {
                columns.clear();
                push(group, row, &mut columns)?;
                to_i32("nnz", col_idx.len() + columns.len())?;
                append(&mut col_idx, &columns)?;
                row_ptr.push(col_idx.len() as i32);
            }
        }
        BlockMask::from_parts(self.geometry, self.batch, self.heads, &row_ptr, &col_idx)
    }

    /// Appends columns of one row, with their positions, to `out`. Each column must exist and come
    /// once in the row. `had` holds, for each column, the last row that had it, counted from 1 over
    /// all groups; it begins as zeros.
    pub(super) fn take_columns<'a>(
        &self,
        columns: impl Iterator<Item = (usize, &'a i32)>,
        [group, row]: [usize; 2],
        had: &mut [usize],
        out: &mut Vec<i32>,
    ) -> Result<()> {
        let number = group * self.geometry.rows() + row + 1;
        for (position, &col) in columns {
            self.check_column(col, had.len(), || (group, row, position))?;
            if std::mem::replace(&mut had[col as usize], number) == number {
                let place = self.place(group, row);
                return invalid(format!(
                    "column {col} comes twice at {place}, position {position}"
                ));
            }
            out.push(col);
        }
        Ok(())
    }
}

/// The rows of each group, the longest first, and the last first among equally long ones. `row_ptr`
/// holds `rows + 1` offsets per group.
fn row_order(row_ptr: &[i32], rows: usize) -> Result<Vec<i32>> {
    let mut order = reserved(row_ptr.len())?;
    for offsets in row_ptr.chunks_exact(rows + 1) {
        let start = order.len();
        order.extend((0..rows as i32).rev());
        let length = |row: i32| offsets[row as usize + 1] - offsets[row as usize];
        order[start..].sort_by_key(|&row| Reverse(length(row)));
    }
    Ok(order)
}

#[cfg(test)]
#[path = "build_tests.rs"]
mod tests;
