//! Constructors of [`BlockMask`] from the pairs that are visible: blocks of which all pairs are
//! visible become full, blocks with some of them partial, and the others are not visited.
//!
//! All run on the host. What sees the same for every head takes one head, which stands for all.

use super::bits::{BlockBits, Blocks};
use super::validate::Sizes;
use super::{BitTile, BlockGeometry, BlockMask};
use crate::{Error, Mask, Result};
use std::ops::Range;

impl BlockMask {
    /// From the keys that each query sees, as ranges: `keys(batch, head, query)` returns any number
    /// of them, which may overlap and be in any order. The part of a range beyond the last key is
    /// left out.
    ///
    /// This takes time for each range, and for each pair of a partial block and a range in it. The
    /// other constructors from pairs are made of it.
    ///
    /// ```
    /// use blockflash_ops::{BlockGeometry, BlockMask, Mask};
    ///
    /// // Chunks of 100 tokens, which do not look beyond their chunk, and 4 keys for everybody.
    /// let geometry = BlockGeometry::new(1000, 1000, 64, 64)?;
    /// let chunks = |_, _, query: usize| [0..4, query / 100 * 100..query / 100 * 100 + 100];
    /// let mask = BlockMask::from_ranges(geometry, 1, 1, chunks)?;
    /// assert!(mask.is_visible(0, 0, 250, 299)? && !mask.is_visible(0, 0, 250, 300)?);
    /// assert_eq!(mask.visited_pairs(Mask::Full)?, 1000 * 100 + 900 * 4);
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`] if `batch` or `heads` is 0; [`Error::TooLarge`] if the number of
    /// blocks or of tiles of bits does not fit i32; out of memory.
    pub fn from_ranges<R: IntoIterator<Item = Range<usize>>>(
        geometry: BlockGeometry,
        batch: usize,
        heads: usize,
        keys: impl Fn(usize, usize, usize) -> R,
    ) -> Result<Self> {
        let mut seen = Seen::default();
        Sizes::new(geometry, batch, heads)?.build_blocks(0, |group, row, blocks| {
            seen.clear();
            for (at, query) in geometry.queries(row).enumerate() {
                let ranges = keys(group / heads, group % heads, query);
                seen.push(at, ranges.into_iter(), geometry.seqlen_kv());
            }
            seen.list(&geometry, row, blocks)
        })
    }

    /// The pairs for which `visible(batch, head, query, key)` holds. It is called for every pair of
    /// `batch` × `heads` × `seqlen_q` × `seqlen_kv`: where the keys of a query are few ranges,
    /// [`from_ranges`](Self::from_ranges) takes far less time.
    ///
    /// # Errors
    /// As for [`from_ranges`](Self::from_ranges).
    pub fn from_fn(
        geometry: BlockGeometry,
        batch: usize,
        heads: usize,
        visible: impl Fn(usize, usize, usize, usize) -> bool,
    ) -> Result<Self> {
        Self::from_ranges(geometry, batch, heads, |batch, head, query| {
            runs(geometry.seqlen_kv(), |key| visible(batch, head, query, key))
        })
    }

    /// The pairs that are true in `pairs`, `[batch, heads, seqlen_q, seqlen_kv]` row-major.
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of values; as for [`from_ranges`](Self::from_ranges).
    pub fn from_token_mask(
        geometry: BlockGeometry,
        batch: usize,
        heads: usize,
        pairs: &[bool],
    ) -> Result<Self> {
        let (seqlen_q, seqlen_kv) = (geometry.seqlen_q(), geometry.seqlen_kv());
        let shape = [batch, heads, seqlen_q, seqlen_kv];
        let count = shape.iter().try_fold(1usize, |count, &size| count.checked_mul(size));
        if count != Some(pairs.len()) {
            let expected = format!("the values of {shape:?}");
            return Err(Error::Shape { what: "pairs", expected, found: vec![pairs.len()] });
        }
        Self::from_ranges(geometry, batch, heads, |batch, head, query| {
            let row = (batch * heads + head) * seqlen_q + query;
            runs(seqlen_kv, |key| pairs[row * seqlen_kv + key])
        })
    }

    /// A token mask for each head, for example windows of different lengths. With one mask these
    /// are the pairs that it shows.
    ///
    /// # Errors
    /// As for [`from_ranges`](Self::from_ranges); also if there are no masks.
    pub fn from_masks(geometry: BlockGeometry, masks: &[Mask]) -> Result<Self> {
        let (seqlen_q, seqlen_kv) = (geometry.seqlen_q(), geometry.seqlen_kv());
        Self::from_ranges(geometry, 1, masks.len(), |_, head, query| {
            [masks[head].visible(query, seqlen_q, seqlen_kv)]
        })
    }

    /// The pairs that the token mask shows and this mask does not.
    ///
    /// # Errors
    /// As for [`union`](Self::union).
    pub fn complement(&self, mask: Mask) -> Result<Self> {
        if self.sequences().is_some() {
            return self.by_sequence(|_, sequence| sequence.complement(mask));
        }
        Self::from_masks(self.geometry(), &[mask])?.difference(self)
    }
}

/// The runs of true values.
fn runs(count: usize, is: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
    let mut runs = Vec::new();
    let mut start = None;
    for at in 0..=count {
        match (start, at < count && is(at)) {
            (None, true) => start = Some(at),
            (Some(first), false) => {
                runs.push(first..at);
                start = None;
            }
            _ => {}
        }
    }
    runs
}

/// The keys that the queries of a block row see.
#[derive(Default)]
struct Seen {
    /// Query of the row, and a range that is not empty. Those of a query are disjoint.
    ranges: Vec<(usize, Range<usize>)>,
    /// Those of one query.
    own: Vec<Range<usize>>,
    /// Per block column, how many queries begin there to see all of its keys, less how many end.
    all: Vec<i64>,
    /// Per block column, whether a query sees some of its keys and not the others.
    some: Vec<bool>,
}

impl Seen {
    fn clear(&mut self) {
        self.ranges.clear();
    }

    /// Takes the ranges of a query.
    fn push(&mut self, query: usize, ranges: impl Iterator<Item = Range<usize>>, count: usize) {
        let cut = ranges.map(|range| range.start..range.end.min(count));
        self.own.clear();
        self.own.extend(cut.filter(|range| !range.is_empty()));
        self.own.sort_unstable_by_key(|range| range.start);
        let first = self.ranges.len();
        for range in self.own.drain(..) {
            match self.ranges[first..].last_mut() {
                Some((_, last)) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => self.ranges.push((query, range)),
            }
        }
    }

    /// Lists the blocks of the row.
    fn list(&mut self, geometry: &BlockGeometry, row: usize, blocks: &mut Blocks) -> Result<()> {
        let (block_kv, cols) = (geometry.block_kv(), geometry.cols());
        self.all.clear();
        self.all.resize(cols + 1, 0);
        self.some.clear();
        self.some.resize(cols, false);
        // The columns of which a range has all keys. The last column may be shorter.
        let whole = |range: &Range<usize>| {
            let end = if range.end == geometry.seqlen_kv() { cols } else { range.end / block_kv };
            range.start.div_ceil(block_kv)..end
        };
        for (_, range) in &self.ranges {
            let (whole, last) = (whole(range), (range.end - 1) / block_kv);
            if !whole.is_empty() {
                self.all[whole.start] += 1;
                self.all[whole.end] -= 1;
            }
            for col in [range.start / block_kv, last] {
                self.some[col] |= !whole.contains(&col);
            }
        }
        // Columns that some queries see entirely and others not at all are partial, too.
        let queries = geometry.queries(row).len() as i64;
        let (mut seen, mut partial) = (0, Vec::new());
        for col in 0..cols {
            seen += self.all[col];
            self.all[col] = seen;
            if self.some[col] || (1..queries).contains(&seen) {
                let tiles = [geometry.block_q(), block_kv].map(|size| size / BitTile::SIDE);
                partial.push((col, BlockBits::none(tiles)));
            }
        }
        for (query, range) in &self.ranges {
            let first = partial.partition_point(|(col, _)| (col + 1) * block_kv <= range.start);
            for (col, bits) in &mut partial[first..] {
                let keys = *col * block_kv..(*col + 1) * block_kv;
                if keys.start >= range.end {
                    break;
                }
                let (start, end) = (range.start.max(keys.start), range.end.min(keys.end));
                bits.show(*query, start - keys.start..end - keys.start);
            }
        }
        let mut partial = partial.into_iter().peekable();
        for col in 0..cols {
            match partial.next_if(|&(at, _)| at == col) {
                Some((_, bits)) => blocks.push(col as i32, Some(bits))?,
                None if self.all[col] == queries => blocks.push(col as i32, None)?,
                None => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "tokens_tests.rs"]
mod tests;
