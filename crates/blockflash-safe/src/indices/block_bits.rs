use super::tensor::{IndexTensor, check_length, invalid};
use crate::{DType, Result, Stream, Tensor, View, ViewMut};

/// Words of the bits of 64 × 64 pairs.
pub(super) const TILE_WORDS: usize = 128;

/// Which pairs of partial blocks are visible, beside the lists of a block mask.
///
/// Kernels rely on this: the tiles of every partial block, of a mask with blocks of this many
/// tiles, are within `words`. Only launches of `BlockBitsBuild` write to the arrays of lists that
/// kernels fill; nothing writes to others.
#[derive(Debug)]
pub(super) struct BlockBits {
    /// i32 `[columns]`: of each listed block its first tile, or −1 where all pairs are visible.
    pub(super) block_bits: IndexTensor,
    /// i32 `[tiles, 128]`.
    pub(super) words: Tensor,
    /// Tiles of a block.
    pub(super) block_tiles: usize,
}

impl BlockBits {
    /// Checks the arrays and uploads them, for lists of `columns` blocks of `block_tiles` tiles.
    pub(super) fn new(
        columns: usize,
        block_tiles: usize,
        block_bits: &[i32],
        words: &[u32],
        stream: &Stream,
    ) -> Result<Self> {
        check_length("block_bits", block_bits, columns)?;
        let tiles = words.len() / TILE_WORDS;
        let words_of_block = TILE_WORDS.saturating_mul(block_tiles);
        if block_tiles == 0 || !words.len().is_multiple_of(words_of_block) {
            return invalid(format!(
                "there are {} words of bits, expected a multiple of {TILE_WORDS} for each of the \
                 {block_tiles} tiles of 64 × 64 of a block",
                words.len()
            ));
        }
        let is_first = |&first: &i32| first == -1 || (first as usize).is_multiple_of(block_tiles);
        if let Some(at) = block_bits.iter().position(|first| !is_first(first)) {
            return invalid(format!(
                "block_bits[{at}] is {}, neither -1 nor a multiple of the {block_tiles} tiles of \
                 a block",
                block_bits[at]
            ));
        }
        Ok(Self {
            block_bits: IndexTensor::or_none("block_bits", block_bits, &[columns], tiles, stream)?,
            words: Tensor::from_slice::<i32>(
                stream,
                bytemuck::cast_slice(words),
                &[tiles, TILE_WORDS],
            )?,
            block_tiles,
        })
    }

    /// Room for kernels to fill: `tiles` of bits, a positive multiple of those of a block.
    pub(super) fn with_capacity(
        columns: usize,
        block_tiles: usize,
        tiles: usize,
        stream: &Stream,
    ) -> Result<Self> {
        check_room(block_tiles, tiles)?;
        Ok(Self {
            block_bits: IndexTensor::zeros(&[columns], tiles, stream)?,
            words: Tensor::zeros(stream, DType::I32, &[tiles, TILE_WORDS])?,
            block_tiles,
        })
    }

    /// Tiles of bits, and tiles of a block.
    pub(super) fn room(&self) -> [i64; 2] {
        [self.words.shape()[0], self.block_tiles].map(|tiles| tiles as i64)
    }

    /// A copy on the stream's device.
    pub(super) fn copy_to(&self, stream: &Stream) -> Result<Self> {
        Ok(Self {
            block_bits: self.block_bits.copy_to(stream)?,
            words: self.words.copy_to(stream)?,
            block_tiles: self.block_tiles,
        })
    }
}

/// What the first step of making bits leaves for the other ones. Nothing else can write this memory
/// but the counter, and it begins as zeros, so the other steps find tiles that exist, whatever ran
/// before.
#[derive(Debug)]
pub struct BlockBitsScratch {
    /// u8 `[batch, heads, rows, cols]`.
    visited: Tensor,
    /// i32 of the same shape.
    first: Tensor,
    /// i32 `[2]`.
    counter: Tensor,
    /// i32 `[batch, queries, 4]`: how nodes of trees are linked.
    jumps: Tensor,
    /// Tiles of bits, and tiles of a block.
    room: [i64; 2],
}

impl BlockBitsScratch {
    /// Allocates for lists of this size over this many queries with room for `tiles` of bits, a
    /// positive multiple of the `block_tiles` of a block.
    ///
    /// # Errors
    /// [`Error::Indices`](crate::Error::Indices) for another number of tiles; the errors of
    /// [`Tensor::zeros`].
    pub fn new(
        [batch, heads]: [usize; 2],
        [rows, cols]: [usize; 2],
        queries: usize,
        [tiles, block_tiles]: [usize; 2],
        stream: &Stream,
    ) -> Result<Self> {
        check_room(block_tiles, tiles)?;
        let shape = [batch, heads, rows, cols];
        Ok(Self {
            visited: Tensor::zeros(stream, DType::U8, &shape)?,
            first: Tensor::zeros(stream, DType::I32, &shape)?,
            counter: Tensor::zeros(stream, DType::I32, &[2])?,
            jumps: Tensor::zeros(stream, DType::I32, &[batch, queries, 4])?,
            room: [tiles, block_tiles].map(|tiles| tiles as i64),
        })
    }

    /// The visited blocks, u8 `[batch, heads, rows, cols]`: the source of the lists.
    pub fn visited(&self) -> &Tensor {
        &self.visited
    }

    /// i32 `[2]`: how many tiles the last build asked for, and the most that any one did.
    pub fn counter(&self) -> &Tensor {
        &self.counter
    }

    /// The first number of the counter, which is 0 before a build, or both.
    pub fn counter_mut(&mut self) -> ViewMut<'_> {
        self.counter.view_mut()
    }

    /// `visited`, `first`, `counter` and `jumps`.
    pub(crate) fn views(&self) -> [View<'_>; 4] {
        [&self.visited, &self.first, &self.counter, &self.jumps].map(Tensor::view)
    }

    pub(crate) fn room(&self) -> [i64; 2] {
        self.room
    }
}

fn check_room(block_tiles: usize, tiles: usize) -> Result<()> {
    if block_tiles == 0 || tiles == 0 || !tiles.is_multiple_of(block_tiles) {
        return invalid(format!(
            "room for {tiles} tiles of bits, expected a positive multiple of the {block_tiles} of \
             a block"
        ));
    }
    Ok(())
}
