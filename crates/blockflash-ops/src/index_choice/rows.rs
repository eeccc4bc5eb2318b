//! The queries of a batch, and the keys that each of them sees.

use crate::attention::Mask;
use crate::check::to_i32;
use crate::{Error, Result};
use std::ops::Range;

/// The queries of a batch, and which keys of its sequence each of them sees, as plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexRows {
    /// Sequences.
    pub batch: usize,
    /// Queries of each sequence; at most this many when packed.
    pub seqlen_q: usize,
    /// Rows of packed queries.
    pub total_q: Option<usize>,
    /// Most keys of a sequence.
    pub capacity: usize,
    /// Whether keys are packed, so that offsets on the device tell the lengths.
    pub packed_kv: bool,
    /// Whether the device knows how many keys each sequence has otherwise.
    pub seqused_kv: bool,
    /// Which keys of its sequence a query sees.
    pub mask: Mask,
    /// Tokens of a block.
    pub granularity: usize,
}

/// What a row of the results is about.
#[derive(Clone, Debug, Default)]
pub(super) struct Row {
    /// The sequence, and the query among the rows of a packed tensor, or among its own.
    pub(super) query: [usize; 2],
    /// The keys that it sees.
    pub(super) keys: Range<usize>,
}

impl IndexRows {
    /// Queries of all sequences, as results count them.
    pub fn rows(&self) -> usize {
        self.total_q.unwrap_or(self.batch.saturating_mul(self.seqlen_q))
    }

    /// Blocks of the longest sequence.
    pub fn blocks(&self) -> usize {
        self.capacity.div_ceil(self.granularity.max(1))
    }

    /// Checks what kernels count in 32 bits.
    pub(super) fn checked(self) -> Result<Self> {
        if self.granularity == 0 {
            let (what, expected) = ("granularity", "at least 1".into());
            return Err(Error::Number { what, value: 0, expected });
        }
        to_i32("granularity", self.granularity)?;
        to_i32("total_q", self.rows())?;
        Ok(self)
    }

    /// Whether kernels read offsets or lengths on the device.
    pub(super) fn has_data(&self) -> bool {
        self.total_q.is_some() || self.packed_kv || self.seqused_kv
    }

    /// What each row is about, by the rows of each sequence and the lengths. Rows that are in no
    /// sequence see nothing.
    pub(super) fn host(
        &self,
        ranges: &[Range<usize>],
        length: impl Fn(usize) -> usize,
    ) -> Vec<Row> {
        let mut rows = vec![Row::default(); self.rows()];
        for (entry, range) in ranges.iter().enumerate() {
            let first = if self.total_q.is_some() { 0 } else { entry * self.seqlen_q };
            for (query, at) in range.clone().enumerate() {
                let keys = self.mask.visible(query, range.len(), length(entry));
                rows[first + at] = Row { query: [entry, at], keys };
            }
        }
        rows
    }

    /// The blocks that hold some of these keys.
    pub(super) fn blocks_of(&self, keys: &Range<usize>) -> Range<usize> {
        if keys.is_empty() {
            return 0..0;
        }
        keys.start / self.granularity..keys.end.div_ceil(self.granularity)
    }
}
