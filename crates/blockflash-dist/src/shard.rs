use crate::{Error, Result};
use blockflash_ops::attention::MAX_SEQLEN;
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
        Ok(Shard { seqlen, world, rank })
    }

    /// Where the two chunks lie in the sequence.
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

    /// Where a chunk starts.
    fn start(&self, chunk: usize) -> usize {
        (self.seqlen as u128 * chunk as u128 / (2 * self.world) as u128) as usize
    }
}
