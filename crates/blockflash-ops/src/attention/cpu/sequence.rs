//! What the CPU backends of attention and of its gradients share: where the rows of a sequence are,
//! how they are cut into blocks, and what a block mask visits.

use crate::attention::{Attention, AttentionProblem, LseStrides, Strides};
use crate::block_sparse::BlockBits;
use crate::float::Float;
use crate::panels::{LANES, Lanes, vectorized};
use crate::{BlockMask, Result};
use blockflash_safe::Stream;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Rows of q per task, where there are enough of them: the more, the less it matters that keys and
/// values are converted for each task.
pub(crate) const MOST_ROWS: usize = 256;

/// Tasks that a small problem is cut into, for machines with many threads.
const TASKS: usize = 64;

/// One batch entry: its index, its first rows in packed tensors (0 in dense ones), and its lengths.
#[derive(Clone, Copy)]
pub(crate) struct Sequence {
    pub(crate) entry: usize,
    pub(crate) first_q: usize,
    pub(crate) first_kv: usize,
    pub(crate) seqlen_q: usize,
    pub(crate) seqlen_kv: usize,
}

impl Sequence {
    /// Position of a row of q or of a tensor in its shape.
    pub(crate) fn q_row(&self, strides: Strides, head: usize, query: usize) -> usize {
        self.entry * strides.batch + (self.first_q + query) * strides.seq + head * strides.head
    }

    /// Position of a row of k, of v or of their gradients.
    pub(crate) fn kv_row(&self, strides: Strides, head: usize, key: usize) -> usize {
        self.entry * strides.batch + (self.first_kv + key) * strides.seq + head * strides.head
    }

    /// Position of an element of lse.
    pub(crate) fn lse(&self, strides: LseStrides, head: usize, query: usize) -> usize {
        self.entry * strides.batch + head * strides.head + self.first_q + query
    }
}

/// The sequences of a batch. Packed ones are verified.
pub(crate) fn sequences(
    op: &Attention<'_>,
    problem: &AttentionProblem,
    stream: &Stream,
) -> Result<Vec<Sequence>> {
    let AttentionProblem { batch, seqlen_q, seqlen_kv, .. } = *problem;
    let (Some(cu_seqlens), Some(packed)) = (&op.cu_seqlens, problem.packed) else {
        let entry = |entry| Sequence { entry, first_q: 0, first_kv: 0, seqlen_q, seqlen_kv };
        return Ok((0..batch).map(entry).collect());
    };
    let (cu_q, cu_kv) = cu_seqlens.read(stream, packed.total_q, packed.total_kv, op.block_mask)?;
    let pairs = cu_q.windows(2).zip(cu_kv.windows(2)).enumerate();
    Ok(pairs
        .map(|(entry, (rows_q, rows_kv))| {
            let [first_q, end_q, first_kv, end_kv] =
                [rows_q[0], rows_q[1], rows_kv[0], rows_kv[1]].map(|row| row as usize);
            let (seqlen_q, seqlen_kv) = (end_q - first_q, end_kv - first_kv);
            Sequence { entry, first_q, first_kv, seqlen_q, seqlen_kv }
        })
        .collect())
}

/// A block of rows of q that are computed together: queries of some heads that share keys, query by
/// query, all in one row of the block mask.
pub(crate) struct QueryRows {
    pub(crate) sequence: Sequence,
    first_head: usize,
    heads: usize,
    pub(crate) rows: Range<usize>,
}

impl QueryRows {
    /// Head and query of a row.
    pub(crate) fn at(&self, row: usize) -> [usize; 2] {
        [self.first_head + row % self.heads, row / self.heads]
    }

    /// Rows of the whole sequence for these heads.
    pub(crate) fn of_sequence(&self) -> usize {
        self.sequence.seqlen_q * self.heads
    }
}

/// The rows of all queries of all heads. Heads that share keys share blocks, unless a block mask
/// tells them apart.
pub(crate) fn query_rows(
    problem: &AttentionProblem,
    sequences: &[Sequence],
    mask: Option<&BlockMask>,
) -> Vec<QueryRows> {
    let AttentionProblem { num_heads_q, num_heads_kv, .. } = *problem;
    let group = num_heads_q / num_heads_kv.max(1);
    let mask_of = |head| problem.block_mask.map_or(0, |sizes| sizes.head(head, num_heads_q));
    let shared = (0..num_heads_q).all(|head| mask_of(head) == mask_of(head / group * group));
    let heads = if shared { group.max(1) } else { 1 };
    let queries: usize = sequences.iter().map(|sequence| sequence.seqlen_q).sum();
    // The size follows from the problem alone: the number of threads must not matter.
    let block = (queries * num_heads_q / TASKS).clamp(LANES, MOST_ROWS).next_multiple_of(LANES);
    let mut found = Vec::new();
    for &sequence in sequences {
        for first_head in (0..num_heads_q).step_by(heads) {
            let mask_block = mask.map(|mask| mask.block_q() * heads);
            let blocks = blocks(sequence.seqlen_q * heads, mask_block, block);
            found.extend(blocks.map(|rows| QueryRows { sequence, first_head, heads, rows }));
        }
    }
    found
}

/// All rows of a sequence in blocks of at most `block`, each within one row of the block mask.
pub(crate) fn blocks(
    rows: usize,
    mask_block: Option<usize>,
    block: usize,
) -> impl Iterator<Item = Range<usize>> {
    let row = mask_block.unwrap_or(rows).max(1);
    (0..rows).step_by(row).flat_map(move |first| {
        let end = (first + row).min(rows);
        (first..end).step_by(block).map(move |start| start..(start + block).min(end))
    })
}

/// What some rows visit, whatever the token mask shows.
pub(crate) struct Visited {
    /// Ascending, with gaps between them.
    pub(crate) ranges: Vec<Range<usize>>,
    /// Blocks of which only some pairs are visible, ascending.
    pub(crate) partial: Vec<PartialBlock>,
}

/// A block of which only some pairs are visible.
pub(crate) struct PartialBlock {
    first_row: usize,
    columns: Range<usize>,
    bits: BlockBits,
}

/// What the rows that start at `start` visit of `columns` keys. Under the transpose of a block
/// mask, rows are keys and columns are queries.
pub(crate) fn visited(
    mask: Option<&BlockMask>,
    problem: &AttentionProblem,
    [entry, head]: [usize; 2],
    start: usize,
    columns: usize,
) -> Result<Visited> {
    let mut visited = Visited { ranges: Vec::new(), partial: Vec::new() };
    let (Some(mask), Some(sizes)) = (mask, problem.block_mask) else {
        visited.ranges.push(0..columns);
        return Ok(visited);
    };
    let entry = if sizes.batch == 1 { 0 } else { entry };
    let head = sizes.head(head, problem.num_heads_q);
    let row = start / mask.block_q();
    for (columns, bits) in mask.blocks_of_row(entry, head, row)? {
        match visited.ranges.last_mut() {
            Some(last) if last.end == columns.start => last.end = columns.end,
            _ => visited.ranges.push(columns.clone()),
        }
        let first_row = row * mask.block_q();
        let partial = |bits| PartialBlock { first_row, columns, bits };
        visited.partial.extend(bits.map(partial));
    }
    Ok(visited)
}

/// A word for each of some columns, with a bit for each of up to 32 rows that sees it; `None` if
/// all of these blocks are full.
pub(crate) fn words_of(
    partial: &[PartialBlock],
    rows: &[usize],
    columns: Range<usize>,
) -> Option<Vec<u32>> {
    let mut words = None;
    for block in partial {
        let common = block.columns.start.max(columns.start)..block.columns.end.min(columns.end);
        if common.is_empty() {
            continue;
        }
        let words = words.get_or_insert_with(|| vec![u32::MAX; columns.len()]);
        for column in common {
            let sees = |&row: &usize| u32::from(block.sees(row, column));
            let bits = rows.iter().rev().fold(0, |bits, row| bits << 1 | sees(row));
            words[column - columns.start] = bits;
        }
    }
    words
}

impl PartialBlock {
    fn sees(&self, row: usize, column: usize) -> bool {
        self.bits.get(row - self.first_row, column - self.columns.start)
    }
}

/// The part of visited columns that is `within` a range, in steps that end at multiples of `step`:
/// the sums of a row do not depend on which rows are computed beside it.
pub(crate) fn steps(
    visited: Vec<Range<usize>>,
    within: Range<usize>,
    step: usize,
) -> impl Iterator<Item = Range<usize>> {
    visited.into_iter().flat_map(move |visited| {
        let (first, end) = (visited.start.max(within.start), visited.end.min(within.end));
        let steps = (first / step * step..end).step_by(step);
        steps.map(move |start| start.max(first)..(start + step).min(end)).filter(|s| !s.is_empty())
    })
}

/// Elements from row to row of a converted operand: whole cache lines, and no power of two, so that
/// columns spread over the sets of a cache.
pub(crate) fn row_stride(head_dim: usize) -> usize {
    head_dim.next_multiple_of(LANES) + LANES / 2
}

/// Converts rows, [`row_stride`] apart; `position` gives where a row starts.
pub(crate) fn load<T: Float>(
    target: &mut [f32],
    source: &[T],
    rows: Range<usize>,
    head_dim: usize,
    position: impl Fn(usize) -> usize,
) {
    vectorized(Load { target, source, rows, head_dim, position });
}

struct Load<'a, T, F> {
    target: &'a mut [f32],
    source: &'a [T],
    rows: Range<usize>,
    head_dim: usize,
    position: F,
}

impl<T: Float, F: Fn(usize) -> usize> WithSimd for Load<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { target, source, rows, head_dim, position } = self;
        for (row, target) in rows.zip(target.chunks_exact_mut(row_stride(head_dim))) {
            T::widen_inline(&source[position(row)..][..head_dim], &mut target[..head_dim]);
        }
    }
}

/// Converts a row to a column of a panel.
pub(crate) fn load_lane<T: Float>(panel: &mut [Lanes], source: &[T], lane: usize) {
    let mut row = [0.0; LANES];
    for (panel, source) in panel.chunks_mut(LANES).zip(source.chunks(LANES)) {
        T::widen(source, &mut row[..source.len()]);
        panel.iter_mut().zip(row).for_each(|(panel, x)| panel[lane] = x);
    }
}

/// The intersection of `visible` and `keys`, relative to the start of `keys`.
pub(crate) fn clip(visible: Range<usize>, keys: &Range<usize>) -> Range<usize> {
    let clamp = |key: usize| key.clamp(keys.start, keys.end) - keys.start;
    clamp(visible.start)..clamp(visible.end)
}
