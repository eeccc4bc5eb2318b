//! `dq` of a block of rows of queries, which are the lanes of panels.

use super::Operands;
use super::pairs::OfRows;
use crate::Result;
use crate::attention::cpu::sequence::{
    QueryRows, Visited, load, load_lane, row_stride, steps, visited,
};
use crate::attention::cpu::terms::PanelTerms;
use crate::attention::cpu::visible::Visible;
use crate::float::Float;
use crate::panels::{Buffer, Into, LANES, Lanes, Left, ONES, multiply, padded, vectorized};
use blockflash_sys::HeadDims;

/// Keys per step, chosen so that the pairs of a panel stay in the L1 cache, keys and values of a
/// step in the L2 cache.
const STEP: usize = 128;

/// The f32 operands of one thread.
#[derive(Default)]
pub(super) struct Tile {
    /// `[keys, head_dims.qk]`
    k: Buffer,
    /// `[keys, head_dims.v]`
    v: Buffer,
    /// Scores and then probabilities of a panel, a row for each key.
    p: Buffer,
    /// `d_o · v` and then the gradients of `q · k · scale`, a row for each key.
    ds: Buffer,
    terms: PanelTerms,
    panels: Vec<Panel>,
}

/// Some rows of queries.
struct Panel {
    /// A row for each of `head_dims.qk`.
    q: Buffer,
    /// A row for each of `head_dims.v`.
    d_o: Buffer,
    /// A row for each of `head_dims.qk`.
    dq: Buffer,
    lse: Lanes,
    delta: Lanes,
    visible: Visible,
}

impl Tile {
    /// Computes the gradients of some rows, `[rows, head_dims.qk]`.
    pub(super) fn compute<T: Float>(
        &mut self,
        operands: &Operands<'_, T>,
        task: &QueryRows,
        dq: &mut Vec<f32>,
    ) -> Result<()> {
        let (forward, sequence) = (&operands.problem.forward, &task.sequence);
        let HeadDims { qk, v } = forward.head_dims;
        self.k.reserve(STEP * row_stride(qk));
        self.v.reserve(STEP * row_stride(v));
        self.p.reserve(STEP * LANES);
        self.ds.reserve(STEP * LANES);
        self.load_queries(operands, task);
        let [head, first_query] = task.at(task.rows.start);
        let head_kv = head / (forward.num_heads_q / forward.num_heads_kv);
        let at = [sequence.entry, head];
        let Visited { ranges, partial } =
            visited(operands.block_mask, forward, at, first_query, sequence.seqlen_kv)?;
        let within = Visible::ends(self.panels.iter().map(|panel| &panel.visible));
        for keys in steps(ranges, within, STEP) {
            let start = |strides| move |key| sequence.kv_row(strides, head_kv, key);
            load(&mut self.k, operands.k, keys.clone(), qk, start(forward.k));
            load(&mut self.v, operands.v, keys.clone(), v, start(forward.v));
            for (panel, row) in self.panels.iter_mut().zip(task.rows.clone().step_by(LANES)) {
                let nothing = |lane: usize| panel.lse[lane] == f32::NEG_INFINITY;
                let Some(visit) = panel.visible.of(&keys, &partial, nothing) else { continue };
                let (first, count) = (visit.keys.start, visit.keys.len());
                let [k, v] = [(&self.k, row_stride(qk)), (&self.v, row_stride(v))]
                    .map(|(rows, stride)| (&rows[first * stride..], stride));
                let [p, ds] = [&mut self.p, &mut self.ds].map(Buffer::panels_mut);
                for (pairs, left, right, scale) in [
                    (&mut *p, k, &panel.q, forward.scores.softmax_scale),
                    (&mut *ds, v, &panel.d_o, 1.0),
                ] {
                    let left = Left::Rows { values: left.0, stride: left.1 };
                    multiply(&mut pairs[..padded(count)], left, right.panels(), Into::Set(scale));
                }
                let added = keys.start + visit.keys.start..keys.start + visit.keys.end;
                let rows = row..task.rows.end;
                vectorized(OfRows {
                    p: &mut p[..count],
                    ds: &mut ds[..count],
                    lse: &panel.lse,
                    delta: &panel.delta,
                    scores: &forward.scores,
                    terms: self.terms.of_rows(operands.terms.as_ref(), task, rows, added),
                    seen: visit.seen.as_ref(),
                });
                let left = Left::Columns { values: k.0, stride: k.1 };
                multiply(panel.dq.panels_mut(), left, &ds[..count], Into::AddTo(&ONES));
            }
        }
        dq.resize(task.rows.len() * qk, 0.0);
        let rows = dq.chunks_mut(LANES * qk).zip(&self.panels);
        for (rows, panel) in rows {
            for (lane, dq) in rows.chunks_exact_mut(qk).enumerate() {
                for (dq, sums) in dq.iter_mut().zip(panel.dq.panels()) {
                    *dq = forward.scores.softmax_scale * sums[lane];
                }
            }
        }
        Ok(())
    }

    fn load_queries<T: Float>(&mut self, operands: &Operands<'_, T>, task: &QueryRows) {
        let (problem, sequence) = (operands.problem, &task.sequence);
        let HeadDims { qk, v } = problem.forward.head_dims;
        self.panels.resize_with(task.rows.len().div_ceil(LANES), || Panel {
            q: Buffer::new(qk * LANES),
            d_o: Buffer::new(v * LANES),
            dq: Buffer::new(padded(qk) * LANES),
            lse: [0.0; LANES],
            delta: [0.0; LANES],
            visible: Visible::default(),
        });
        for (panel, first) in self.panels.iter_mut().zip(task.rows.clone().step_by(LANES)) {
            let rows = first..task.rows.end.min(first + LANES);
            panel.dq.fill(0.0);
            panel.visible.set(&problem.forward, task, rows.clone());
            for (lane, row) in rows.enumerate() {
                let [head, query] = task.at(row);
                let start = sequence.q_row(problem.forward.q, head, query);
                load_lane(panel.q.panels_mut(), &operands.q[start..][..qk], lane);
                let start = sequence.q_row(problem.d_o, head, query);
                load_lane(panel.d_o.panels_mut(), &operands.d_o[start..][..v], lane);
                [panel.lse[lane], panel.delta[lane]] = operands.statistics(sequence, head, query);
            }
        }
    }
}
