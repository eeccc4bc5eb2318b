//! Partial blocks: visited blocks of which only some pairs are visible.

use super::mask::Lists;
use super::validate::{Sizes, exists};
use super::{BitTile, BlockGeometry, BlockMask};
use crate::check::{append, filled, to_i32};
use crate::{Error, Mask, Result};
use blockflash_safe::{BlockLists, Device, Tensor};
use std::collections::HashMap;
use std::ops::Range;

impl BlockMask {
    /// The same mask with bits for partial blocks, in place of those that it has.
    ///
    /// `words` `[tiles, 128]` holds [tiles](BitTile) of 64 × 64 pairs. A block consists of
    /// `block_q / 64 * block_kv / 64` of them, row by row, one after another. `block_bits` `[nnz]`
    /// says for each entry of [`col_idx`](Self::col_idx) which tile is the first one of its block,
    /// or −1 where all pairs are visible. Blocks that look alike may share their tiles. Bits beyond
    /// the ends of the sequences do not matter.
    ///
    /// Within a partial block a pair is attended where its bit is 1 and the token mask shows it.
    /// A mask that has a [transpose](Self::with_transpose) gets transposed bits as well. Bits take
    /// 512 bytes per 64 × 64 pairs.
    ///
    /// ```
    /// use blockflash_ops::block_sparse::BitTile;
    /// use blockflash_ops::{BlockGeometry, BlockMask, Mask};
    ///
    /// // Every other key of the first block, and all keys of the second one.
    /// let mask = BlockMask::full(BlockGeometry::new(64, 128, 64, 64)?)?;
    /// let even = BitTile::new(|_, col| col % 2 == 0);
    /// let mask = mask.with_bits(&[0, -1], &even.words())?;
    /// assert!(mask.is_visible(0, 0, 5, 2)? && !mask.is_visible(0, 0, 5, 3)?);
    /// assert_eq!(mask.visited_pairs(Mask::Full)?, 64 * (32 + 64));
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`] names the first entry of `block_bits` that is not −1, or whose
    /// tiles are not in `words` or overlap those of another block, or another number of entries or
    /// words; [`Error::TooLarge`] if tiles do not fit i32; a mask that is not on the CPU.
    pub fn with_bits(self, block_bits: &[i32], words: &[u32]) -> Result<Self> {
        self.lists()?;
        to_i32("tiles of bits", words.len() / BitTile::WORDS)?;
        let (transposed, [down, across]) = (self.transpose.is_some(), self.block_tiles());
        let stream = Device::cpu().stream()?;
        let lists = self.lists.with_bits(down * across, block_bits, words, &stream);
        let lists = lists.map_err(|error| match error {
            blockflash_safe::Error::Indices { what } => Error::InvalidBlockMask(what),
            error => error.into(),
        })?;
        let mask = Self { lists, transpose: None, ..self };
        if transposed { mask.with_transpose() } else { Ok(mask) }
    }

    /// The bits of partial blocks, where the mask is; `None` if all visited blocks are full. They
    /// are `block_bits`, i32 `[nnz]`, and `words`, i32 `[tiles, 128]`, as
    /// [`with_bits`](Self::with_bits) takes them.
    pub fn bits(&self) -> Option<[&Tensor; 2]> {
        self.lists.bits()
    }

    /// Whether a query attends a key under this mask alone. The indices of batch entry and head
    /// address the mask itself, so they are 0 where it has one for all.
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`] for a batch entry, head, query or key that does not exist; a
    /// mask that is not on the CPU.
    pub fn is_visible(&self, batch: usize, head: usize, query: usize, key: usize) -> Result<bool> {
        exists("batch", batch, self.batch)?;
        exists("head", head, self.heads)?;
        let geometry = self.geometry_of(batch);
        exists("query", query, geometry.seqlen_q())?;
        exists("key", key, geometry.seqlen_kv())?;
        let (row, col) = (query / self.block_q(), (key / self.block_kv()) as i32);
        let lists = self.lists()?;
        let span = lists.span_at([batch, head, row]);
        let Ok(at) = lists.columns(span.clone()).binary_search(&col) else { return Ok(false) };
        let (row, col) = (query % self.block_q(), key % self.block_kv());
        Ok(lists.bits_of(span.start + at).is_none_or(|block| block.get(row, col)))
    }

    /// The columns of one row, ascending, each with the number of pairs of its block that are
    /// visible under the token mask. The indices are those of [`row`](Self::row).
    ///
    /// # Errors
    /// As for [`row`](Self::row).
    pub fn row_pairs(
        &self,
        batch: usize,
        head: usize,
        row: usize,
        mask: Mask,
    ) -> Result<impl ExactSizeIterator<Item = (usize, u64)> + '_> {
        let (columns, lists) = (self.row(batch, head, row)?, self.lists()?);
        let place = [batch, head, row];
        let pairs = move |(col, at)| (col, self.pairs_of(&lists, place, at, mask));
        Ok(columns.zip(lists.span_at(place)).map(pairs))
    }

    /// Number of visited blocks that are partial, over all batch entries and heads of the mask.
    ///
    /// # Errors
    /// A mask that is not on the CPU.
    pub fn partial_blocks(&self) -> Result<usize> {
        let lists = self.lists()?;
        let partial = lists.block_bits().unwrap_or_default().iter().filter(|&&first| first >= 0);
        Ok(partial.count())
    }

    /// Which pairs are visible, `[batch, heads, seqlen_q, seqlen_kv]`. Pairs beyond the end of a
    /// shorter sequence are false.
    ///
    /// # Errors
    /// Out of memory; a mask that is not on the CPU.
    pub fn to_token_mask(&self) -> Result<Vec<bool>> {
        let (seqlen_q, seqlen_kv) = (self.seqlen_q(), self.seqlen_kv());
        let mut pairs = filled(false, &[self.batch, self.heads, seqlen_q, seqlen_kv])?;
        let lists = self.lists()?;
        for ([batch, head, row], span) in self.spans()? {
            let geometry = self.geometry_of(batch);
            for (&col, at) in lists.columns(span.clone()).iter().zip(span) {
                let (keys, bits) = (geometry.keys(col as usize), lists.bits_of(at));
                for (i, query) in geometry.queries(row).enumerate() {
                    let start = ((batch * self.heads + head) * seqlen_q + query) * seqlen_kv;
                    for (j, pair) in pairs[start..][keys.clone()].iter_mut().enumerate() {
                        *pair = bits.as_ref().is_none_or(|bits| bits.get(i, j));
                    }
                }
            }
        }
        Ok(pairs)
    }

    /// The keys of each block that a row visits, ascending, and the bits of partial blocks. The
    /// indices address the mask itself, which is on the CPU.
    pub(crate) fn blocks_of_row(
        &self,
        batch: usize,
        head: usize,
        row: usize,
    ) -> Result<Vec<(Range<usize>, Option<BlockBits>)>> {
        exists("batch", batch, self.batch)?;
        exists("head", head, self.heads)?;
        let geometry = self.geometry_of(batch);
        exists("row", row, geometry.rows())?;
        let lists = self.lists()?;
        let span = lists.span_at([batch, head, row]);
        let columns = lists.columns(span.clone()).iter().zip(span);
        Ok(columns.map(|(&col, at)| (geometry.keys(col as usize), lists.bits_of(at))).collect())
    }

    /// This mask with the bits of lists of the same blocks, all on the CPU.
    pub(super) fn bits_like(self, lists: &BlockLists) -> Result<Self> {
        let Some([block_bits, words]) = lists.bits() else { return Ok(self) };
        let (block_bits, words) = (block_bits.view(), words.view());
        let words: Vec<u32> = words.as_slice::<i32>()?.iter().map(|&word| word as u32).collect();
        // Lists that a kernel fills have room for more blocks.
        let block_bits = &block_bits.as_slice()?[..self.nnz()];
        self.with_bits(block_bits, &words)
    }

    /// Tiles of a block, along queries and along keys.
    pub(super) fn block_tiles(&self) -> [usize; 2] {
        [self.block_q(), self.block_kv()].map(|size| size / BitTile::SIDE)
    }

    /// Number of pairs of a listed block that are visible under the token mask.
    pub(super) fn pairs_of(
        &self,
        lists: &Lists<'_>,
        [batch, _, row]: [usize; 3],
        at: usize,
        mask: Mask,
    ) -> u64 {
        let (geometry, col) = (self.geometry_of(batch), lists.columns(at..at + 1)[0] as usize);
        let Some(bits) = lists.bits_of(at) else { return geometry.pairs(row, col, mask) };
        let keys = geometry.keys(col);
        let pairs = |(i, query): (usize, usize)| {
            let visible = mask.visible(query, geometry.seqlen_q(), geometry.seqlen_kv());
            let [start, end] = [visible.start, visible.end]
                .map(|key| key.clamp(keys.start, keys.end) - keys.start);
            bits.count(i, start..end)
        };
        geometry.queries(row).enumerate().map(pairs).sum()
    }
}

/// The bits of a block: its tiles row by row.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlockBits {
    pub(super) tiles: Vec<BitTile>,
    /// Tiles along keys.
    pub(super) across: usize,
}

impl BlockBits {
    /// No pair of a block with this many tiles along queries and keys is visible.
    pub(super) fn none([down, across]: [usize; 2]) -> Self {
        Self { tiles: vec![BitTile::NONE; down * across], across }
    }

    /// Whether query `row` of the block sees its key `col`; both are below its size.
    pub(crate) fn get(&self, row: usize, col: usize) -> bool {
        let side = BitTile::SIDE;
        self.tiles[row / side * self.across + col / side].get(row % side, col % side)
    }

    /// Shows keys of the block to its query `row`; all are below its size.
    pub(super) fn show(&mut self, row: usize, keys: Range<usize>) {
        for (tile, bits) in bits_of(keys) {
            self.tiles[row / BitTile::SIDE * self.across + tile].show(row % BitTile::SIDE, bits);
        }
    }

    /// How many of these keys of the block its query `row` sees; all are below its size.
    pub(super) fn count(&self, row: usize, keys: Range<usize>) -> u64 {
        let tiles = &self.tiles[row / BitTile::SIDE * self.across..];
        let seen = |(tile, bits): (usize, u64)| tiles[tile].row(row % BitTile::SIDE) & bits;
        bits_of(keys).map(|part| u64::from(seen(part).count_ones())).sum()
    }

    /// Keys × queries.
    pub(super) fn transposed(&self) -> Self {
        let (down, across) = (self.tiles.len() / self.across.max(1), self.across);
        let tile = |at: usize| self.tiles[at % down * across + at / down].transposed();
        Self { tiles: (0..self.tiles.len()).map(tile).collect(), across: down }
    }

    /// A part of the block, of parts with this many tiles along queries and along keys.
    pub(super) fn part(&self, [row, col]: [usize; 2], [down, across]: [usize; 2]) -> Self {
        let line = |tile| &self.tiles[(row * down + tile) * self.across + col * across..][..across];
        Self { tiles: (0..down).flat_map(line).copied().collect(), across }
    }

    /// Combines the bits of two blocks of equal size.
    pub(super) fn combined(&self, other: &Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        let pairs = self.tiles.iter().zip(&other.tiles);
        let tiles = pairs.map(|(a, b)| a.combined(b, &combine)).collect();
        Self { tiles, across: self.across }
    }
}

/// The tiles that hold these columns, with a bit for each of them.
fn bits_of(columns: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    let tiles = columns.start / BitTile::SIDE..columns.end.div_ceil(BitTile::SIDE);
    let tiles = if columns.is_empty() { 0..0 } else { tiles };
    tiles.map(move |tile| {
        let below = |end: usize| match end.saturating_sub(tile * BitTile::SIDE) {
            bits @ ..BitTile::SIDE => (1 << bits) - 1,
            _ => u64::MAX,
        };
        (tile, below(columns.end) & !below(columns.start))
    })
}

/// The bits of the blocks of a mask in the making. Blocks that look alike share them.
#[derive(Default)]
pub(super) struct BitList {
    block_bits: Vec<i32>,
    words: Vec<u32>,
    known: HashMap<BlockBits, i32>,
}

impl BitList {
    /// Appends the bits of a block; `None` if it is full.
    pub(super) fn push(&mut self, bits: Option<BlockBits>) -> Result<()> {
        let first = match bits {
            None => -1,
            Some(bits) => match self.known.get(&bits) {
                Some(&first) => first,
                None => {
                    let first = to_i32("tiles of bits", self.words.len() / BitTile::WORDS)?;
                    for tile in &bits.tiles {
                        append(&mut self.words, &tile.words())?;
                    }
                    *self.known.entry(bits).or_insert(first)
                }
            },
        };
        self.block_bits.push(first);
        Ok(())
    }

    /// The mask of the blocks with their bits, if there are any.
    pub(super) fn give_to(self, mask: BlockMask) -> Result<BlockMask> {
        if self.words.is_empty() { Ok(mask) } else { mask.with_bits(&self.block_bits, &self.words) }
    }
}

/// The blocks of a row of a mask in the making.
pub(super) struct Blocks {
    queries: usize,
    geometry: BlockGeometry,
    columns: Vec<i32>,
    bits: BitList,
}

impl Blocks {
    /// Appends a block behind all others of the row. Of bits, those that exist decide whether the
    /// block is full or partial, or not visited at all.
    pub(super) fn push(&mut self, col: i32, bits: Option<BlockBits>) -> Result<()> {
        let keys = self.geometry.keys(col as usize).len();
        let visible =
            |bits: &BlockBits| (0..self.queries).map(|row| bits.count(row, 0..keys)).sum();
        let bits = match bits.as_ref().map(visible) {
            Some(0) => return Ok(()),
            Some(count) if count == (self.queries * keys) as u64 => None,
            _ => bits,
        };
        self.columns.push(col);
        self.bits.push(bits)
    }

    /// Appends the blocks of a span.
    pub(super) fn extend(&mut self, lists: &Lists<'_>, span: Range<usize>) -> Result<()> {
        let columns = lists.columns(span.clone()).iter();
        columns.zip(span).try_for_each(|(&col, at)| self.push(col, lists.bits_of(at)))
    }
}

impl Sizes {
    /// Builds a mask of full and partial blocks row by row, as [`build`](Self::build) does.
    pub(super) fn build_blocks(
        &self,
        at_least: usize,
        mut push: impl FnMut(usize, usize, &mut Blocks) -> Result<()>,
    ) -> Result<BlockMask> {
        let (geometry, columns, bits) = (self.geometry, Vec::new(), BitList::default());
        let mut blocks = Blocks { queries: 0, geometry, columns, bits };
        let mask = self.build(at_least, |group, row, columns| {
            blocks.queries = geometry.queries(row).len();
            push(group, row, &mut blocks)?;
            columns.append(&mut blocks.columns);
            Ok(())
        })?;
        blocks.bits.give_to(mask)
    }
}

#[cfg(test)]
#[path = "bits_tests.rs"]
mod tests;
