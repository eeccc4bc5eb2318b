//! `dq`: what keys give to it, and the sum of that.
//!
//! The gradients of scores are there when `dk` and `dv` are computed, so `dq` takes them from
//! there: each span of keys has sums of its own, which are added in ascending order.

use super::{Operands, Output};
use crate::attention::cpu::sequence::{Sequence, blocks};
use crate::float::Float;
use crate::panels::{Buffer, Into, LANES, Lanes, Left, ONES, ROWS, multiply};
use rayon::prelude::*;
use std::ops::Range;

/// Rows that are finished at a time.
const ROWS_AT_ONCE: usize = 128;

/// What a span of keys gives to the queries of the heads that share it.
pub(super) struct Sums {
    /// The queries that see some of the keys.
    queries: Range<usize>,
    /// Panels of all columns of a head.
    panels: usize,
    /// `[heads, panels, queries]`
    rows: Buffer,
}

impl Sums {
    pub(super) fn new(queries: Range<usize>, heads: usize, head_dim: usize) -> Self {
        let panels = head_dim.div_ceil(LANES);
        Self { rows: Buffer::new(heads * panels * queries.len() * LANES), queries, panels }
    }

    /// Adds `ds · k` to the rows of some queries of a head. There is a row of `ds` for each query,
    /// up to a multiple of [`ROWS`]; `k` has `keys` rows in each panel of [`LANES`] rows.
    pub(super) fn add(
        &mut self,
        head: usize,
        queries: &Range<usize>,
        ds: &[Lanes],
        k: &[Lanes],
        keys: usize,
    ) {
        let (first, count) = (queries.start - self.queries.start, queries.len());
        let whole = count / ROWS * ROWS;
        for (panel, k) in k.chunks_exact(LANES).enumerate() {
            let start = (head * self.panels + panel) * self.queries.len() + first;
            let (sums, rest) = self.rows.panels_mut()[start..][..count].split_at_mut(whole);
            let left =
                |rows: usize| Left::Rows { values: ds[rows..].as_flattened(), stride: LANES };
            multiply(sums, left(0), &k[..keys], Into::AddTo(&ONES));
            if !rest.is_empty() {
                // What follows are rows of other queries.
                let mut last = [[0.0; LANES]; ROWS];
                multiply(&mut last, left(whole), &k[..keys], Into::Set(1.0));
                let added = rest.as_flattened_mut().iter_mut().zip(last.as_flattened());
                added.for_each(|(sum, x)| *sum += x);
            }
        }
    }

    /// Adds the rows of some queries of a head to theirs, `[queries, head_dim]`.
    fn add_to(&self, target: &mut [f32], head: usize, queries: &Range<usize>, head_dim: usize) {
        let start = queries.start.max(self.queries.start);
        let rows = target.chunks_exact_mut(head_dim).skip(start - queries.start);
        for (query, row) in (start..queries.end.min(self.queries.end)).zip(rows) {
            for (panel, row) in row.chunks_mut(LANES).enumerate() {
                let at = (head * self.panels + panel) * self.queries.len();
                let sums = &self.rows.panels()[at + query - self.queries.start];
                row.iter_mut().zip(sums).for_each(|(x, sum)| *x += sum);
            }
        }
    }
}

/// Stores `dq` of a group of heads of a sequence, whose spans of keys have these sums.
pub(super) fn store<T: Float>(
    operands: &Operands<'_, T>,
    output: &Output<'_, T>,
    (sequence, head_kv): (Sequence, usize),
    spans: &[Sums],
) {
    let forward = &operands.problem.forward;
    let (head_dim, group) = (forward.head_dims.qk, forward.num_heads_q / forward.num_heads_kv);
    let rows: Vec<Range<usize>> = blocks(sequence.seqlen_q, None, ROWS_AT_ONCE).collect();
    (0..group * rows.len()).into_par_iter().for_each_init(
        || (Vec::new(), Vec::new()),
        |(sums, rounded), at| {
            let (head, queries) = (at / rows.len(), &rows[at % rows.len()]);
            sums.clear();
            sums.resize(queries.len() * head_dim, 0.0);
            spans.iter().for_each(|span| span.add_to(sums, head, queries, head_dim));
            sums.iter_mut().for_each(|x| *x *= forward.scores.softmax_scale);
            let head = head_kv * group + head;
            let start = |query| sequence.q_row(operands.problem.dq, head, query);
            output.store(sums, queries, start, rounded);
        },
    );
}
