//! What the CPU backends of attention and of its gradients share: where the rows of a sequence are,
//! how they are cut into blocks, and what a block mask visits.

use crate::attention::{Attention, AttentionProblem, LseStrides, Strides};
use crate::float::Float;
use crate::{BlockMask, Result};
use blockflash_safe::Stream;
use std::ops::Range;

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

/// What the rows that start at `start` visit of `columns` keys, whatever the token mask shows, as
/// ascending ranges with gaps between them. Under the transpose of a block mask, rows are keys and
/// columns are queries.
pub(crate) fn visited(
    mask: Option<&BlockMask>,
    problem: &AttentionProblem,
    [entry, head]: [usize; 2],
    start: usize,
    columns: usize,
) -> Result<Vec<Range<usize>>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let (Some(mask), Some(sizes)) = (mask, problem.block_mask) else {
        ranges.push(0..columns);
        return Ok(ranges);
    };
    let entry = if sizes.batch == 1 { 0 } else { entry };
    let head = sizes.head(head, problem.num_heads_q);
    for col in mask.row(entry, head, start / mask.block_q())? {
        let keys = mask.geometry_of(entry).keys(col);
        match ranges.last_mut() {
            Some(last) if last.end == keys.start => last.end = keys.end,
            _ => ranges.push(keys),
        }
    }
    Ok(ranges)
}

/// The part of visited columns that is `within` a range, in steps of at most `step`.
pub(crate) fn steps(
    visited: Vec<Range<usize>>,
    within: Range<usize>,
    step: usize,
) -> impl Iterator<Item = Range<usize>> {
    visited.into_iter().flat_map(move |visited| {
        let end = visited.end.min(within.end);
        let starts = (visited.start.max(within.start)..end).step_by(step);
        starts.map(move |start| start..(start + step).min(end))
    })
}

/// Converts rows to a panel; `position` gives where a row starts.
pub(crate) fn load<T: Float>(
    panel: &mut [f32],
    source: &[T],
    rows: Range<usize>,
    head_dim: usize,
    position: impl Fn(usize) -> usize,
) {
    for (row, target) in rows.zip(panel.chunks_exact_mut(head_dim)) {
        T::widen(&source[position(row)..][..head_dim], target);
    }
}

/// The intersection of `visible` and `keys`, relative to the start of `keys`.
pub(crate) fn clip(visible: Range<usize>, keys: &Range<usize>) -> Range<usize> {
    let clamp = |key: usize| key.clamp(keys.start, keys.end) - keys.start;
    clamp(visible.start)..clamp(visible.end)
}
