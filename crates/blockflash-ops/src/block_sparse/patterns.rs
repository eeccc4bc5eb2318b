//! Block masks of a fixed pattern, with one batch entry and one head. `union` combines patterns,
//! and `intersect_mask` removes the blocks that a token mask hides.

use super::validate::{Sizes, invalid};
use super::{BlockGeometry, BlockMask};
use crate::attention::MAX_SEQLEN;
use crate::{Align, Result};
use std::ops::Range;

/// A band, in blocks, around the diagonal columns of a row.
struct Band {
    align: Align,
    /// Columns on either side that are all visited.
    near: usize,
    /// Distance between visited columns farther away, at least 1.
    step: usize,
    /// Number of steps to the left of the diagonal columns; `None` does not limit them.
    before: Option<usize>,
    /// Number of steps to the right, likewise.
    after: Option<usize>,
}

impl BlockMask {
    /// Every block.
    ///
    /// # Errors
    /// [`Error::TooLarge`](crate::Error::TooLarge) if the number of blocks does not fit i32.
    pub fn full(geometry: BlockGeometry) -> Result<Self> {
        Self::sink(geometry, geometry.cols())
    }

    /// A sliding window: the diagonal columns of a row, `left` block columns before them, and
    /// `right` block columns after them; `None` does not limit a side.
    ///
    /// The diagonal columns of a row hold the positions of its queries, which depend on `align` as
    /// in [`Mask`](crate::Mask). With equal lengths and square blocks, row `r` has diagonal column
    /// `r`. Columns that do not exist are left out.
    ///
    /// # Errors
    /// [`Error::TooLarge`](crate::Error::TooLarge) if the number of visited blocks does not fit
    /// i32.
    pub fn window(
        geometry: BlockGeometry,
        left: Option<usize>,
        right: Option<usize>,
        align: Align,
    ) -> Result<Self> {
        band(geometry, &Band { align, near: 0, step: 1, before: left, after: right })
    }

    /// A dilated window: the diagonal columns of a row (see [`window`](Self::window)), and every
    /// `dilation`-th column from there, `left` of them before and `right` after; `None` does not
    /// limit a side.
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`](crate::Error::InvalidBlockMask) if `dilation` is 0;
    /// [`Error::TooLarge`](crate::Error::TooLarge) if the number of visited blocks does not fit
    /// i32.
    pub fn dilated(
        geometry: BlockGeometry,
        dilation: usize,
        left: Option<usize>,
        right: Option<usize>,
        align: Align,
    ) -> Result<Self> {
        if dilation == 0 {
            return invalid("dilation is 0, but must be at least 1".into());
        }
        band(geometry, &Band { align, near: 0, step: dilation, before: left, after: right })
    }

    /// A strided pattern: the diagonal columns of a row (see [`window`](Self::window)), `local`
    /// columns on either side of them, and every `stride`-th of the others, counted from the
    /// diagonal columns.
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`](crate::Error::InvalidBlockMask) if `stride` is 0;
    /// [`Error::TooLarge`](crate::Error::TooLarge) if the number of visited blocks does not fit
    /// i32.
    pub fn strided(
        geometry: BlockGeometry,
        stride: usize,
        local: usize,
        align: Align,
    ) -> Result<Self> {
        if stride == 0 {
            return invalid("stride is 0, but must be at least 1".into());
        }
        band(geometry, &Band { align, near: local, step: stride, before: None, after: None })
    }

    /// The first `count` block columns in every row.
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`](crate::Error::InvalidBlockMask) if there are fewer columns;
    /// [`Error::TooLarge`](crate::Error::TooLarge) if the number of visited blocks does not fit
    /// i32.
    pub fn sink(geometry: BlockGeometry, count: usize) -> Result<Self> {
        if count > geometry.cols() {
            return invalid(format!(
                "{count} sink columns, but there are {} columns",
                geometry.cols()
            ));
        }
        let blocks = geometry.rows().saturating_mul(count);
        Sizes::new(geometry, 1, 1)?.build(blocks, |_, _, columns| {
            columns.extend(0..count as i32);
            Ok(())
        })
    }

    /// All columns in the block rows `rows`, and the block columns `cols` in every row. Both may be
    /// in any order.
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`](crate::Error::InvalidBlockMask) names the first row or column
    /// that does not exist or comes twice; [`Error::TooLarge`](crate::Error::TooLarge) if the
    /// number of visited blocks does not fit i32.
    pub fn global(geometry: BlockGeometry, rows: &[usize], cols: &[usize]) -> Result<Self> {
        let in_rows = flags("row", rows, geometry.rows())?;
        let in_cols = flags("column", cols, geometry.cols())?;
        let sizes = Sizes::new(geometry, 1, 1)?;
        let others = (geometry.rows() - rows.len()).saturating_mul(cols.len());
        let blocks = rows.len().saturating_mul(geometry.cols()).saturating_add(others);
        let columns: Vec<i32> =
            (0..).zip(in_cols).filter(|&(_, global)| global).map(|(col, _)| col).collect();
        sizes.build(blocks, |_, row, out| {
            if in_rows[row] {
                out.extend(0..geometry.cols() as i32);
            } else {
                out.extend(&columns);
            }
            Ok(())
        })
    }
}

/// Marks which of `count` indices are listed.
fn flags(what: &str, list: &[usize], count: usize) -> Result<Vec<bool>> {
    let mut flags = vec![false; count];
    for (position, &index) in list.iter().enumerate() {
        match flags.get_mut(index) {
            None => {
                return invalid(format!(
                    "global {what} {position} is {index}, but there are {count}"
                ));
            }
            Some(true) => {
                return invalid(format!("global {what} {position} is {index}, which comes twice"));
            }
            Some(flag) => *flag = true,
        }
    }
    Ok(flags)
}

fn band(geometry: BlockGeometry, band: &Band) -> Result<BlockMask> {
    // Columns are less than MAX_SEQLEN apart, so a longer distance reaches none of them.
    let distance = |blocks: usize| blocks.min(MAX_SEQLEN) as i64;
    let [near, step] = [band.near, band.step].map(distance);
    let [before, after] =
        [band.before, band.after].map(|side| distance(side.unwrap_or(MAX_SEQLEN)));
    let cols = geometry.cols() as i64;
    let ceil = |distance: i64| -(-distance).div_euclid(step);
    // Steps to the left, columns around the diagonal, and steps to the right: those that leave the
    // dense part of the band and reach columns that exist.
    let parts = |first: i64, last: i64| {
        let beyond = near / step + 1;
        let to_left = beyond.max(ceil(first - (cols - 1)))..before.min(first.div_euclid(step)) + 1;
        let to_right = beyond.max(ceil(-last))..after.min((cols - 1 - last).div_euclid(step)) + 1;
        [to_left, (first - near).max(0)..(last + near + 1).min(cols), to_right]
    };
    let sizes = Sizes::new(geometry, 1, 1)?;
    let count_of = |row| {
        let (first, last) = geometry.stands_at(row, band.align);
        let length = |part: Range<i64>| (part.end - part.start).max(0) as usize;
        parts(first, last).map(length).into_iter().sum::<usize>()
    };
    sizes.build((0..geometry.rows()).map(count_of).sum(), |_, row, columns| {
        let (first, last) = geometry.stands_at(row, band.align);
        let [to_left, around, to_right] = parts(first, last);
        let mut push = |col: i64| columns.push(col as i32);
        to_left.rev().for_each(|steps| push(first - steps * step));
        around.for_each(&mut push);
        to_right.for_each(|steps| push(last + steps * step));
        Ok(())
    })
}

#[cfg(test)]
#[path = "patterns_tests.rs"]
mod tests;
