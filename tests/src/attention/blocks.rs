//! Block masks of cases: which blocks they visit, and the same as an operand of the library.

use super::{AttentionCase, Lengths, visible_keys};
use crate::number::rng;
use blockflash_ops::{BlockGeometry, BlockMask, Stream};
use rand::Rng;

/// A block mask, described. Dense cases only.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockCase {
    /// Queries of a block.
    pub block_q: usize,
    /// Keys of a block.
    pub block_kv: usize,
    /// Whether each batch entry has a mask of its own. Not together with broadcast keys.
    pub per_entry: bool,
    /// Which heads have a mask of their own.
    pub heads: MaskHeads,
    /// Which blocks are visited.
    pub pattern: BlockPattern,
}

/// Which heads have a mask of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskHeads {
    /// None: one mask for all.
    One,
    /// Each head of keys, for the query heads of its group.
    KeyValue,
    /// Each head of queries.
    Query,
}

/// Which blocks a mask visits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BlockPattern {
    /// Each block with this probability.
    Random(f64),
    /// Three of four blocks, but none in every third row, others for each head, and none in every third column.
    EmptyRowsAndColumns,
    /// Every block of which the token mask shows a pair.
    Seen,
}

/// The smallest block that consists of whole tiles of each of these sizes.
pub fn smallest_block(tiles: &[u32]) -> usize {
    let sizes =
        (BlockGeometry::BLOCK_UNIT..=BlockGeometry::MAX_BLOCK_SIZE).step_by(BlockGeometry::BLOCK_UNIT);
    sizes
        .into_iter()
        .find(|size| tiles.iter().all(|&tile| size.is_multiple_of(tile as usize)))
        .unwrap_or_else(|| panic!("no block consists of tiles of {tiles:?}"))
}

/// Which blocks are visited, `[batch, heads, rows, cols]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Blocks {
    case: BlockCase,
    batch: usize,
    heads: usize,
    /// Query heads that share a head of the mask.
    group: usize,
    rows: usize,
    cols: usize,
    visited: Vec<bool>,
}

impl Blocks {
    /// The blocks of a case that has a block mask.
    pub fn of(case: &AttentionCase) -> Option<Self> {
        let block = case.block_mask?;
        let Lengths::Dense { batch, seqlen_q, seqlen_kv } = case.lengths else {
            panic!("packed cases have no block mask: {case:?}")
        };
        let batch = if block.per_entry { batch.max(1) } else { 1 };
        let heads = match block.heads {
            MaskHeads::One => 1,
            MaskHeads::KeyValue => case.heads_kv,
            MaskHeads::Query => case.heads_q,
        };
        let (rows, cols) = (seqlen_q.div_ceil(block.block_q), seqlen_kv.div_ceil(block.block_kv));
        let mut visited = vec![false; batch * heads * rows * cols];
        match block.pattern {
            BlockPattern::Random(density) => {
                let mut random = rng(case.seed);
                visited.fill_with(|| random.random_bool(density));
            }
            BlockPattern::EmptyRowsAndColumns => {
                let mut random = rng(case.seed);
                for (at, visited) in visited.iter_mut().enumerate() {
                    let (group, row, col) = (at / (rows * cols), at / cols % rows, at % cols);
                    *visited = (row + group) % 3 != 0 && col % 3 != 1 && random.random_bool(0.75);
                }
            }
            BlockPattern::Seen => {
                for sequence in case.sequences().iter().take(1) {
                    for query in 0..sequence.q_len {
                        for key in visible_keys(case, sequence, query) {
                            let block = query / block.block_q * cols + key / block.block_kv;
                            (0..batch * heads).for_each(|group| visited[group * rows * cols + block] = true);
                        }
                    }
                }
            }
        }
        Some(Self { case: block, batch, heads, group: case.heads_q / heads, rows, cols, visited })
    }

    /// Whether the block of a pair is visited, by the definition: batch entry, query head, query, key.
    pub fn visits(&self, entry: usize, head: usize, query: usize, key: usize) -> bool {
        let entry = if self.batch == 1 { 0 } else { entry };
        let head = head / self.group;
        let row = (entry * self.heads + head) * self.rows + query / self.case.block_q;
        self.visited[row * self.cols + key / self.case.block_kv]
    }

    /// Visited blocks, and all.
    pub fn count(&self) -> (usize, usize) {
        (self.visited.iter().filter(|&&visited| visited).count(), self.visited.len())
    }
}

impl AttentionCase {
    /// The block mask of the library, on the stream's device.
    pub fn block_mask(&self, stream: &Stream) -> Result<Option<BlockMask>, String> {
        let (Some(blocks), Lengths::Dense { seqlen_q, seqlen_kv, .. }) = (Blocks::of(self), &self.lengths)
        else {
            return Ok(None);
        };
        BlockGeometry::new(*seqlen_q, *seqlen_kv, blocks.case.block_q, blocks.case.block_kv)
            .and_then(|geometry| BlockMask::from_bool(geometry, blocks.batch, blocks.heads, &blocks.visited))
            .and_then(|mask| mask.to(stream))
            .map(Some)
            .map_err(|error| error.to_string())
    }

    /// The keys that a query attends: visible under the token mask, and in a visited block.
    pub fn attended_keys(
        &self,
        blocks: Option<&Blocks>,
        [entry, query, head]: [usize; 3],
        sequence: &super::Sequence,
    ) -> impl Iterator<Item = usize> {
        visible_keys(self, sequence, query)
            .filter(move |&key| blocks.is_none_or(|blocks| blocks.visits(entry, head, query, key)))
    }
}
