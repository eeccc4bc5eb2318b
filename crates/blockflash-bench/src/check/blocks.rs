//! Lists of blocks, as a check reads them.

use super::{Mismatch, ensure};
use std::ops::Range;

/// The blocks of keys that each block of queries attends to; equal for all batch entries.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    /// Queries of a block.
    pub block_q: usize,
    /// Keys of a block.
    pub block_kv: usize,
    /// Heads that have lists; neighbouring query heads share one.
    pub heads: usize,
    /// Where the list of row `head * blocks of queries + block of queries` begins in `col_idx`, and where the last one ends.
    pub row_ptr: &'a [i32],
    /// Blocks of keys.
    pub col_idx: &'a [i32],
}

impl Blocks<'_> {
    /// Keys that a query may see, on average.
    pub(super) fn mean_keys(&self) -> usize {
        (self.col_idx.len() * self.block_kv).div_ceil(self.row_ptr.len().max(2) - 1)
    }

    pub(super) fn check(&self, seqlen_q: usize, heads_q: usize) -> Result<(), Mismatch> {
        let Self { block_q, block_kv, heads, row_ptr, col_idx } = *self;
        ensure(block_q > 0 && block_kv > 0, || "a block has a size of 0".to_owned())?;
        ensure(heads > 0 && heads_q.is_multiple_of(heads), || {
            format!("{heads} heads have lists of blocks, and q has {heads_q}")
        })?;
        let rows = heads * seqlen_q.div_ceil(block_q);
        ensure(row_ptr.len() == rows + 1, || {
            format!("row_ptr has {} entries for {rows} rows", row_ptr.len())
        })?;
        let ascends = row_ptr.first() == Some(&0) && row_ptr.windows(2).all(|pair| pair[0] <= pair[1]);
        let ends = row_ptr.last().and_then(|&end| usize::try_from(end).ok()) == Some(col_idx.len());
        ensure(ascends && ends, || format!("row_ptr does not lead through {} blocks", col_idx.len()))?;
        ensure(col_idx.iter().all(|&column| column >= 0), || "a block has a negative index".to_owned())
    }

    /// The keys of a range that a query of a head sees, block by block. The lists are checked.
    pub(super) fn seen(
        &self,
        query: usize,
        head: [usize; 2],
        seqlen_q: usize,
        range: Range<usize>,
    ) -> Vec<Range<usize>> {
        let [head, heads_q] = head;
        let rows = seqlen_q.div_ceil(self.block_q);
        let row = head / (heads_q / self.heads) * rows + query / self.block_q;
        let columns = &self.col_idx[self.row_ptr[row] as usize..self.row_ptr[row + 1] as usize];
        let keys = |&column: &i32| {
            let start = column as usize * self.block_kv;
            start.max(range.start)..(start + self.block_kv).min(range.end)
        };
        columns.iter().map(keys).filter(|keys| !keys.is_empty()).collect()
    }
}
