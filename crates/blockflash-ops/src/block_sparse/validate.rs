//! The rules that index arrays of a block mask must satisfy. Arrays that break one never become a
//! [`BlockMask`](super::BlockMask).

use super::BlockGeometry;
use crate::check::to_i32;
use crate::{Error, Result};

/// Sizes of a block mask that passed [`Sizes::new`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sizes {
    pub(super) geometry: BlockGeometry,
    pub(super) batch: usize,
    pub(super) heads: usize,
}

impl Sizes {
    pub(super) fn new(geometry: BlockGeometry, batch: usize, heads: usize) -> Result<Self> {
        for (what, count) in [("batch", batch), ("heads", heads)] {
            if count == 0 {
                return invalid(format!("{what} is 0; 1 is the same mask for all"));
            }
        }
        // Entries of row_ptr are counted in 32 bits.
        let entries =
            batch.checked_mul(heads).and_then(|groups| groups.checked_mul(geometry.rows() + 1));
        to_i32("batch * heads * (rows + 1)", entries.unwrap_or(usize::MAX))?;
        Ok(Self { geometry, batch, heads })
    }

    /// Batch entries times heads.
    pub(super) fn groups(&self) -> usize {
        self.batch * self.heads
    }

    /// Where a row is, for messages.
    pub(super) fn place(&self, group: usize, row: usize) -> String {
        format!("batch {}, head {}, row {row}", group / self.heads, group % self.heads)
    }

    /// An operand `[batch, heads, rows, last]` must have this many values.
    pub(super) fn check_length(&self, what: &'static str, last: usize, found: usize) -> Result<()> {
        let Self { geometry, batch, heads } = *self;
        if (self.groups() * geometry.rows()).checked_mul(last) == Some(found) {
            return Ok(());
        }
        let expected = format!("the values of [{batch}, {heads}, {}, {last}]", geometry.rows());
        Err(Error::Shape { what, expected, found: vec![found] })
    }

    /// Checks the arrays of the format; the error names the first bad entry.
    pub(super) fn check_indices(&self, row_ptr: &[i32], col_idx: &[i32]) -> Result<()> {
        let (rows, cols, nnz) = (self.geometry.rows(), self.geometry.cols(), col_idx.len());
        to_i32("nnz", nnz)?;
        let entries = self.groups() * (rows + 1);
        if row_ptr.len() != entries {
            return invalid(format!("row_ptr has {} entries, expected {entries}", row_ptr.len()));
        }
        let mut end = 0;
        for (group, offsets) in row_ptr.chunks_exact(rows + 1).enumerate() {
            if offsets[0] != end {
                let (place, start) = (self.place(group, 0), offsets[0]);
                return invalid(format!("row_ptr starts with {start} at {place}, not with {end}"));
            }
            if let Some(row) = offsets.windows(2).position(|pair| pair[1] < pair[0]) {
                let (place, from, to) = (self.place(group, row), offsets[row], offsets[row + 1]);
                return invalid(format!("row_ptr descends from {from} to {to} at {place}"));
            }
            end = offsets[rows];
        }
        if end as usize != nnz {
            return invalid(format!("row_ptr ends at {end}, but col_idx has {nnz} entries"));
        }
        for (group, offsets) in row_ptr.chunks_exact(rows + 1).enumerate() {
            for (row, pair) in offsets.windows(2).enumerate() {
                let mut before = -1;
                for (position, &col) in
                    col_idx[pair[0] as usize..pair[1] as usize].iter().enumerate()
                {
                    self.check_column(col, cols, || (group, row, position))?;
                    if col <= before {
                        let fault = if col == before { "comes twice" } else { "is unsorted" };
                        let place = self.place(group, row);
                        return invalid(format!(
                            "column {col} {fault} at {place}, position {position}"
                        ));
                    }
                    before = col;
                }
            }
        }
        Ok(())
    }

    /// Checks that a column exists; `place` is its group, row and position.
    pub(super) fn check_column(
        &self,
        col: i32,
        cols: usize,
        place: impl Fn() -> (usize, usize, usize),
    ) -> Result<()> {
        if col >= 0 && (col as usize) < cols {
            return Ok(());
        }
        let (group, row, position) = place();
        let place = self.place(group, row);
        invalid(format!(
            "column is {col} at {place}, position {position}, but there are {cols} columns"
        ))
    }
}

/// Checks that `index` is below `count`.
pub(super) fn exists(what: &str, index: usize, count: usize) -> Result<()> {
    if index < count {
        Ok(())
    } else {
        invalid(format!("{what} is {index}, but there are {count}"))
    }
}

pub(super) fn invalid<T>(what: String) -> Result<T> {
    Err(Error::InvalidBlockMask(what))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two batch entries, two heads, 2 × 3 blocks.
    fn sizes() -> Sizes {
        Sizes::new(BlockGeometry::new(100, 150, 64, 64).unwrap(), 2, 2).unwrap()
    }

    fn problem(row_ptr: &[i32], col_idx: &[i32]) -> String {
        sizes().check_indices(row_ptr, col_idx).unwrap_err().to_string()
    }

    #[test]
    fn good_indices() {
        sizes().check_indices(&[0; 12], &[]).unwrap();
        sizes().check_indices(&[0, 1, 1, 1, 1, 4, 4, 4, 4, 4, 5, 6], &[2, 0, 1, 2, 1, 0]).unwrap();
        let empty = Sizes::new(BlockGeometry::new(0, 150, 64, 64).unwrap(), 3, 1).unwrap();
        empty.check_indices(&[0; 3], &[]).unwrap();
        let empty = Sizes::new(BlockGeometry::new(100, 0, 64, 64).unwrap(), 1, 1).unwrap();
        empty.check_indices(&[0; 3], &[]).unwrap();
    }

    #[test]
    fn bad_indices_are_named() {
        assert!(problem(&[0; 11], &[]).contains("row_ptr has 11 entries, expected 12"));
        let start = problem(&[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], &[0]);
        assert!(start.contains("row_ptr starts with 1 at batch 0, head 0, row 0, not with 0"));
        let gap = problem(&[0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2], &[0, 0]);
        assert!(gap.contains("row_ptr starts with 2 at batch 0, head 1, row 0, not with 1"));
        let descent = problem(&[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0], &[]);
        assert!(descent.contains("descends from 1 to 0 at batch 1, head 0, row 1"));
        let end = problem(&[0; 12], &[0]);
        assert!(end.contains("row_ptr ends at 0, but col_idx has 1 entries"));
        let last_row = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2];
        for (columns, expected) in [
            ([0, 3], "column is 3 at batch 1, head 1, row 1, position 1, but there are 3 columns"),
            ([-1, 0], "column is -1 at batch 1, head 1, row 1, position 0"),
            ([1, 1], "column 1 comes twice at batch 1, head 1, row 1, position 1"),
            ([2, 1], "column 1 is unsorted at batch 1, head 1, row 1, position 1"),
        ] {
            assert!(problem(&last_row, &columns).contains(expected), "{expected}");
        }
    }

    #[test]
    fn sizes_have_limits() {
        let geometry = sizes().geometry;
        assert!(matches!(Sizes::new(geometry, 0, 1), Err(Error::InvalidBlockMask(_))));
        assert!(matches!(Sizes::new(geometry, 1, 0), Err(Error::InvalidBlockMask(_))));
        for (batch, heads) in [(1 << 30, 1), (1, 1 << 30), (usize::MAX, usize::MAX)] {
            let result = Sizes::new(geometry, batch, heads);
            assert!(matches!(
                result,
                Err(Error::TooLarge { what: "batch * heads * (rows + 1)", .. })
            ));
        }
    }
}
