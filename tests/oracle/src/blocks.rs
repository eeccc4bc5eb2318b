//! Lists of blocks, as a check reads them, and the sequences that they belong to.

use crate::comparison::{Mismatch, ensure};
use std::ops::Range;

/// One sequence of all heads. Rows count from the start of a tensor: a row of q, k, v or o holds
/// all heads.
pub(crate) struct Sequence {
    /// Its place in the batch.
    pub(crate) entry: usize,
    /// First row of q and o.
    pub(crate) q: usize,
    pub(crate) seqlen_q: usize,
    /// First row of k and v.
    pub(crate) kv: usize,
    pub(crate) seqlen_kv: usize,
    /// Element of lse of the first query of head 0.
    pub(crate) lse: usize,
    /// Elements of lse between heads.
    pub(crate) lse_head: usize,
    /// First row of its lists of blocks, if there are any.
    pub(crate) lists: usize,
}

/// The blocks of keys that each block of queries attends to. There is a row for each block of
/// queries of each head of each sequence, in this order of counting; or the rows of one sequence
/// stand for all, which are then equally long.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    /// Queries of a block.
    pub block_q: usize,
    /// Keys of a block.
    pub block_kv: usize,
    /// Heads that have lists; neighbouring query heads share one.
    pub heads: usize,
    /// Where the list of each row begins in `col_idx`, and where the last one ends.
    pub row_ptr: &'a [i32],
    /// Blocks of keys.
    pub col_idx: &'a [i32],
    /// Which pairs of partial blocks are visible; `None` if all blocks are full.
    pub bits: Option<Bits<'a>>,
}

/// Which pairs of partial blocks are visible. A block consists of tiles of 64 × 64, row by row of
/// tiles, each of 128 words: the bit of row i and column j is bit
/// `16 · (i % 16 / 8) + 2 · (j / 8) + j % 2` of word `32 · (i / 16) + 4 · (i % 8) + j % 8 / 2`.
#[derive(Clone, Copy, Debug)]
pub struct Bits<'a> {
    /// The first tile of each block of `col_idx`; negative if it is full.
    pub block_bits: &'a [i32],
    /// The tiles.
    pub words: &'a [u32],
}

impl Bits<'_> {
    /// Whether a pair of a block is visible.
    fn show(&self, block: usize, [row, col]: [usize; 2], block_kv: usize) -> bool {
        let Ok(first) = usize::try_from(self.block_bits[block]) else { return true };
        let tile = first + row / 64 * (block_kv / 64) + col / 64;
        let (i, j) = (row % 64, col % 64);
        let word = 128 * tile + 32 * (i / 16) + 4 * (i % 8) + j % 8 / 2;
        let bit = 16 * (i % 16 / 8) + 2 * (j / 8) + j % 2;
        self.words.get(word).is_some_and(|word| word >> bit & 1 == 1)
    }
}

impl Blocks<'_> {
    /// Keys that a query may see, on average.
    pub(crate) fn mean_keys(&self) -> usize {
        (self.col_idx.len() * self.block_kv).div_ceil(self.row_ptr.len().max(2) - 1)
    }

    /// Checks the lists, and notes in each sequence where its own begin.
    pub(crate) fn place(&self, sequences: &mut [Sequence], heads_q: usize) -> Result<(), Mismatch> {
        let Self { block_q, block_kv, heads, row_ptr, col_idx, bits } = *self;
        ensure(block_q > 0 && block_kv > 0, || "a block has a size of 0".to_owned())?;
        ensure(heads > 0 && heads_q.is_multiple_of(heads), || {
            format!("{heads} heads have lists of blocks, and q has {heads_q}")
        })?;
        let of_one = |sequence: &Sequence| heads * sequence.seqlen_q.div_ceil(block_q);
        let lists = row_ptr.len().saturating_sub(1);
        let equal = sequences.windows(2).all(|pair| of_one(&pair[0]) == of_one(&pair[1]));
        let shared = equal && sequences.first().is_none_or(|first| of_one(first) == lists);
        let mut rows = 0;
        for sequence in sequences.iter_mut().filter(|_| !shared) {
            sequence.lists = rows;
            rows += of_one(sequence);
        }
        ensure(shared || rows == lists, || {
            format!("row_ptr has {} entries for {rows} rows", row_ptr.len())
        })?;
        let ascends =
            row_ptr.first() == Some(&0) && row_ptr.windows(2).all(|pair| pair[0] <= pair[1]);
        let ends = row_ptr.last().and_then(|&end| usize::try_from(end).ok()) == Some(col_idx.len());
        ensure(ascends && ends, || {
            format!("row_ptr does not lead through {} blocks", col_idx.len())
        })?;
        let with_bits = bits.map_or(col_idx.len(), |bits| bits.block_bits.len());
        ensure(with_bits == col_idx.len(), || {
            format!("there are bits of {with_bits} blocks, not of {}", col_idx.len())
        })?;
        ensure(col_idx.iter().all(|&column| column >= 0), || {
            "a block has a negative index".to_owned()
        })
    }

    /// The keys of a range that a query of a head sees. The lists are checked.
    pub(crate) fn seen(
        &self,
        query: usize,
        head: [usize; 2],
        sequence: &Sequence,
        range: Range<usize>,
    ) -> Vec<usize> {
        let [head, heads_q] = head;
        let rows = sequence.seqlen_q.div_ceil(self.block_q);
        let row = sequence.lists + head / (heads_q / self.heads) * rows + query / self.block_q;
        let mut keys = Vec::new();
        for block in self.row_ptr[row] as usize..self.row_ptr[row + 1] as usize {
            let start = self.col_idx[block] as usize * self.block_kv;
            let of_block = start.max(range.start)..(start + self.block_kv).min(range.end);
            let shown = |&key: &usize| {
                let pair = [query % self.block_q, key - start];
                self.bits.is_none_or(|bits| bits.show(block, pair, self.block_kv))
            };
            keys.extend(of_block.filter(shown));
        }
        keys
    }
}
