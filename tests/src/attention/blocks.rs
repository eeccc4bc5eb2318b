//! Block masks of cases: which blocks they visit, and the same as an operand of the library.

use super::{AttentionCase, Lengths, visible_keys};
use crate::number::rng;
use blockflash_ops::block_sparse::BitTile;
use blockflash_ops::{BlockGeometry, BlockMask, Error, Stream};
use rand::Rng;

/// A block mask, described.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockCase {
    /// Queries of a block.
    pub block_q: usize,
    /// Keys of a block.
    pub block_kv: usize,
    /// Whether each batch entry has a mask of its own, as packed sequences have anyway. Not
    /// together with broadcast keys.
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
    /// Three of four blocks, but none in every third row, others for each head, and none in every
    /// third column.
    EmptyRowsAndColumns,
    /// Every block of which the token mask shows a pair.
    Seen,
    /// Rows in pairs, whose lists share something or nothing.
    Pairs(Pairs),
}

/// What the lists of rows 2 t and 2 t + 1 have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// Everything.
    Equal,
    /// Nothing: columns take turns.
    Interleaved,
    /// Nothing: one visits the first half of the columns, the other one the second half.
    Halves,
    /// One of them visits every column, the other one each (g + 1)-th, with gaps of g = t % 9.
    Gaps,
    /// One of them has an empty list, or both have.
    OneSided,
    /// Half of each list.
    Half,
}

impl Pairs {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Equal, Self::Interleaved, Self::Halves, Self::Gaps, Self::OneSided, Self::Half];

    fn visits(self, row: usize, col: usize, cols: usize) -> bool {
        let (pair, second) = (row / 2, row % 2);
        match self {
            Self::Equal => !(col * (pair + 2) / 3 + pair).is_multiple_of(3),
            Self::Interleaved => col % 2 == second,
            Self::Halves => (col < cols / 2) == (pair + second).is_multiple_of(2),
            Self::Gaps => pair % 2 == second || col.is_multiple_of(pair % 9 + 1),
            Self::OneSided => [[true, false], [false, true], [false, false]][pair % 3][second],
            Self::Half => [[true, false, true, false], [true, true, false, false]][second][col % 4],
        }
    }
}

/// The smallest block that consists of whole tiles of each of these sizes.
pub fn smallest_block(tiles: &[u32]) -> usize {
    let sizes = (BlockGeometry::BLOCK_UNIT..=BlockGeometry::MAX_BLOCK_SIZE)
        .step_by(BlockGeometry::BLOCK_UNIT);
    sizes
        .into_iter()
        .find(|size| tiles.iter().all(|&tile| size.is_multiple_of(tile as usize)))
        .unwrap_or_else(|| panic!("no block consists of tiles of {tiles:?}"))
}

/// Which blocks are visited.
#[derive(Clone, Debug, PartialEq)]
pub struct Blocks {
    case: BlockCase,
    heads: usize,
    /// Query heads that share a head of the mask.
    group: usize,
    /// Of each batch entry, or one for all.
    entries: Vec<EntryBlocks>,
    packed: bool,
    /// Whether two of three blocks are partial.
    partial: bool,
}

/// Which blocks of a batch entry are visited.
#[derive(Clone, Debug, PartialEq)]
struct EntryBlocks {
    seqlen_q: usize,
    seqlen_kv: usize,
    cols: usize,
    /// `[heads, rows, cols]`
    visited: Vec<bool>,
}

impl Blocks {
    /// The blocks of a case that has a block mask.
    pub fn of(case: &AttentionCase) -> Option<Self> {
        let block = case.block_mask?;
        let heads = match block.heads {
            MaskHeads::One => 1,
            MaskHeads::KeyValue => case.heads_kv,
            MaskHeads::Query => case.heads_q,
        };
        let (packed, lengths) = match &case.lengths {
            Lengths::Packed { lengths, .. } => (true, lengths.clone()),
            Lengths::Dense { batch, seqlen_q, seqlen_kv } => (
                false,
                vec![(*seqlen_q, *seqlen_kv); if block.per_entry { (*batch).max(1) } else { 1 }],
            ),
        };
        let mut random = rng(case.seed);
        let mut entries = Vec::new();
        for (entry, (seqlen_q, seqlen_kv)) in lengths.into_iter().enumerate() {
            let (rows, cols) =
                (seqlen_q.div_ceil(block.block_q), seqlen_kv.div_ceil(block.block_kv));
            let mut visited = vec![false; heads * rows * cols];
            match block.pattern {
                BlockPattern::Random(density) => visited.fill_with(|| random.random_bool(density)),
                BlockPattern::EmptyRowsAndColumns => {
                    for (at, visited) in visited.iter_mut().enumerate() {
                        let group = entry * heads + at / (rows * cols);
                        let (row, col) = (at / cols % rows, at % cols);
                        *visited =
                            (row + group) % 3 != 0 && col % 3 != 1 && random.random_bool(0.75);
                    }
                }
                BlockPattern::Pairs(pairs) => {
                    for (at, visited) in visited.iter_mut().enumerate() {
                        *visited = pairs.visits(at / cols % rows, at % cols, cols);
                    }
                }
                BlockPattern::Seen => {
                    let sequences = case.sequences();
                    let sequence = sequences.get(entry);
                    for (sequence, query) in
                        sequence.into_iter().flat_map(|s| (0..s.q_len).map(move |i| (s, i)))
                    {
                        for key in visible_keys(case, sequence, query) {
                            let block = query / block.block_q * cols + key / block.block_kv;
                            (0..heads).for_each(|head| visited[head * rows * cols + block] = true);
                        }
                    }
                }
            }
            entries.push(EntryBlocks { seqlen_q, seqlen_kv, cols, visited });
        }
        let (group, partial) = (case.heads_q / heads, case.terms.partial);
        Some(Self { case: block, heads, group, entries, packed, partial })
    }

    /// Whether the block of a pair is visited, by the definition: batch entry, query head, query,
    /// key.
    pub fn visits(&self, entry: usize, head: usize, query: usize, key: usize) -> bool {
        self.row(entry, head, query)[key / self.case.block_kv]
    }

    /// Whether a pair of a visited block is visible in it.
    fn shows(&self, entry: usize, head: usize, query: usize, key: usize) -> bool {
        let entry = if self.entries.len() == 1 { 0 } else { entry };
        self.shows_in_mask(entry, head / self.group, query, key)
    }

    /// The same of an entry and a head of the mask.
    fn shows_in_mask(&self, entry: usize, head: usize, query: usize, key: usize) -> bool {
        let kind = kind(entry, head, [query / self.case.block_q, key / self.case.block_kv]);
        // Full, or two of five pairs, or all but a few keys.
        !self.partial
            || match kind {
                0 | 3 => true,
                1 | 4 => (query * 31 + key * 17 + query * key + kind) % 5 < 2,
                _ => key % 11 != query % 11,
            }
    }

    /// The tiles of partial blocks of a mask whose first entry is this one.
    fn with_bits(&self, mask: BlockMask, first_entry: usize) -> Result<BlockMask, Error> {
        let (block_q, block_kv) = (self.case.block_q, self.case.block_kv);
        let (mut block_bits, mut words) = (Vec::new(), Vec::<u32>::new());
        for (batch, head) in
            (0..mask.batch()).flat_map(|batch| (0..self.heads).map(move |head| (batch, head)))
        {
            for row in 0..mask.rows() {
                for col in mask.row(batch, head, row)? {
                    let entry = first_entry + batch;
                    if kind(entry, head, [row, col]).is_multiple_of(3) {
                        block_bits.push(-1);
                        continue;
                    }
                    block_bits.push((words.len() / BitTile::WORDS) as i32);
                    for query in (row * block_q..(row + 1) * block_q).step_by(64) {
                        for key in (col * block_kv..(col + 1) * block_kv).step_by(64) {
                            let tile = BitTile::new(|i, j| {
                                self.shows_in_mask(entry, head, query + i, key + j)
                            });
                            words.extend(tile.words());
                        }
                    }
                }
            }
        }
        mask.with_bits(&block_bits, &words)
    }

    /// Which blocks a query visits, in the order of keys.
    fn row(&self, entry: usize, head: usize, query: usize) -> &[bool] {
        let entry = &self.entries[if self.entries.len() == 1 { 0 } else { entry }];
        let rows = entry.seqlen_q.div_ceil(self.case.block_q);
        let row = head / self.group * rows + query / self.case.block_q;
        &entry.visited[row * entry.cols..][..entry.cols]
    }

    /// Visited blocks, and all.
    pub fn count(&self) -> (usize, usize) {
        let blocks = || self.entries.iter().flat_map(|entry| &entry.visited);
        (blocks().filter(|&&visited| visited).count(), blocks().count())
    }

    /// The mask of the library, on the CPU.
    fn mask(&self) -> Result<BlockMask, Error> {
        let of = |at: usize, batch: usize, visited: &[bool]| {
            let entry = &self.entries[at];
            let (block_q, block_kv) = (self.case.block_q, self.case.block_kv);
            let geometry = BlockGeometry::new(entry.seqlen_q, entry.seqlen_kv, block_q, block_kv)?;
            let mask = BlockMask::from_bool(geometry, batch, self.heads, visited)?;
            if self.partial { self.with_bits(mask, at) } else { Ok(mask) }
        };
        if self.packed {
            let masks: Result<Vec<BlockMask>, Error> =
                (0..self.entries.len()).map(|at| of(at, 1, &self.entries[at].visited)).collect();
            return BlockMask::packed(&masks?.iter().collect::<Vec<_>>());
        }
        let visited: Vec<bool> =
            self.entries.iter().flat_map(|entry| &entry.visited).copied().collect();
        of(0, self.entries.len(), &visited)
    }
}

/// Of six kinds of blocks, 0 and 3 are full and the others partial.
fn kind(entry: usize, head: usize, [row, col]: [usize; 2]) -> usize {
    (entry * 5 + head * 3 + row * 7 + col) % 6
}

impl AttentionCase {
    /// The block mask of the library with its transpose, on the stream's device.
    pub fn block_mask(&self, stream: &Stream) -> Result<Option<BlockMask>, String> {
        let mask = Blocks::of(self).map(|blocks| blocks.mask()?.with_transpose()?.to(stream));
        mask.transpose().map_err(|error| error.to_string())
    }

    /// The keys that a query attends: visible under the token mask, and in a visited block, where
    /// its bits show them.
    pub fn attended_keys(
        &self,
        blocks: Option<&Blocks>,
        [entry, query, head]: [usize; 3],
        sequence: &super::Sequence,
    ) -> impl Iterator<Item = usize> {
        let row = blocks.map(|blocks| (blocks.row(entry, head, query), blocks.case.block_kv));
        visible_keys(self, sequence, query)
            .filter(move |&key| row.is_none_or(|(row, block)| row[key / block]))
            .filter(move |&key| blocks.is_none_or(|of| of.shows(entry, head, query, key)))
    }
}
