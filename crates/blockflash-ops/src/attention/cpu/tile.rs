use super::Operands;
use super::few::{self, Few};
use super::sequence::{
    PartialBlock, QueryRows, Visited, load, load_lane, row_stride, steps, visited,
};
use super::softmax::{Running, Softmax, finish};
use super::terms::PanelTerms;
use super::visible::{Visible, Visit};
use crate::Result;
use crate::attention::AttentionProblem;
use crate::float::Float;
use crate::math;
use crate::panels::{Buffer, Into, LANES, Lanes, Left, multiply, padded, vectorized};
use blockflash_sys::HeadDims;
use pulp::{Simd, WithSimd};

/// Keys per step, chosen so that the scores of a panel stay in the L1 cache, keys and values of a
/// step in the L2 cache.
const STEP: usize = 128;

/// The f32 operands of one thread: a block of rows of queries, which are the lanes of panels, and
/// their running softmax.
pub(super) struct Tile {
    head_dims: HeadDims,
    /// `[keys, head_dims.qk]`
    k: Buffer,
    /// `[keys, head_dims.v]`
    v: Buffer,
    /// Scores and then probabilities of a panel, a row for each key.
    s: Buffer,
    terms: PanelTerms,
    panels: Vec<Panel>,
    few: Few,
    o: Vec<f32>,
    lse: Vec<f32>,
}

/// Some rows of queries.
struct Panel {
    /// A row for each of `head_dims.qk`.
    q: Buffer,
    /// Sums of probability times value, a row for each of `head_dims.v`.
    o: Buffer,
    running: Running,
    visible: Visible,
    /// What the scores of each row are multiplied with, if it is not the same for all.
    factors: Option<Lanes>,
}

impl Tile {
    pub(super) fn new(problem: &AttentionProblem) -> Self {
        Self {
            head_dims: problem.head_dims,
            k: Buffer::default(),
            v: Buffer::default(),
            s: Buffer::default(),
            terms: PanelTerms::default(),
            panels: Vec::new(),
            few: Few::default(),
            o: Vec::new(),
            lse: Vec::new(),
        }
    }

    /// Output rows of the last tasks.
    pub(super) fn o(&self) -> &[f32] {
        &self.o
    }

    /// Log-sum-exp of each row of the last tasks.
    pub(super) fn lse(&self) -> &[f32] {
        &self.lse
    }

    /// Computes one block of rows, or few rows of several heads: a group of [`few::groups`].
    pub(super) fn compute<T: Float>(
        &mut self,
        operands: &Operands<'_, T>,
        tasks: &[QueryRows],
    ) -> Result<()> {
        let [task] = tasks else {
            return self.few.compute(operands, tasks, &mut self.o, &mut self.lse);
        };
        if few::are_few(operands.problem, task) {
            return self.few.compute(operands, tasks, &mut self.o, &mut self.lse);
        }
        let (problem, sequence) = (operands.problem, &task.sequence);
        let HeadDims { qk, v } = self.head_dims;
        let [head, first_query] = task.at(task.rows.start);
        let head_kv = head / (problem.num_heads_q / problem.num_heads_kv);
        let at = [sequence.entry, head];
        let Visited { ranges, partial } =
            visited(operands.block_mask, problem, at, first_query, sequence.seqlen_kv)?;
        self.k.reserve(STEP * row_stride(qk));
        self.v.reserve(STEP * row_stride(v));
        self.s.reserve(STEP * LANES);
        self.load_queries(operands, task);
        let within = Visible::ends(self.panels.iter().map(|panel| &panel.visible));
        for keys in steps(ranges, within, STEP) {
            let start = |strides| move |key| sequence.kv_row(strides, head_kv, key);
            load(&mut self.k, operands.k, keys.clone(), qk, start(problem.k));
            load(&mut self.v, operands.v, keys.clone(), v, start(problem.v));
            let taken_out = take_out(&mut self.v[..keys.len() * row_stride(v)], row_stride(v));
            for (panel, first) in self.panels.iter_mut().zip(task.rows.clone().step_by(LANES)) {
                if let Some(visit) = panel.visible.of(&keys, &partial, |_| false) {
                    let added = keys.start + visit.keys.start..keys.start + visit.keys.end;
                    let rows = first..task.rows.end;
                    let terms = self.terms.of_rows(operands.terms.as_ref(), task, rows, added);
                    panel.attend([&self.k, &self.v], &visit, terms, &mut self.s, problem);
                }
                for (key, v) in &taken_out {
                    panel.add(keys.start + key, &partial, &self.s.panels()[*key], v);
                }
            }
        }
        self.finish(operands, task);
        Ok(())
    }

    fn load_queries<T: Float>(&mut self, operands: &Operands<'_, T>, task: &QueryRows) {
        let (problem, sequence, HeadDims { qk, v }) =
            (operands.problem, &task.sequence, self.head_dims);
        self.panels.resize_with(task.rows.len().div_ceil(LANES), || Panel::new(self.head_dims));
        for (panel, first) in self.panels.iter_mut().zip(task.rows.clone().step_by(LANES)) {
            let rows = first..task.rows.end.min(first + LANES);
            panel.running = Running::START;
            panel.o[..padded(v) * LANES].fill(0.0);
            panel.visible.set(problem, task, rows.clone());
            panel.factors = problem.scales.is_some().then_some([0.0; LANES]);
            for (lane, row) in rows.enumerate() {
                let [head, query] = task.at(row);
                let start = sequence.q_row(problem.q, head, query);
                load_lane(panel.q.panels_mut(), &operands.q[start..][..qk], lane);
                if let Some(factors) = &mut panel.factors {
                    factors[lane] = operands.factor(sequence, head);
                }
            }
        }
    }

    /// Turns sums into outputs.
    fn finish<T: Float>(&mut self, operands: &Operands<'_, T>, task: &QueryRows) {
        let head_dim = self.head_dims.v;
        self.o.resize(task.rows.len() * head_dim, 0.0);
        self.lse.clear();
        let mut rows = task.rows.clone().zip(self.o.chunks_exact_mut(head_dim));
        for panel in &self.panels {
            for (lane, (row, o)) in rows.by_ref().take(LANES).enumerate() {
                let [head, _] = task.at(row);
                o.iter_mut().zip(panel.o.panels()).for_each(|(o, sums)| *o = sums[lane]);
                let Running { max, sum } = &panel.running;
                let score = operands.without_value(head);
                let factor = operands.scales.of_values(task.sequence.entry, head);
                self.lse.push(finish([max[lane], sum[lane]], score, factor, o));
            }
        }
    }
}

impl Panel {
    fn new(head_dims: HeadDims) -> Self {
        Self {
            q: Buffer::new(head_dims.qk * LANES),
            o: Buffer::new(padded(head_dims.v) * LANES),
            running: Running::START,
            visible: Visible::default(),
            factors: None,
        }
    }

    /// Attends to keys of a step, whose probabilities stay in `s`.
    fn attend(
        &mut self,
        [k, v]: [&[f32]; 2],
        visit: &Visit,
        terms: Option<&[Lanes]>,
        s: &mut Buffer,
        problem: &AttentionProblem,
    ) {
        let (first, count) = (visit.keys.start, visit.keys.len());
        let s = &mut s.panels_mut()[first..];
        let HeadDims { qk, v: head_dim } = problem.head_dims;
        let [k, v] = [(k, qk), (v, head_dim)]
            .map(|(rows, head_dim)| (&rows[first * row_stride(head_dim)..], row_stride(head_dim)));
        let left = Left::Rows { values: k.0, stride: k.1 };
        let scale = if self.factors.is_some() { 1.0 } else { problem.scores.softmax_scale };
        multiply(&mut s[..padded(count)], left, &self.q.panels()[..qk], Into::Set(scale));
        let scores = &mut s[..count];
        let softmax = Softmax {
            s: &mut *scores,
            running: &mut self.running,
            scores: &problem.scores,
            factors: self.factors.as_ref(),
            terms,
            seen: visit.seen.as_ref(),
        };
        let shrink = vectorized(softmax);
        let left = Left::Columns { values: v.0, stride: v.1 };
        multiply(self.o.panels_mut(), left, scores, Into::AddTo(&shrink));
    }

    /// Adds a value to the rows that see its key.
    fn add(&mut self, key: usize, partial: &[PartialBlock], p: &Lanes, v: &[f32]) {
        for lane in self.visible.seeing(key, partial) {
            for (o, v) in self.o.panels_mut().iter_mut().zip(v) {
                o[lane] += p[lane] * v;
            }
        }
    }
}

/// A masked pair must contribute nothing, but 0·NaN and 0·∞ are NaN. Values with such elements are
/// therefore taken out, to be added only to the rows that see them.
fn take_out(values: &mut [f32], stride: usize) -> Vec<(usize, Vec<f32>)> {
    let mut taken_out = Vec::new();
    if vectorized(AnyNonFinite(values)) {
        for (key, v) in values.chunks_exact_mut(stride).enumerate() {
            if math::any_non_finite(v) {
                taken_out.push((key, v.to_vec()));
                v.fill(0.0);
            }
        }
    }
    taken_out
}

struct AnyNonFinite<'a>(&'a [f32]);

impl WithSimd for AnyNonFinite<'_> {
    type Output = bool;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> bool {
        math::any_non_finite(self.0)
    }
}
