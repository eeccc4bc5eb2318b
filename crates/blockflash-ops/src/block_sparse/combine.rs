//! Operations that make one block mask from others. All read the index arrays on the CPU. Packed
//! masks are processed sequence by sequence.

use super::BlockGeometry;
use super::BlockMask;
use super::validate::{Sizes, invalid};
use crate::check::{filled, reserved};
use crate::{Mask, Result};
use std::cmp::Ordering;

impl BlockMask {
    /// Removes the blocks that the token mask hides entirely.
    /// [`visited_pairs`](Self::visited_pairs) under that mask stays the same.
    ///
    /// # Errors
    /// A mask that is not on the CPU.
    pub fn intersect_mask(&self, mask: Mask) -> Result<Self> {
        if self.packed.is_some() {
            return self.by_sequence(|_, sequence| sequence.intersect_mask(mask));
        }
        let lists = self.lists()?;
        self.sizes()?.build(0, |group, row, columns| {
            let visible = self.geometry.visible_cols(row, mask);
            let all = lists.row(group, row);
            let until = |end: usize| all.partition_point(|&col| (col as usize) < end);
            columns.extend(&all[until(visible.start)..until(visible.end)]);
            Ok(())
        })
    }

    /// The blocks that either mask visits. A mask with 1 batch entry or head is broadcast to the
    /// other one.
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`](crate::Error::InvalidBlockMask) if the geometries differ, or if
    /// the numbers of batch entries or heads differ and neither is 1;
    /// [`Error::TooLarge`](crate::Error::TooLarge) if the number of blocks does not fit i32; a mask
    /// that is not on the CPU.
    pub fn union(&self, other: &Self) -> Result<Self> {
        self.merge(other, true)
    }

    /// The blocks that both masks visit. A mask with 1 batch entry or head is broadcast to the
    /// other one.
    ///
    /// # Errors
    /// As for [`union`](Self::union).
    pub fn intersection(&self, other: &Self) -> Result<Self> {
        self.merge(other, false)
    }

    /// The mask of keys × queries: each of its rows lists the block rows that visit one block of
    /// keys, as a backward pass needs them. Queries and keys are exchanged in its geometry.
    ///
    /// # Errors
    /// [`Error::TooLarge`](crate::Error::TooLarge) if the entries of its `row_ptr` do not fit i32;
    /// a mask that is not on the CPU.
    pub fn transpose(&self) -> Result<Self> {
        if self.packed.is_some() {
            return self.by_sequence(|_, sequence| sequence.transpose());
        }
        let lists = self.lists()?;
        let (rows, cols) = (self.rows(), self.cols());
        let sizes = Sizes::new(self.geometry.transposed(), self.batch, self.heads)?;
        let mut row_ptr = reserved(sizes.groups() * (cols + 1))?;
        let mut col_idx = filled(0, &[self.nnz()])?;
        let mut end = 0;
        for group in 0..sizes.groups() {
            // Per column, first the number of its rows, then the position of the next one.
            let mut next = vec![0; cols];
            let blocks = (0..rows)
                .flat_map(|row| lists.row(group, row).iter().map(move |&col| (row, col as usize)));
            blocks.clone().for_each(|(_, col)| next[col] += 1);
            row_ptr.push(end as i32);
            for next in &mut next {
                let start = end;
                end += *next;
                *next = start;
                row_ptr.push(end as i32);
            }
            for (row, col) in blocks {
                col_idx[next[col]] = row as i32;
                next[col] += 1;
            }
        }
        Self::from_parts(sizes.geometry, self.batch, self.heads, &row_ptr, &col_idx)
    }

    /// The same pairs in smaller blocks of `block_q / factor_q` queries × `block_kv / factor_kv`
    /// keys.
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`](crate::Error::InvalidBlockMask) if a block size is not a
    /// multiple of its factor; [`Error::BlockSize`](crate::Error::BlockSize) if no block has the
    /// size that is left; [`Error::TooLarge`](crate::Error::TooLarge) if the number of blocks does
    /// not fit i32; a mask that is not on the CPU.
    pub fn expand(&self, factor_q: usize, factor_kv: usize) -> Result<Self> {
        if self.packed.is_some() {
            return self.by_sequence(|_, sequence| sequence.expand(factor_q, factor_kv));
        }
        let lists = self.lists()?;
        let divided = |what: &str, size: usize, factor: usize| match size.checked_rem(factor) {
            Some(0) => Ok(size / factor),
            _ => invalid(format!("{what} is {size}, which {factor} does not divide")),
        };
        let geometry = BlockGeometry::new(
            self.seqlen_q(),
            self.seqlen_kv(),
            divided("block_q", self.block_q(), factor_q)?,
            divided("block_kv", self.block_kv(), factor_kv)?,
        )?;
        let sizes = Sizes::new(geometry, self.batch, self.heads)?;
        let expanded = |col: i32| {
            let first = col as usize * factor_kv;
            first as i32..(first + factor_kv).min(geometry.cols()) as i32
        };
        let count_of = |group: usize, row: usize| {
            let columns: usize = lists.row(group, row).iter().map(|&col| expanded(col).len()).sum();
            columns * ((row + 1) * factor_q).min(geometry.rows()).saturating_sub(row * factor_q)
        };
        let rows = |group| (0..self.rows()).map(move |row| count_of(group, row)).sum::<usize>();
        sizes.build((0..sizes.groups()).map(rows).sum(), |group, row, columns| {
            lists.row(group, row / factor_q).iter().for_each(|&col| columns.extend(expanded(col)));
            Ok(())
        })
    }

    /// The intersection of two masks or, with `either`, their union.
    fn merge(&self, other: &Self, either: bool) -> Result<Self> {
        let (ours, theirs) = (self.sequences(), other.sequences());
        if ours != theirs {
            let (ours, theirs) = (ours.unwrap_or_default(), theirs.unwrap_or_default());
            let at = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
            return invalid(format!(
                "they are not both packed from the same sequences: sequence {at} of {} is {:?}, \
                 that of {} is {:?}",
                ours.len(),
                ours.get(at),
                theirs.len(),
                theirs.get(at)
            ));
        }
        if self.packed.is_some() {
            return self.by_sequence(|at, sequence| sequence.merge(&other.entry(at)?, either));
        }
        if self.geometry != other.geometry {
            return invalid(format!(
                "geometries differ: {:?} and {:?}",
                self.geometry, other.geometry
            ));
        }
        let common = |what: &str, a: usize, b: usize| match (a, b) {
            _ if a == b || b == 1 => Ok(a),
            (1, _) => Ok(b),
            _ => invalid(format!("{what} differ and none is 1: {a} and {b}")),
        };
        let batch = common("batch entries", self.batch, other.batch)?;
        let heads = common("heads", self.heads, other.heads)?;
        let (ours, theirs) = (self.lists()?, other.lists()?);
        let group_in = |mask: &Self, group: usize| {
            let batch = if mask.batch == 1 { 0 } else { group / heads };
            let head = if mask.heads == 1 { 0 } else { group % heads };
            batch * mask.heads + head
        };
        let sizes = Sizes::new(self.geometry, batch, heads)?;
        let both = |group: usize, row: usize| {
            (ours.row(group_in(self, group), row), theirs.row(group_in(other, group), row))
        };
        // A union has at least the columns of the longer list, and broadcasting repeats them.
        let least = |group: usize, row: usize| {
            let (a, b) = both(group, row);
            if either { a.len().max(b.len()) } else { 0 }
        };
        let rows = |group| (0..self.rows()).map(move |row| least(group, row)).sum::<usize>();
        sizes.build((0..sizes.groups()).map(rows).sum(), |group, row, columns| {
            let (a, b) = both(group, row);
            merge_rows(a, b, either, columns);
            Ok(())
        })
    }

    fn sizes(&self) -> Result<Sizes> {
        Sizes::new(self.geometry, self.batch, self.heads)
    }
}

/// Appends the columns that are in both ascending lists or, with `either`, in at least one.
fn merge_rows(mut a: &[i32], mut b: &[i32], either: bool, columns: &mut Vec<i32>) {
    while let ([first_a, rest_a @ ..], [first_b, rest_b @ ..]) = (a, b) {
        let order = first_a.cmp(first_b);
        if either || order == Ordering::Equal {
            columns.push(*first_a.min(first_b));
        }
        if order != Ordering::Greater {
            a = rest_a;
        }
        if order != Ordering::Less {
            b = rest_b;
        }
    }
    if either {
        columns.extend(a.iter().chain(b));
    }
}

#[cfg(test)]
#[path = "combine_tests.rs"]
mod tests;
