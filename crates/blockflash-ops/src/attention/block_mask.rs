//! Checks that a block mask fits an attention call.

use crate::{BlockMask, Error, Result};
use blockflash_sys::manifest::AttentionTile;

/// The sizes of a block mask, as selection and planning need them. Its sequence lengths equal the
/// lengths of the problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockMaskSizes {
    /// Queries per block.
    pub block_q: u32,
    /// Keys per block.
    pub block_kv: u32,
    /// 1, or the number of batch entries of the problem.
    pub batch: u32,
    /// 1, or the number of heads of k and v, or of q.
    pub heads: u32,
    /// Block rows of all sequences together, when variable-length.
    pub packed_rows: Option<u32>,
    /// Whether blocks may be partial: the mask has [bits](BlockMask::bits).
    pub bits: bool,
}

impl BlockMaskSizes {
    /// The head of the mask that applies to a head of q.
    pub(crate) fn head(&self, head_q: usize, num_heads_q: usize) -> usize {
        head_q / (num_heads_q / self.heads as usize)
    }

    /// Checks that the mask fits a problem of these sizes. Its fit to each sequence of a packed
    /// batch is unknown here, since the offsets are on the device.
    pub(super) fn of(
        mask: &BlockMask,
        [batch, seqlen_q, seqlen_kv]: [usize; 3],
        [num_heads_q, num_heads_kv]: [usize; 2],
        packed: bool,
    ) -> Result<Self> {
        let found = [mask.batch(), mask.heads(), mask.seqlen_q(), mask.seqlen_kv()];
        let packed_rows = mask.packed_rows();
        let packed = [packed, packed_rows.is_some()];
        let fits = match packed {
            [false, false] => [1, batch].contains(&found[0]) && found[2..] == [seqlen_q, seqlen_kv],
            [true, true] => found[0] == batch && found[2] <= seqlen_q && found[3] <= seqlen_kv,
            _ => false,
        };
        if !(fits && [1, num_heads_kv, num_heads_q].contains(&mask.heads())) {
            let heads = format!("1 or {num_heads_kv} or {num_heads_q}");
            let expected = match packed {
                [false, false] => {
                    format!("[1 or {batch}, {heads}, {seqlen_q}, {seqlen_kv}] in queries and keys")
                }
                [true, true] => {
                    format!(
                        "[{batch}, {heads}, up to {seqlen_q}, up to {seqlen_kv}] in queries and \
                         keys"
                    )
                }
                [true, false] => "a packed mask, as the batch is variable-length".into(),
                [false, true] => {
                    "a mask that is not packed, as the batch is not variable-length".into()
                }
            };
            return Err(Error::Shape { what: "block_mask", expected, found: found.into() });
        }
        Ok(Self {
            block_q: mask.block_q() as u32,
            block_kv: mask.block_kv() as u32,
            batch: mask.batch() as u32,
            heads: mask.heads() as u32,
            packed_rows: packed_rows.map(|rows| rows as u32),
            bits: mask.bits().is_some(),
        })
    }

    /// Whether blocks are not empty and consist of whole tiles.
    pub(super) fn divides_into(&self, tile: &AttentionTile) -> bool {
        let divides = |block: u32, tile: u32| block > 0 && block.is_multiple_of(tile);
        divides(self.block_q, tile.block_q) && divides(self.block_kv, tile.block_kv)
    }

    /// Block rows of a head, of all sequences together when variable-length.
    pub(super) fn rows(&self, seqlen_q: usize) -> usize {
        self.packed_rows.map_or(seqlen_q.div_ceil(self.block_q as usize), |rows| rows as usize)
    }

    /// Number of query tiles of a head as kernels count them: every block row, including the last
    /// one, has equally many. Blocks consist of whole tiles.
    pub(crate) fn tiles_q(&self, seqlen_q: usize, tile_block_q: u32) -> usize {
        seqlen_q.div_ceil(self.block_q as usize) * (self.block_q / tile_block_q) as usize
    }
}

#[cfg(test)]
#[path = "packed_mask_tests.rs"]
mod packed_tests;

#[cfg(test)]
#[path = "block_mask_tests.rs"]
mod tests;
