//! `dk` and `dv` of a block of keys, which are the lanes of panels, and what they give to `dq`.

use super::pairs::{OfKeys, Query};
use super::{KeyRows, Operands, dq};
use crate::Result;
use crate::attention::cpu::sequence::{
    PartialBlock, Sequence, Visited, load, load_lane, row_stride, steps, visited, words_of,
};
use crate::attention::cpu::terms::PanelTerms;
use crate::float::Float;
use crate::panels::{Buffer, Into, LANES, Left, ONES, ROWS, multiply, padded, vectorized};
use blockflash_sys::HeadDims;
use std::ops::Range;

/// Queries per step, chosen so that the pairs of a panel stay in the L1 cache, queries and the
/// gradients of their outputs in the L2 cache.
pub(super) const STEP: usize = 128;

/// The f32 operands of one thread.
#[derive(Default)]
pub(super) struct Tile {
    /// `[queries, head_dims.qk]`
    q: Buffer,
    /// `[queries, head_dims.v]`
    d_o: Buffer,
    queries: Vec<Query>,
    /// Scores and then probabilities of a panel, a row for each query.
    p: Buffer,
    /// `d_o · v` and then the gradients of `q · k · scale`, a row for each query.
    ds: Buffer,
    terms: PanelTerms,
    panels: Vec<Panel>,
    /// Whether `ds` are gradients of capped scores.
    capped: bool,
}

/// Loaded queries of a head, and the partial blocks of them and the keys.
pub(super) struct Part<'a> {
    pub(super) sequence: &'a Sequence,
    pub(super) head: usize,
    pub(super) queries: &'a Range<usize>,
    pub(super) partial: &'a [PartialBlock],
}

/// Some keys: `k` and `dk` have a row for each of `head_dims.qk`, `v` and `dv` of `head_dims.v`.
struct Panel {
    keys: Range<usize>,
    k: Buffer,
    v: Buffer,
    /// The columns of `k` as panels of [`LANES`] rows of keys.
    k_rows: Buffer,
    dk: Buffer,
    dv: Buffer,
}

impl Tile {
    /// For gradients of capped scores, to which a bias is added, in place of those of products.
    pub(super) fn of_capped_scores() -> Self {
        Self { capped: true, ..Self::default() }
    }

    /// Computes the gradients of some keys from all query heads of their group: `dk` and `dv`,
    /// `[keys, head_dims.qk]` and `[keys, head_dims.v]`. What they give to `dq` is added to it.
    pub(super) fn compute<T: Float>(
        &mut self,
        operands: &Operands<'_, T>,
        task: &KeyRows,
        sums: &mut [Vec<f32>; 2],
        dq: &mut dq::Sums,
    ) -> Result<()> {
        let KeyRows { sequence, head: head_kv, rows: keys } = task;
        let forward = &operands.problem.forward;
        let HeadDims { qk, v } = forward.head_dims;
        self.load_keys(operands, task);
        self.panels.iter_mut().for_each(|panel| panel.load_rows(qk));
        let group = forward.num_heads_q / forward.num_heads_kv;
        let attending = forward.scores.mask.attending(keys, sequence.seqlen_q, sequence.seqlen_kv);
        for head in head_kv * group..(head_kv + 1) * group {
            let (mask, at) = (operands.transposed.as_ref(), [sequence.entry, head]);
            let Visited { ranges, partial } =
                visited(mask, forward, at, keys.start, sequence.seqlen_q)?;
            for queries in steps(ranges, attending.clone(), STEP) {
                self.load_queries(operands, sequence, head, &queries);
                for panel in 0..self.panels.len() {
                    let part = Part { sequence, head, queries: &queries, partial: &partial };
                    self.add(operands, &part, panel, (&mut *dq, head - head_kv * group));
                }
            }
        }
        for (at, (scale, head_dim)) in
            [(forward.scores.softmax_scale, qk), (1.0, v)].into_iter().enumerate()
        {
            sums[at].resize(keys.len() * head_dim, 0.0);
            for (rows, panel) in sums[at].chunks_mut(LANES * head_dim).zip(&self.panels) {
                let panel = [&panel.dk, &panel.dv][at].panels();
                for (lane, row) in rows.chunks_exact_mut(head_dim).enumerate() {
                    row.iter_mut().zip(panel).for_each(|(x, sums)| *x = scale * sums[lane]);
                }
            }
        }
        Ok(())
    }

    /// Adds what the loaded queries give to a panel.
    fn add<T: Float>(
        &mut self,
        operands: &Operands<'_, T>,
        part: &Part<'_>,
        panel: usize,
        (dq, head): (&mut dq::Sums, usize),
    ) {
        let HeadDims { qk, v } = operands.problem.forward.head_dims;
        let Some(pairs) = self.pairs(operands, part, panel) else { return };
        let first = pairs.start - part.queries.start;
        let [p, ds] = [&self.p, &self.ds].map(|pairs_of| &pairs_of.panels()[..pairs.len()]);
        let panel = &mut self.panels[panel];
        for (sums, (rows, stride), pairs) in [
            (&mut panel.dk, (&self.q, row_stride(qk)), ds),
            (&mut panel.dv, (&self.d_o, row_stride(v)), p),
        ] {
            let left = Left::Columns { values: &rows[first * stride..], stride };
            multiply(sums.panels_mut(), left, pairs, Into::AddTo(&ONES));
        }
        let k = panel.k_rows.panels();
        dq.add(head, &pairs, self.ds.panels(), k, panel.keys.len());
    }

    /// Leaves the pairs of a panel and of those loaded queries that see some of it, which are
    /// returned, in `p` and `ds`.
    fn pairs<T: Float>(
        &mut self,
        operands: &Operands<'_, T>,
        &Part { sequence, head, queries, partial }: &Part<'_>,
        panel: usize,
    ) -> Option<Range<usize>> {
        let (forward, panel) = (&operands.problem.forward, &self.panels[panel]);
        let HeadDims { qk, v } = forward.head_dims;
        let [seqlen_q, seqlen_kv] = [sequence.seqlen_q, sequence.seqlen_kv];
        let attending = forward.scores.mask.attending(&panel.keys, seqlen_q, seqlen_kv);
        let within = attending.start.max(queries.start)..attending.end.min(queries.end);
        if within.is_empty() {
            return None;
        }
        // Whole rows of a product from a multiple of them on are within the step.
        let first = (within.start - queries.start) / ROWS * ROWS;
        let within = queries.start + first..within.end;
        let count = within.len();
        let [q, d_o] = [(&self.q, row_stride(qk)), (&self.d_o, row_stride(v))]
            .map(|(rows, stride)| (&rows[first * stride..], stride));
        let [p, ds] = [&mut self.p, &mut self.ds].map(Buffer::panels_mut);
        for (pairs, left, right, scale) in
            [(&mut *p, q, &panel.k, forward.scores.softmax_scale), (&mut *ds, d_o, &panel.v, 1.0)]
        {
            let left = Left::Rows { values: left.0, stride: left.1 };
            multiply(&mut pairs[..padded(count)], left, right.panels(), Into::Set(scale));
        }
        let (terms, keys) = (operands.terms.as_ref(), panel.keys.clone());
        let rows: Vec<usize> = keys.clone().collect();
        let words = words_of(partial, &rows, within.clone());
        vectorized(OfKeys {
            p: &mut p[..count],
            ds: &mut ds[..count],
            queries: &self.queries[first..],
            first: panel.keys.start,
            scores: &forward.scores,
            terms: self.terms.of_keys(terms, sequence, head, within.clone(), keys),
            capped: self.capped,
            words: words.as_deref(),
        });
        Some(within)
    }

    /// Gives each pair of the loaded queries and keys that is not masked, by query and key, and the
    /// gradient of its score.
    pub(super) fn each_pair<T: Float>(
        &mut self,
        operands: &Operands<'_, T>,
        part: &Part<'_>,
        mut add: impl FnMut([usize; 2], f32),
    ) {
        for panel in 0..self.panels.len() {
            let Some(pairs) = self.pairs(operands, part, panel) else { continue };
            for (query, ds) in pairs.zip(self.ds.panels()) {
                let keys = self.panels[panel].keys.clone();
                keys.zip(ds).for_each(|(key, ds)| add([query, key], *ds));
            }
        }
    }

    pub(super) fn load_queries<T: Float>(
        &mut self,
        operands: &Operands<'_, T>,
        sequence: &Sequence,
        head: usize,
        queries: &Range<usize>,
    ) {
        let (problem, forward) = (operands.problem, &operands.problem.forward);
        let HeadDims { qk, v } = forward.head_dims;
        let start = |strides| move |query| sequence.q_row(strides, head, query);
        load(&mut self.q, operands.q, queries.clone(), qk, start(forward.q));
        load(&mut self.d_o, operands.d_o, queries.clone(), v, start(problem.d_o));
        self.queries.clear();
        self.queries.extend(queries.clone().map(|query| {
            let statistics = operands.statistics(sequence, head, query);
            let lengths = [sequence.seqlen_q, sequence.seqlen_kv];
            let visible = match statistics[0] == f32::NEG_INFINITY {
                true => 0..0,
                false => forward.scores.mask.visible(query, lengths[0], lengths[1]),
            };
            Query { statistics, visible }
        }));
    }

    pub(super) fn load_keys<T: Float>(&mut self, operands: &Operands<'_, T>, task: &KeyRows) {
        let (forward, sequence) = (&operands.problem.forward, &task.sequence);
        let HeadDims { qk, v } = forward.head_dims;
        self.q.reserve(STEP * row_stride(qk));
        self.d_o.reserve(STEP * row_stride(v));
        self.p.reserve(STEP * LANES);
        self.ds.reserve(STEP * LANES);
        self.panels.resize_with(task.rows.len().div_ceil(LANES), || Panel {
            keys: 0..0,
            k: Buffer::new(qk * LANES),
            v: Buffer::new(v * LANES),
            k_rows: Buffer::default(),
            dk: Buffer::new(padded(qk) * LANES),
            dv: Buffer::new(padded(v) * LANES),
        });
        for (panel, first) in self.panels.iter_mut().zip(task.rows.clone().step_by(LANES)) {
            panel.keys = first..task.rows.end.min(first + LANES);
            panel.dk.fill(0.0);
            panel.dv.fill(0.0);
            for (lane, key) in panel.keys.clone().enumerate() {
                let start = sequence.kv_row(forward.k, task.head, key);
                load_lane(panel.k.panels_mut(), &operands.k[start..][..qk], lane);
                let start = sequence.kv_row(forward.v, task.head, key);
                load_lane(panel.v.panels_mut(), &operands.v[start..][..v], lane);
            }
        }
    }
}

impl Panel {
    /// Fills `k_rows` from `k`.
    fn load_rows(&mut self, head_dim: usize) {
        self.k_rows.reserve(head_dim.next_multiple_of(LANES) * LANES);
        let columns = self.k.panels().chunks(LANES);
        for (columns, rows) in columns.zip(self.k_rows.panels_mut().chunks_exact_mut(LANES)) {
            for (at, column) in columns.iter().enumerate() {
                rows.iter_mut().zip(column).for_each(|(row, x)| row[at] = *x);
            }
        }
    }
}
