//! Operations that make one block mask from others. All read the index arrays on the CPU. Packed
//! masks are processed sequence by sequence.

use super::BlockGeometry;
use super::BlockMask;
use super::bits::BlockBits;
use super::validate::{Sizes, invalid};
use crate::{Mask, Result};

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
        self.sizes()?.build_blocks(0, |group, row, blocks| {
            let visible = self.geometry.visible_cols(row, mask);
            let all = lists.span(group, row);
            let until = |end: usize| {
                let columns = lists.columns(all.clone());
                all.start + columns.partition_point(|&col| (col as usize) < end)
            };
            blocks.extend(&lists, until(visible.start)..until(visible.end))
        })
    }

    /// The blocks that either mask visits, and of partial ones the pairs that either shows. A mask
    /// with 1 batch entry or head is broadcast to the other one.
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`](crate::Error::InvalidBlockMask) if the geometries differ, or if
    /// the numbers of batch entries or heads differ and neither is 1;
    /// [`Error::TooLarge`](crate::Error::TooLarge) if the number of blocks does not fit i32; a mask
    /// that is not on the CPU.
    pub fn union(&self, other: &Self) -> Result<Self> {
        self.merge(other, Merge::Either)
    }

    /// The blocks that both masks visit, and of partial ones the pairs that both show. A mask with
    /// 1 batch entry or head is broadcast to the other one.
    ///
    /// # Errors
    /// As for [`union`](Self::union).
    pub fn intersection(&self, other: &Self) -> Result<Self> {
        self.merge(other, Merge::Both)
    }

    /// The pairs that this mask shows and the other one does not. A mask with 1 batch entry or head
    /// is broadcast to the other one.
    ///
    /// # Errors
    /// As for [`union`](Self::union).
    pub fn difference(&self, other: &Self) -> Result<Self> {
        self.merge(other, Merge::OnlyFirst)
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
        let sizes = Sizes::new(self.geometry.transposed(), self.batch, self.heads)?;
        let lists = self.transposed_lists()?;
        let (row_ptr, col_idx) = (lists.row_ptr().view(), lists.col_idx().view());
        let (row_ptr, col_idx) = (row_ptr.as_slice()?, col_idx.as_slice()?);
        Self::from_parts(sizes.geometry, sizes.batch, sizes.heads, row_ptr, col_idx)?
            .bits_like(&lists)
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
        let [down, across] = self.block_tiles();
        sizes.build_blocks((0..sizes.groups()).map(rows).sum(), |group, row, blocks| {
            let span = lists.span(group, row / factor_q);
            for (&col, at) in lists.columns(span.clone()).iter().zip(span) {
                let bits = lists.bits_of(at);
                for (part, col) in expanded(col).enumerate() {
                    let part = [row % factor_q, part];
                    let size = [down / factor_q, across / factor_kv];
                    blocks.push(col, bits.as_ref().map(|bits| bits.part(part, size)))?;
                }
            }
            Ok(())
        })
    }

    /// The pairs of two masks that are kept.
    fn merge(&self, other: &Self, how: Merge) -> Result<Self> {
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
            return self.by_sequence(|at, sequence| sequence.merge(&other.entry(at)?, how));
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
            (ours.span(group_in(self, group), row), theirs.span(group_in(other, group), row))
        };
        // A union has at least the columns of the longer list, and broadcasting repeats them.
        let least = |group: usize, row: usize| {
            let (a, b) = both(group, row);
            if how == Merge::Either { a.len().max(b.len()) } else { 0 }
        };
        let rows = |group| (0..self.rows()).map(move |row| least(group, row)).sum::<usize>();
        sizes.build_blocks((0..sizes.groups()).map(rows).sum(), |group, row, blocks| {
            let (a, b) = both(group, row);
            let mut a = ours.columns(a.clone()).iter().zip(a).peekable();
            let mut b = theirs.columns(b.clone()).iter().zip(b).peekable();
            while let Some(col) = a.peek().into_iter().chain(b.peek()).map(|&(&col, _)| col).min() {
                let is_next = |&(&next, _): &(&i32, usize)| next == col;
                match (a.next_if(is_next), b.next_if(is_next)) {
                    (Some((_, a)), Some((_, b))) => {
                        let bits = (ours.bits_of(a), theirs.bits_of(b));
                        if let Some(bits) = how.merged(bits, self.block_tiles()) {
                            blocks.push(col, bits)?;
                        }
                    }
                    (Some((_, at)), None) if how != Merge::Both => {
                        blocks.push(col, ours.bits_of(at))?;
                    }
                    (None, Some((_, at))) if how == Merge::Either => {
                        blocks.push(col, theirs.bits_of(at))?;
                    }
                    _ => {}
                }
            }
            Ok(())
        })
    }

    fn sizes(&self) -> Result<Sizes> {
        Sizes::new(self.geometry, self.batch, self.heads)
    }
}

/// Which pairs of two masks are kept.
#[derive(Clone, Copy, PartialEq)]
enum Merge {
    Either,
    Both,
    OnlyFirst,
}

impl Merge {
    /// The bits of a block that both masks visit; within, `None` is a full block.
    fn merged(
        self,
        bits: (Option<BlockBits>, Option<BlockBits>),
        tiles: [usize; 2],
    ) -> Option<Option<BlockBits>> {
        match (self, bits) {
            (Self::Either, (Some(a), Some(b))) => Some(Some(a.combined(&b, |a, b| a | b))),
            (Self::Either, _) => Some(None),
            (Self::Both, (Some(a), Some(b))) => Some(Some(a.combined(&b, |a, b| a & b))),
            (Self::Both, (a, b)) => Some(a.or(b)),
            (Self::OnlyFirst, (_, None)) => None,
            (Self::OnlyFirst, (a, Some(b))) => {
                let none = BlockBits::none(tiles);
                let a = a.unwrap_or_else(|| none.combined(&none, |_, _| u64::MAX));
                Some(Some(a.combined(&b, |a, b| a & !b)))
            }
        }
    }
}

#[cfg(test)]
#[path = "combine_tests.rs"]
mod tests;
