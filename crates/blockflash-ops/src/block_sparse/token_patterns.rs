//! Block masks of named patterns of tokens, whose blocks are full or partial. A causal part is left
//! to the token mask of the call unless it is said otherwise:
//! [`intersect_mask`](BlockMask::intersect_mask) leaves out the blocks that it hides.

use super::validate::invalid;
use super::{BlockGeometry, BlockMask};
use crate::{Align, Error, Mask, Result};
use std::collections::HashMap;
use std::ops::Range;

impl BlockMask {
    /// Documents in one sequence: a query sees the keys with its id. `ids_q` is
    /// `[batch, seqlen_q]` and `ids_kv` `[batch, seqlen_kv]`, in any order. Tokens with a negative
    /// id are padding, which sees nothing and nobody sees.
    ///
    /// # Errors
    /// [`Error::Shape`] if the ids are not those of one or more batch entries; as for
    /// [`from_ranges`](Self::from_ranges).
    pub fn documents(geometry: BlockGeometry, ids_q: &[i32], ids_kv: &[i32]) -> Result<Self> {
        let (seqlen_q, seqlen_kv) = (geometry.seqlen_q(), geometry.seqlen_kv());
        let batch = entries("ids_q", ids_q.len(), seqlen_q, None)?;
        let batch = entries("ids_kv", ids_kv.len(), seqlen_kv, batch)?.or(batch).unwrap_or(1);
        let keys: Vec<HashMap<i32, Vec<Range<usize>>>> = (0..batch)
            .map(|entry| {
                let mut keys = HashMap::new();
                let mut first = 0;
                for run in ids_kv[entry * seqlen_kv..][..seqlen_kv].chunk_by(|a, b| a == b) {
                    let range = first..first + run.len();
                    first = range.end;
                    keys.entry(run[0]).or_insert_with(Vec::new).push(range);
                }
                keys
            })
            .collect();
        Self::from_ranges(geometry, batch, 1, |batch, _, query| {
            let id = ids_q[batch * seqlen_q + query];
            let seen = keys[batch].get(&id).filter(|_| id >= 0);
            seen.map_or(&[][..], Vec::as_slice).iter().cloned()
        })
    }

    /// The pairs that the token mask shows, and the first keys of each batch entry for all queries:
    /// with a causal mask a prefix language model. One number stands for all entries.
    ///
    /// # Errors
    /// As for [`from_ranges`](Self::from_ranges); also if there are no numbers.
    pub fn prefix(geometry: BlockGeometry, prefixes: &[usize], mask: Mask) -> Result<Self> {
        let (seqlen_q, seqlen_kv) = (geometry.seqlen_q(), geometry.seqlen_kv());
        Self::from_ranges(geometry, prefixes.len(), 1, |batch, _, query| {
            [0..prefixes[batch], mask.visible(query, seqlen_q, seqlen_kv)]
        })
    }

    /// The pairs that the token mask shows, and of the `first` keys those up to the last key
    /// that it shows the query: with a causal window the mask of streaming attention.
    ///
    /// # Errors
    /// As for [`from_ranges`](Self::from_ranges).
    pub fn streaming(geometry: BlockGeometry, first: usize, mask: Mask) -> Result<Self> {
        let (seqlen_q, seqlen_kv) = (geometry.seqlen_q(), geometry.seqlen_kv());
        Self::from_ranges(geometry, 1, 1, |_, _, query| {
            let window = mask.visible(query, seqlen_q, seqlen_kv);
            [0..first.min(window.end), window]
        })
    }

    /// For each batch entry the keys that exist, for all queries: the others are padding, before,
    /// behind or on both sides.
    ///
    /// # Errors
    /// As for [`from_ranges`](Self::from_ranges); also if there are no ranges.
    pub fn key_padding(geometry: BlockGeometry, keys: &[Range<usize>]) -> Result<Self> {
        Self::from_ranges(geometry, keys.len(), 1, |batch, _, _| [keys[batch].clone()])
    }

    /// Trees of speculative decoding. The last `seqlen_q` keys are those of the queries; a query
    /// sees all keys before them, its own one, and those of its ancestors. `parents`
    /// `[batch, seqlen_q]` holds the parent of each query, an earlier query of the entry, or −1 for
    /// a root.
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`] names the first parent that is not an earlier query, or if there
    /// are fewer keys than queries; [`Error::Shape`] if the parents are not those of one or more
    /// batch entries; as for [`from_ranges`](Self::from_ranges).
    pub fn tree(geometry: BlockGeometry, parents: &[i32]) -> Result<Self> {
        let seqlen_q = geometry.seqlen_q();
        let batch = entries("parents", parents.len(), seqlen_q, None)?.unwrap_or(1);
        let before = check_nodes(&geometry)?;
        for (at, &parent) in parents.iter().enumerate() {
            let (batch, query) = (at / seqlen_q, at % seqlen_q);
            if parent < -1 || parent >= query as i32 {
                return invalid(format!(
                    "the parent of query {query} of batch {batch} is {parent}, neither -1 nor an \
                     earlier query"
                ));
            }
        }
        Self::from_ranges(geometry, batch, 1, |batch, _, query| {
            let parents = &parents[batch * seqlen_q..][..seqlen_q];
            let parent_of = |&query: &usize| usize::try_from(parents[query]).ok();
            let path = std::iter::successors(Some(query), parent_of);
            std::iter::once(0..before).chain(path.map(move |q| before + q..before + q + 1))
        })
    }

    /// A window of which a query sees every `dilation`-th key from its own position on, `left` keys
    /// before it and `right` after it; `None` does not limit a side. Positions depend on `align` as
    /// in [`Mask`].
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`] if `dilation` is 0; as for [`from_ranges`](Self::from_ranges).
    pub fn dilated_window(
        geometry: BlockGeometry,
        dilation: usize,
        left: Option<usize>,
        right: Option<usize>,
        align: Align,
    ) -> Result<Self> {
        check_stride("dilation", dilation)?;
        let (seqlen_q, seqlen_kv) = (geometry.seqlen_q(), geometry.seqlen_kv());
        let [left, right] =
            [left, right].map(|side| side.map(|keys| keys.saturating_mul(dilation)));
        let window = Mask::Window { left, right, align };
        let diagonal = match align {
            Align::TopLeft => 0,
            Align::BottomRight => seqlen_kv as i64 - seqlen_q as i64,
        };
        Self::from_ranges(geometry, 1, 1, |_, _, query| {
            let keys = window.visible(query, seqlen_q, seqlen_kv);
            let position = query as i64 + diagonal;
            // The first key that is some steps away.
            let steps = (position - keys.start as i64).rem_euclid(dilation as i64);
            (keys.start + steps as usize..keys.end).step_by(dilation).map(|key| key..key + 1)
        })
    }

    /// Neighbourhood attention on a grid of one or more dimensions, whose tokens are queries and
    /// keys in row-major order. Along each dimension a query sees `window` positions, `dilation`
    /// apart, around its own: the one in the middle is its own, or of an even number the one behind
    /// the middle, but at the border the window is moved so that it stays on the grid.
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`] if the lengths of the sequences are not the number of tokens of
    /// the grid, or the three lists are not of the same length, or a window is empty or longer than
    /// the grid, or a dilation is 0; as for [`from_ranges`](Self::from_ranges).
    pub fn neighborhood(
        geometry: BlockGeometry,
        grid: &[usize],
        window: &[usize],
        dilation: &[usize],
    ) -> Result<Self> {
        check_neighborhood(&geometry, grid, window, dilation)?;
        // The positions along a dimension that one of its positions sees.
        let near = |axis: usize, at: usize| {
            let (size, count, step) = (grid[axis], window[axis], dilation[axis]);
            let (first, own) = (at % step, at / step);
            let all = (size - first).div_ceil(step);
            let start = own.saturating_sub(count / 2).min(all - count);
            (start..start + count).map(move |place| first + place * step)
        };
        Self::from_ranges(geometry, 1, 1, |_, _, query| {
            let (mut seen, mut rest, mut stride) = (vec![0], query, 1);
            for axis in (0..grid.len()).rev() {
                let at = rest % grid[axis];
                let shifted = |place: usize| seen.iter().map(move |token| token + place * stride);
                seen = near(axis, at).flat_map(shifted).collect();
                (rest, stride) = (rest / grid[axis], stride * grid[axis]);
            }
            seen.into_iter().map(|token| token..token + 1)
        })
    }
}

/// The number of keys before those of the nodes of trees.
pub(super) fn check_nodes(geometry: &BlockGeometry) -> Result<usize> {
    let (seqlen_q, seqlen_kv) = (geometry.seqlen_q(), geometry.seqlen_kv());
    match seqlen_kv.checked_sub(seqlen_q) {
        Some(before) => Ok(before),
        None => invalid(format!("{seqlen_kv} keys, fewer than the {seqlen_q} queries of trees")),
    }
}

/// Checks a distance between keys.
pub(super) fn check_stride(what: &str, stride: usize) -> Result<()> {
    if stride > 0 { Ok(()) } else { invalid(format!("{what} is 0, but must be at least 1")) }
}

/// Checks that the tokens of a grid are the queries and keys, and that windows fit it.
pub(super) fn check_neighborhood(
    geometry: &BlockGeometry,
    grid: &[usize],
    window: &[usize],
    dilation: &[usize],
) -> Result<()> {
    let tokens = grid.iter().try_fold(1usize, |tokens, &size| tokens.checked_mul(size));
    let lengths = [geometry.seqlen_q(), geometry.seqlen_kv()];
    if lengths.map(Some) != [tokens; 2] {
        return invalid(format!(
            "a grid of {grid:?} tokens, but {} queries and {} keys",
            lengths[0], lengths[1]
        ));
    }
    if grid.is_empty() || [window.len(), dilation.len()] != [grid.len(); 2] {
        return invalid(format!(
            "a grid of {} dimensions, with {} windows and {} dilations",
            grid.len(),
            window.len(),
            dilation.len()
        ));
    }
    for (axis, &size) in grid.iter().enumerate() {
        let span = window[axis].saturating_mul(dilation[axis]);
        if span == 0 || span > size {
            return invalid(format!(
                "a window of {} × {} positions along dimension {axis}, not from 1 to {size}",
                window[axis], dilation[axis]
            ));
        }
    }
    Ok(())
}

/// The number of batch entries with `length` values each, which must be `batch` if that is known;
/// unknown without values.
fn entries(
    what: &'static str,
    found: usize,
    length: usize,
    batch: Option<usize>,
) -> Result<Option<usize>> {
    let expected = match batch {
        Some(batch) => format!("the values of [{batch}, {length}]"),
        None => format!("the values of [batch, {length}]"),
    };
    let count = found.checked_div(length).filter(|&count| count > 0);
    let fits = match (count, batch) {
        (None, _) => found == 0 && length == 0,
        (Some(count), Some(batch)) => count == batch && count * length == found,
        (Some(count), None) => count * length == found,
    };
    if fits { Ok(count) } else { Err(Error::Shape { what, expected, found: vec![found] }) }
}

#[cfg(test)]
#[path = "token_patterns_tests.rs"]
mod tests;
