//! The tasks: spans of the keys of a head. They follow from the keys alone, so neither the number
//! of threads nor the batch matters to the order of sums.

use super::BLOCK;
use crate::BlockMask;
use crate::attention::AttentionProblem;
use crate::attention::cpu::sequence::{Sequence, blocks};
use crate::panels::LANES;
use std::ops::Range;

/// Spans of a sequence at most: each has sums for all queries that see it.
const MOST: usize = 8;

/// Blocks of keys per span at least.
const BLOCKS: usize = 2;

/// Elements of these sums that may exist at the same time, where threads do not need more: 256 MiB.
const ELEMENTS: usize = 1 << 26;

/// Keys of a head of a sequence.
pub(super) struct Span {
    pub(super) sequence: Sequence,
    pub(super) head: usize,
    /// Each in one column of the block mask.
    pub(super) blocks: Vec<Range<usize>>,
    /// The queries that see some of the keys.
    pub(super) queries: Range<usize>,
}

/// The spans of the keys of a head.
pub(super) fn spans(
    forward: &AttentionProblem,
    mask: Option<&BlockMask>,
    sequence: Sequence,
    head: usize,
) -> Vec<Span> {
    let Sequence { seqlen_q, seqlen_kv, .. } = sequence;
    let keys = seqlen_kv.div_ceil(BLOCK).div_ceil(MOST).max(BLOCKS) * BLOCK;
    let blocks: Vec<_> = blocks(seqlen_kv, mask.map(BlockMask::block_kv), BLOCK).collect();
    let spans = blocks.chunk_by(|a, b| a.start / keys == b.start / keys);
    spans
        .map(|blocks| {
            let all = blocks[0].start..blocks[blocks.len() - 1].end;
            let queries = forward.scores.mask.attending(&all, seqlen_q, seqlen_kv);
            Span { sequence, head, blocks: blocks.to_vec(), queries }
        })
        .collect()
}

/// All sequences and heads of keys, in parts that are computed one after the other.
pub(super) fn heads_at_once(
    forward: &AttentionProblem,
    sequences: &[Sequence],
) -> Vec<Vec<(Sequence, usize)>> {
    let group = forward.num_heads_q / forward.num_heads_kv.max(1);
    let queries = sequences.iter().map(|sequence| sequence.seqlen_q).max().unwrap_or(0);
    let elements = MOST * group * queries * forward.head_dims.qk.next_multiple_of(LANES);
    let count = (ELEMENTS / elements.max(1)).max(rayon::current_num_threads());
    let heads = |&sequence| (0..forward.num_heads_kv).map(move |head| (sequence, head));
    let all: Vec<_> = sequences.iter().flat_map(heads).collect();
    all.chunks(count).map(<[_]>::to_vec).collect()
}

#[cfg(test)]
#[path = "spans_tests.rs"]
mod tests;
