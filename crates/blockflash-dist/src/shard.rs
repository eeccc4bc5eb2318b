use crate::{Error, Result};
use blockflash_ops::attention::MAX_SEQLEN;
use blockflash_ops::{BlockGeometry, BlockMask};
use std::ops::Range;

/// The rows of a sequence that one rank holds.
///
/// A sequence is cut into `2 · world` chunks, which differ by one row at most. Rank `i` holds chunk
/// `i` and chunk `2 · world - 1 - i`, one after the other: under a causal mask every rank has the
/// same work then.
///
/// ```
/// # use blockflash_dist::Shard;
/// let shard = Shard::new(80, 4, 1)?;
/// assert_eq!(shard.ranges(), [10..20, 60..70]);
/// assert_eq!(shard.rows(), 20);
/// # Ok::<(), blockflash_dist::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    seqlen: usize,
    world: usize,
    rank: usize,
    block: usize,
}

/// Rows that follow each other in the sequence.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Span {
    /// Where they are in the sequence.
    pub(crate) positions: Range<usize>,
    /// The first one in the tensors of the rank.
    pub(crate) row: usize,
}

impl Shard {
    /// The rows of `rank` of `world` in a sequence of `seqlen` rows, which may be fewer than ranks.
    ///
    /// # Errors
    /// [`Error::Size`].
    pub fn new(seqlen: usize, world: usize, rank: usize) -> Result<Shard> {
        let error = |what, value, expected: String| Err(Error::Size { what, value, expected });
        if seqlen > MAX_SEQLEN {
            return error("seqlen", seqlen, format!("at most {MAX_SEQLEN}"));
        }
        if world == 0 || world > i32::MAX as usize {
            return error("the number of ranks", world, format!("1 to {}", i32::MAX));
        }
        if rank >= world {
            return error("rank", rank, format!("less than {world}"));
        }
        Ok(Shard { seqlen, world, rank, block: 1 })
    }

    /// The same rank, where the sequence is cut between blocks of a block mask only: chunks differ
    /// by one block at most, which is the common multiple of both sizes. All layers of a model
    /// have the same rows if some of them have block masks.
    ///
    /// ```
    /// # use blockflash_dist::Shard;
    /// let shard = Shard::new(1000, 2, 0)?.in_blocks(128, 64)?;
    /// assert_eq!(shard.ranges(), [0..256, 768..1000]);
    /// # Ok::<(), blockflash_dist::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`BlockGeometry::new`] for sizes that a block mask cannot have.
    pub fn in_blocks(self, block_q: usize, block_kv: usize) -> Result<Shard> {
        BlockGeometry::new(self.seqlen, self.seqlen, block_q, block_kv)?;
        let multiples = (1..block_kv).map(|n| n * block_q);
        let common = multiples.into_iter().find(|block| block.is_multiple_of(block_kv));
        Ok(Shard { block: common.unwrap_or(block_q * block_kv), ..self })
    }

    /// The same rank, where the sequence is cut at multiples of this many rows only, at least 1.
    ///
    /// # Errors
    /// [`Error::Size`].
    pub fn cut_at(self, block: usize) -> Result<Shard> {
        if block == 0 || block > MAX_SEQLEN {
            let expected = format!("1 to {MAX_SEQLEN}");
            return Err(Error::Size { what: "the rows of a block", value: block, expected });
        }
        Ok(Shard { block, ..self })
    }

    /// The lists of the queries of this rank, from a mask of the whole sequence on the CPU.
    ///
    /// # Errors
    /// [`Error::BlockMask`] if the mask is of another length, if blocks are on several ranks, or if
    /// some are partial; a mask that is not on the CPU.
    pub fn block_mask(&self, whole: &BlockMask) -> Result<BlockMask> {
        let (block_q, block_kv) = (whole.block_q(), whole.block_kv());
        let found = [whole.seqlen_q(), whole.seqlen_kv()];
        let error =
            |what, found: String, expected: String| Err(Error::BlockMask { what, found, expected });
        if found != [self.seqlen(); 2] {
            let expected = format!("{:?}", [self.seqlen(); 2]);
            return error("queries and keys", format!("{found:?}"), expected);
        }
        if !self.block().is_multiple_of(block_q) {
            let expected = format!("a divisor of the {} rows of a block of rows", self.block());
            return error("block_q", block_q.to_string(), expected);
        }
        if whole.bits().is_some() {
            return error("bits", "partial blocks".into(), "full blocks".into());
        }
        let geometry = BlockGeometry::new(self.rows(), self.seqlen(), block_q, block_kv)?;
        let (mut row_ptr, mut col_idx) = (Vec::new(), Vec::new());
        for (batch, head) in
            (0..whole.batch()).flat_map(|b| (0..whole.heads()).map(move |h| (b, h)))
        {
            row_ptr.push(col_idx.len() as i32);
            for row in 0..geometry.rows() {
                let row = self.position(row * block_q) / block_q;
                col_idx.extend(whole.row(batch, head, row)?.map(|col| col as i32));
                row_ptr.push(col_idx.len() as i32);
            }
        }
        Ok(BlockMask::from_parts(geometry, whole.batch(), whole.heads(), &row_ptr, &col_idx)?)
    }

    /// Rows of the whole sequence.
    pub fn seqlen(&self) -> usize {
        self.seqlen
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Which of them has these rows.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The sequence is cut at multiples of this.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Where the two chunks are in the sequence.
    pub fn ranges(&self) -> [Range<usize>; 2] {
        [self.rank, 2 * self.world - 1 - self.rank]
            .map(|chunk| self.start(chunk)..self.start(chunk + 1))
    }

    /// Rows of the first chunk, which come first in the tensors of this rank.
    pub fn first(&self) -> usize {
        self.ranges()[0].len()
    }

    /// Rows of both chunks.
    pub fn rows(&self) -> usize {
        self.ranges().map(|range| range.len()).iter().sum()
    }

    /// The rows of another one of this many ranks, in the same sequence.
    pub(crate) fn of(&self, world: usize, rank: usize) -> Shard {
        Shard { world, rank, ..*self }
    }

    /// The rows of this rank that are in a range of the sequence. They follow each other, as the
    /// rows of a rank have the order of the sequence.
    pub(crate) fn rows_in(&self, positions: &Range<usize>) -> Range<usize> {
        let before = |position: usize| {
            let of_chunk =
                |range: Range<usize>| position.clamp(range.start, range.end) - range.start;
            self.ranges().map(of_chunk).iter().sum()
        };
        before(positions.start)..before(positions.end)
    }

    /// The spans of the rows that are in a range of the sequence.
    pub(crate) fn spans_in(&self, positions: &Range<usize>) -> Vec<Span> {
        let cut = |Span { positions: all, row }: Span| {
            let start = all.start.max(positions.start);
            let end = all.end.min(positions.end);
            (start < end).then(|| Span { positions: start..end, row: row + start - all.start })
        };
        self.spans().into_iter().filter_map(cut).collect()
    }

    /// The chunks, or one span if they are neighbours; none without rows.
    pub(crate) fn spans(&self) -> Vec<Span> {
        let [first, second] = self.ranges();
        let row = first.len();
        let spans = match first.end == second.start {
            true => vec![Span { positions: first.start..second.end, row: 0 }],
            false => {
                vec![Span { positions: first, row: 0 }, Span { positions: second, row }]
            }
        };
        spans.into_iter().filter(|span| !span.positions.is_empty()).collect()
    }

    /// Where a row of the tensors of this rank is in the sequence.
    pub(crate) fn position(&self, row: usize) -> usize {
        let [first, second] = self.ranges();
        if row < first.len() { first.start + row } else { second.start + row - first.len() }
    }

    /// Where a chunk starts.
    fn start(&self, chunk: usize) -> usize {
        let blocks = self.seqlen.div_ceil(self.block);
        // Less than 2^62, as sequences and ranks are limited.
        let block = blocks as u64 * chunk as u64 / (2 * self.world as u64);
        (block as usize * self.block).min(self.seqlen)
    }
}
