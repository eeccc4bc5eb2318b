//! Which keys queries see in a packed batch: sequences of different lengths that are one after
//! another in the rows of the ranks, each of which attends only itself.

use crate::band::{Band, Part};
use crate::{Error, Result, Shard};
use blockflash_ops::Mask;
use std::ops::Range;

/// A band within each sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pattern<'a> {
    pub(crate) band: Band,
    /// Where the sequences of a packed batch begin and end; `None` if there is one sequence.
    pub(crate) cu_seqlens: Option<&'a [i32]>,
}

/// Checks the offsets of a packed batch of this many rows.
pub(crate) fn check_offsets(cu_seqlens: &[i32], rows: usize) -> Result<()> {
    let bad = |index: usize, problem: String| {
        Err(Error::CuSeqlens { index, value: cu_seqlens[index], problem })
    };
    let Some(last) = cu_seqlens.len().checked_sub(1) else {
        let expected = "at least 1".into();
        return Err(Error::Size { what: "the length of cu_seqlens", value: 0, expected });
    };
    if cu_seqlens[0] != 0 {
        return bad(0, "the first offset must be 0".into());
    }
    if let Some(at) = cu_seqlens.windows(2).position(|pair| pair[1] < pair[0]) {
        let problem = format!("offsets must not descend, the one before is {}", cu_seqlens[at]);
        return bad(at + 1, problem);
    }
    if cu_seqlens[last] as usize != rows {
        return bad(last, format!("the last offset must be the {rows} rows of all ranks"));
    }
    Ok(())
}

impl<'a> Pattern<'a> {
    /// `None` for a mask that is no band. The offsets are valid.
    pub(crate) fn of(mask: Mask, seqlen: usize, cu_seqlens: Option<&'a [i32]>) -> Option<Self> {
        let lengths = cu_seqlens.map(|offsets| offsets.windows(2).map(|pair| pair[1] - pair[0]));
        let longest = lengths.map(|lengths| lengths.max().unwrap_or(0) as usize);
        Some(Pattern { band: Band::of(mask, longest.unwrap_or(seqlen))?, cu_seqlens })
    }

    /// What a group has of the keys of another one, or of its own.
    ///
    /// Sequences that are within the group are attended by one call as long as they follow each
    /// other. A sequence of several groups has the parts that it would have alone. So no row is in
    /// parts of two sequences, but for that call, which has all that its rows attend.
    pub(crate) fn parts(&self, group: &Shard, source: &Shard) -> Vec<Part> {
        let Some(offsets) = self.cu_seqlens else { return self.band.parts(group, source) };
        if group.rank() != source.rank() {
            let shared = shared(offsets, group).into_iter();
            let parts = |sequence| self.band.parts_in(&sequence, group, source);
            return shared.flat_map(parts).collect();
        }
        let mut parts: Vec<Part> = Vec::new();
        let mut whole_before = false;
        for sequence in sequences(offsets, group) {
            let whole = group.rows_in(&sequence).len() == sequence.len();
            match parts.last_mut().filter(|_| whole && whole_before) {
                Some(part) => append(part, sequence.len()),
                None => parts.extend(self.band.parts_in(&sequence, group, group)),
            }
            whole_before = whole;
        }
        parts
    }
}

/// Adds the next sequence to a call of one or several.
fn append(part: &mut Part, rows: usize) {
    let length = part.queries.len();
    let offsets = part.cu_seqlens.get_or_insert_with(|| vec![0, length as i32]);
    offsets.push((length + rows) as i32);
    part.queries.end += rows;
    part.keys.end += rows;
}

/// The sequence of a row of the batch.
fn sequence_at(offsets: &[i32], position: usize) -> usize {
    offsets.partition_point(|&offset| offset as usize <= position) - 1
}

fn sequence(offsets: &[i32], at: usize) -> Range<usize> {
    offsets[at] as usize..offsets[at + 1] as usize
}

/// The sequences of which a group has rows, in their order.
fn sequences<'a>(
    offsets: &'a [i32],
    group: &Shard,
) -> impl Iterator<Item = Range<usize>> + use<'a> {
    let mut next = 0;
    let of_span = move |span: Range<usize>| {
        let first = sequence_at(offsets, span.start).max(next);
        next = sequence_at(offsets, span.end - 1) + 1;
        first..next
    };
    let spans = group.spans().into_iter().map(|span| span.positions);
    let all = spans.flat_map(of_span).map(|at| sequence(offsets, at));
    all.filter(|sequence| !sequence.is_empty())
}

/// The sequences of which a group and another one may have rows: those at the ends of its spans.
fn shared(offsets: &[i32], group: &Shard) -> Vec<Range<usize>> {
    let ends = |span: Range<usize>| [span.start, span.end - 1];
    let ends = group.spans().into_iter().flat_map(|span| ends(span.positions));
    let mut shared: Vec<_> = ends.map(|position| sequence_at(offsets, position)).collect();
    shared.dedup();
    shared.into_iter().map(|at| sequence(offsets, at)).collect()
}

#[cfg(test)]
#[path = "pattern_tests.rs"]
pub(crate) mod tests;
