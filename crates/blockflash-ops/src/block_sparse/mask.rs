use super::bits::BlockBits;
use super::validate::exists;
use super::{BitTile, BlockGeometry};
use crate::check::filled;
use crate::{Mask, Result};
use blockflash_safe::{BlockLists, Device, Stream, Tensor};
use std::ops::Range;

/// Which blocks of queries × keys attention visits, per batch entry and head, on the CPU or a GPU.
///
/// The format is BSR: [`row_ptr`](Self::row_ptr) and [`col_idx`](Self::col_idx) list the block
/// columns of each block row, ascending. `batch` and `heads` are each either 1, which stands for
/// all, or the actual number. The caller decides whether heads are query heads or key heads.
///
/// The mask of a packed (variable-length) batch is made from the masks of its sequences, see
/// [`packed`](Self::packed). Its batch entries are the sequences, and its lengths,
/// [`rows`](Self::rows) and [`cols`](Self::cols) are the maxima over the sequences.
///
/// A visited block is full, or partial: then it has [bits](Self::with_bits) that say which of its
/// pairs are visible.
///
/// Every constructor validates the index arrays and copies them. Only the
/// [`BlockMaskBuffer`](super::BlockMaskBuffer) that owns a mask can change them later. Combining
/// and counting read the arrays on the CPU.
#[derive(Debug)]
pub struct BlockMask {
    pub(super) geometry: BlockGeometry,
    pub(super) batch: usize,
    pub(super) heads: usize,
    pub(super) lists: BlockLists,
    pub(super) packed: Option<Packed>,
    /// See [`BlockMask::with_transpose`].
    pub(super) transpose: Option<BlockLists>,
}

/// The sequences of a packed mask.
#[derive(Clone, Debug)]
pub(super) struct Packed {
    pub(super) geometries: Vec<BlockGeometry>,
    /// Block rows of all sequences together.
    pub(super) rows: usize,
}

/// The index arrays on the CPU.
#[derive(Clone, Copy)]
pub(super) struct Lists<'a> {
    row_ptr: &'a [i32],
    col_idx: &'a [i32],
    /// First row of each sequence.
    cu_rows: Option<&'a [i32]>,
    /// Rows of a group.
    rows: usize,
    heads: usize,
    /// The first tile of each block, and the words of the tiles.
    bits: Option<[&'a [i32]; 2]>,
    /// Tiles of a block, along queries and along keys.
    block_tiles: [usize; 2],
}

impl<'a> Lists<'a> {
    /// Where an existing row is in the columns. The group is `batch * heads + head`, or `head` when
    /// packed.
    pub(super) fn span(&self, group: usize, row: usize) -> Range<usize> {
        let at = group * (self.rows + 1) + row;
        self.row_ptr[at] as usize..self.row_ptr[at + 1] as usize
    }

    /// The same.
    pub(super) fn span_at(&self, [batch, head, row]: [usize; 3]) -> Range<usize> {
        match self.cu_rows {
            Some(cu_rows) => self.span(head, cu_rows[batch] as usize + row),
            None => self.span(batch * self.heads + head, row),
        }
    }

    /// The columns of a span.
    pub(super) fn columns(&self, span: Range<usize>) -> &'a [i32] {
        &self.col_idx[span]
    }

    /// The columns of an existing row.
    pub(super) fn row(&self, group: usize, row: usize) -> &'a [i32] {
        self.columns(self.span(group, row))
    }

    /// The columns of an existing row.
    pub(super) fn at(&self, place: [usize; 3]) -> &'a [i32] {
        self.columns(self.span_at(place))
    }

    /// The first tile of each block, if some blocks may be partial.
    pub(super) fn block_bits(&self) -> Option<&'a [i32]> {
        self.bits.map(|[block_bits, _]| block_bits)
    }

    /// The words of all blocks, whose tiles and bits are transposed.
    pub(super) fn transposed_words(&self) -> Option<Vec<u32>> {
        let [_, words] = self.bits?;
        let ([down, across], tiles) = (self.block_tiles, words.len() / BitTile::WORDS);
        let blocks = (0..tiles).step_by(down * across).map(|first| self.block(words, first));
        Some(blocks.flat_map(|block| block.transposed().tiles).flat_map(|t| t.words()).collect())
    }

    /// The bits of the block at this place of the columns; `None` if it is full.
    pub(super) fn bits_of(&self, at: usize) -> Option<BlockBits> {
        let [block_bits, words] = self.bits?;
        usize::try_from(block_bits[at]).ok().map(|first| self.block(words, first))
    }

    /// The bits of the block that begins with this tile.
    fn block(&self, words: &[i32], first: usize) -> BlockBits {
        let [down, across] = self.block_tiles;
        let tile = |at: usize| {
            let words = &words[(first + at) * BitTile::WORDS..][..BitTile::WORDS];
            BitTile::from_words(&std::array::from_fn(|word| words[word] as u32))
        };
        BlockBits { tiles: (0..down * across).map(tile).collect(), across }
    }
}

impl BlockMask {
    /// How queries and keys are divided into blocks; for a packed mask, at the longest lengths.
    pub fn geometry(&self) -> BlockGeometry {
        self.geometry
    }

    /// Number of queries.
    pub fn seqlen_q(&self) -> usize {
        self.geometry.seqlen_q()
    }

    /// Number of keys.
    pub fn seqlen_kv(&self) -> usize {
        self.geometry.seqlen_kv()
    }

    /// Queries of a block.
    pub fn block_q(&self) -> usize {
        self.geometry.block_q()
    }

    /// Keys of a block.
    pub fn block_kv(&self) -> usize {
        self.geometry.block_kv()
    }

    /// Batch entries; 1 is the same mask for all.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Heads; 1 is the same mask for all.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Number of block rows, `ceil(seqlen_q / block_q)`.
    pub fn rows(&self) -> usize {
        self.geometry.rows()
    }

    /// Number of block columns, `ceil(seqlen_kv / block_kv)`.
    pub fn cols(&self) -> usize {
        self.geometry.cols()
    }

    /// i32 `[batch, heads, rows + 1]`: the columns of row `r` of head `h` of batch entry `b` are
    /// `col_idx[row_ptr[b, h, r]..row_ptr[b, h, r + 1]]`. A head starts where the previous one
    /// ends.
    ///
    /// Packed: `[heads, total rows + 1]`, where row `r` of sequence `b` is `cu_rows[b] + r`, see
    /// [`cu_rows`](Self::cu_rows).
    pub fn row_ptr(&self) -> &Tensor {
        self.lists.row_ptr()
    }

    /// i32 `[nnz]`: the block columns, ascending and unique within a row.
    pub fn col_idx(&self) -> &Tensor {
        self.lists.col_idx()
    }

    /// i32 `[batch, heads, rows]`: the order in which a GPU takes the rows of each head, the
    /// longest first. Among rows with equally many columns the last comes first, because a causal
    /// token mask leaves it the most keys. Packed: `[heads, total rows]`, where this holds within
    /// each sequence, whose rows are counted from its first one.
    pub fn row_order(&self) -> &Tensor {
        self.lists.row_order()
    }

    /// Where the mask is.
    pub fn device(&self) -> Device {
        self.lists.device()
    }

    /// A copy on the stream's device.
    ///
    /// # Errors
    /// Out of memory, or a failing device.
    /// [`Error::InvalidBlockMask`](crate::Error::InvalidBlockMask) for the mask of a
    /// [`BlockMaskBuffer`](super::BlockMaskBuffer) that is copied to the CPU in the middle of a
    /// build on another stream.
    pub fn to(&self, stream: &Stream) -> Result<Self> {
        let lists = self.lists.copy_to(stream)?;
        // A kernel guarantees only index ranges, but the CPU backend relies on well-formed lists.
        if stream.device().is_cpu() && !self.device().is_cpu() && self.packed.is_none() {
            let (row_ptr, col_idx) = (lists.row_ptr().view(), lists.col_idx().view());
            let row_ptr = row_ptr.as_slice::<i32>()?;
            let end = row_ptr.last().map_or(0, |&end| end as usize);
            let col_idx = &col_idx.as_slice::<i32>()?[..end];
            let mask = Self::from_parts(self.geometry, self.batch, self.heads, row_ptr, col_idx)?;
            return mask.bits_like(&lists)?.transposed_like(self);
        }
        let transpose = self.transpose.as_ref().map(|lists| lists.copy_to(stream)).transpose()?;
        Ok(Self { lists, packed: self.packed.clone(), transpose, ..*self })
    }

    /// The columns of one row, ascending. The indices address the mask itself, so they are 0 where
    /// it has one batch entry or head for all.
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`](crate::Error::InvalidBlockMask) for a row that does not exist; a
    /// mask that is not on the CPU.
    pub fn row(
        &self,
        batch: usize,
        head: usize,
        row: usize,
    ) -> Result<impl ExactSizeIterator<Item = usize> + '_> {
        exists("batch", batch, self.batch)?;
        exists("head", head, self.heads)?;
        exists("row", row, self.geometry_of(batch).rows())?;
        Ok(self.lists()?.at([batch, head, row]).iter().map(|&col| col as usize))
    }

    /// Which blocks are visited, `[batch, heads, rows, cols]`. Blocks beyond the end of a shorter
    /// sequence are false.
    ///
    /// # Errors
    /// Out of memory; a mask that is not on the CPU.
    pub fn to_bool(&self) -> Result<Vec<bool>> {
        let (rows, cols) = (self.rows(), self.cols());
        let mut visited = filled(false, &[self.batch, self.heads, rows, cols])?;
        for ([batch, head, row], columns) in self.all()? {
            let at = (batch * self.heads + head) * rows + row;
            columns.iter().for_each(|&col| visited[at * cols + col as usize] = true);
        }
        Ok(visited)
    }

    /// Number of visited blocks, over all batch entries and heads of the mask. For a mask that is
    /// built on a GPU this is the capacity of its [`BlockMaskBuffer`](super::BlockMaskBuffer).
    pub fn nnz(&self) -> usize {
        self.col_idx().shape().first().copied().unwrap_or(0)
    }

    /// Visited blocks ([`nnz`](Self::nnz)) per block, 0 to 1; 0 for a mask without any blocks.
    pub fn density(&self) -> f64 {
        let blocks_of = |batch| {
            let geometry = self.geometry_of(batch);
            geometry.rows() as f64 * geometry.cols() as f64
        };
        let blocks = self.heads as f64 * (0..self.batch).map(blocks_of).sum::<f64>();
        if blocks == 0.0 { 0.0 } else { self.nnz() as f64 / blocks }
    }

    /// Number of columns of the longest row relative to the mean row, at least 1. It measures load
    /// imbalance: how much longer the longest task takes than the mean one. 1 when no block is
    /// visited.
    ///
    /// # Errors
    /// A mask that is not on the CPU.
    pub fn imbalance(&self) -> Result<f64> {
        let longest = self.all()?.map(|(_, columns)| columns.len()).max().unwrap_or(0);
        let rows = self.heads * self.packed_rows().unwrap_or(self.batch * self.rows());
        Ok(if longest == 0 { 1.0 } else { longest as f64 * rows as f64 / self.nnz() as f64 })
    }

    /// Number of (query, key) pairs that are in a visited block, have their bit set if the block is
    /// partial, and are visible under the token mask, over all batch entries and heads of the mask;
    /// FLOPs are counted from it. One batch entry or head that stands for several counts once.
    ///
    /// # Errors
    /// A mask that is not on the CPU.
    pub fn visited_pairs(&self, mask: Mask) -> Result<u64> {
        let lists = self.lists()?;
        let pairs = |(place, span): ([usize; 3], Range<usize>)| -> u64 {
            span.map(|at| self.pairs_of(&lists, place, at, mask)).sum()
        };
        Ok(self.spans()?.map(pairs).sum())
    }

    /// The index arrays as kernel operands.
    pub(crate) fn for_kernels(&self) -> &BlockLists {
        &self.lists
    }

    /// The index arrays, if they are on the CPU.
    pub(super) fn lists(&self) -> Result<Lists<'_>> {
        let (row_ptr, col_idx) =
            (self.row_ptr().view().as_slice()?, self.col_idx().view().as_slice()?);
        let cu_rows = self.cu_rows().map(|cu_rows| cu_rows.view().as_slice()).transpose()?;
        Ok(Lists {
            row_ptr,
            col_idx,
            cu_rows,
            rows: self.packed_rows().unwrap_or(self.rows()),
            heads: self.heads,
            bits: match self.bits() {
                Some(bits) => {
                    let [first, words] = bits.map(|array| array.view().as_slice());
                    Some([first?, words?])
                }
                None => None,
            },
            block_tiles: self.block_tiles(),
        })
    }

    /// The columns of all rows, in the order `[batch, heads, rows]`.
    fn all(&self) -> Result<impl Iterator<Item = ([usize; 3], &[i32])>> {
        let lists = self.lists()?;
        Ok(self.spans()?.map(move |(at, span)| (at, lists.columns(span))))
    }

    /// Where all rows are in the columns, in the order `[batch, heads, rows]`.
    pub(super) fn spans(&self) -> Result<impl Iterator<Item = ([usize; 3], Range<usize>)> + '_> {
        let lists = self.lists()?;
        let rows =
            |batch, head| (0..self.geometry_of(batch).rows()).map(move |row| [batch, head, row]);
        let heads = move |batch| (0..self.heads).flat_map(move |head| rows(batch, head));
        Ok((0..self.batch).flat_map(heads).map(move |at| (at, lists.span_at(at))))
    }
}

#[cfg(test)]
#[path = "mask_tests.rs"]
mod tests;
