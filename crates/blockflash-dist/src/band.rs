//! Which keys of one group the queries of another one see.

use crate::Shard;
use crate::shard::Span;
use blockflash_ops::{Align, Mask};
use std::cmp::Ordering;
use std::ops::Range;

/// A mask over the positions of the whole sequence: how many keys before and after its own position
/// a query sees. A side that hides nothing there is `None`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Band {
    pub(crate) left: Option<usize>,
    pub(crate) right: Option<usize>,
}

/// A call of attention: some queries of a group to some keys of another one, or of its own.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Part {
    /// Rows of the queries' group.
    pub(crate) queries: Range<usize>,
    /// Rows of the keys' group.
    pub(crate) keys: Range<usize>,
    pub(crate) mask: Mask,
    /// Whether the queries stand at these keys. Every query does in exactly one part.
    pub(crate) own: bool,
    /// Where sequences that attend only themselves begin and end among the rows, which are the same
    /// ones of queries and keys; `None` if there is one sequence.
    pub(crate) cu_seqlens: Option<Vec<i32>>,
}

impl Band {
    /// `None` for a mask that is no band.
    pub(crate) fn of(mask: Mask, seqlen: usize) -> Option<Band> {
        let (left, right) = match mask {
            Mask::Full => (None, None),
            Mask::Causal { .. } => (None, Some(0)),
            Mask::Window { left, right, .. } => (left, right),
            _ => return None,
        };
        let hides = |side: &usize| *side < seqlen.saturating_sub(1);
        Some(Band { left: left.filter(hides), right: right.filter(hides) })
    }

    /// Whether a group needs no more than one call for each other one.
    pub(crate) fn is_simple(&self) -> bool {
        self.left.is_none() && self.right.is_none_or(|right| right == 0)
    }

    /// What a group has of the keys of another one, or of its own.
    pub(crate) fn parts(&self, group: &Shard, source: &Shard) -> Vec<Part> {
        self.parts_in(&(0..group.seqlen()), group, source)
    }

    /// The same of the queries and keys of a range of the sequence.
    ///
    /// Under a causal mask, of the chunks `a` and `b` of the source: the first chunk of a later
    /// group and its second chunk come after `a` and before `b`, and both chunks of the source are
    /// between the two of an earlier group. Within a group rows have the order of the sequence.
    pub(crate) fn parts_in(
        &self,
        positions: &Range<usize>,
        group: &Shard,
        source: &Shard,
    ) -> Vec<Part> {
        if !self.is_simple() {
            let [spans, of_source] = [group, source].map(|shard| shard.spans_in(positions));
            let pairs = spans.iter().flat_map(|q| of_source.iter().map(move |k| (q, k)));
            return pairs.filter_map(|(q, k)| self.part(q, k)).collect();
        }
        let own = group.rank() == source.rank();
        let [all, every] = [group, source].map(|shard| shard.rows_in(positions));
        let first = |rows: &Range<usize>, shard: &Shard| rows.start..rows.end.min(shard.first());
        let second = |rows: &Range<usize>, shard: &Shard| rows.start.max(shard.first())..rows.end;
        let (queries, keys, mask) = match group.rank().cmp(&source.rank()) {
            _ if self.right.is_none() => (all, every, Mask::Full),
            Ordering::Equal => (all, every, Mask::Causal { align: Align::TopLeft }),
            Ordering::Greater => (all, first(&every, source), Mask::Full),
            Ordering::Less => (second(&all, group), every, Mask::Full),
        };
        let some = !queries.is_empty() && !keys.is_empty();
        let part = Part { queries, keys, mask, own, cu_seqlens: None };
        some.then_some(part).into_iter().collect()
    }

    /// The queries of a span that see keys of another one, and those keys. Then the first query
    /// sees the first key, so both sides of the window are there also after the shift by what is
    /// between query and key.
    fn part(&self, q: &Span, k: &Span) -> Option<Part> {
        let (left, right) =
            (|p: usize| self.left.map_or(0, |left| p.saturating_sub(left)), self.right);
        let from = right.map_or(0, |right| k.positions.start.saturating_sub(right));
        let until = self.left.map_or(usize::MAX, |left| k.positions.end + left);
        let queries = q.positions.start.max(from)..q.positions.end.min(until);
        if queries.is_empty() {
            return None;
        }
        let start = k.positions.start.max(left(queries.start));
        let end = right.map_or(usize::MAX, |right| queries.end + right).min(k.positions.end);
        let mask = Mask::Window {
            left: self.left.map(|left| left + start - queries.start),
            right: right.map(|right| right + queries.start - start),
            align: Align::TopLeft,
        };
        let rows = |span: &Span, range: Range<usize>| {
            let row = |position| position - span.positions.start + span.row;
            row(range.start)..row(range.end)
        };
        let (queries, keys) = (rows(q, queries), rows(k, start..end));
        Some(Part { queries, keys, mask, own: q.positions == k.positions, cu_seqlens: None })
    }
}

impl Part {
    /// Pairs of queries and keys that the mask leaves.
    pub(crate) fn pairs(&self) -> f64 {
        match &self.cu_seqlens {
            None => self.pairs_of([&self.queries, &self.keys].map(|range| range.len() as f64)),
            Some(offsets) => {
                let rows = offsets.windows(2).map(|pair| f64::from(pair[1] - pair[0]));
                rows.map(|rows| self.pairs_of([rows; 2])).sum()
            }
        }
    }

    /// Those of this many queries and keys.
    fn pairs_of(&self, [rows, keys]: [f64; 2]) -> f64 {
        let (left, right) = match self.mask {
            Mask::Causal { .. } => (None, Some(0)),
            Mask::Window { left, right, .. } => (left, right),
            _ => (None, None),
        };
        // Query i sees keys i - left..=i + right of those that there are.
        let ends = right.map_or(rows * keys, |right| {
            let end = right as f64 + 1.0;
            let growing = (keys - end).clamp(0.0, rows);
            growing * end + growing * (growing - 1.0) / 2.0 + (rows - growing) * keys
        });
        let hidden = left.map_or(0.0, |left| (rows - 1.0 - left as f64).max(0.0));
        ends - hidden * (hidden + 1.0) / 2.0
    }
}

#[cfg(test)]
#[path = "band_tests.rs"]
mod tests;
