use super::tensor::{IndexTensor, check_length, invalid};
use crate::{Result, Stream, Tensor};

/// Words of the bits of 64 × 64 pairs.
pub(super) const TILE_WORDS: usize = 128;

/// Which pairs of partial blocks are visible, beside the lists of a block mask.
///
/// Kernels rely on this: the tiles of every partial block, of a mask with blocks of this many
/// tiles, are within `words`. Nothing writes to the arrays.
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

    /// A copy on the stream's device.
    pub(super) fn copy_to(&self, stream: &Stream) -> Result<Self> {
        Ok(Self {
            block_bits: self.block_bits.copy_to(stream)?,
            words: self.words.copy_to(stream)?,
            block_tiles: self.block_tiles,
        })
    }
}
