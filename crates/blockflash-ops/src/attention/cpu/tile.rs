use super::sequence::{clip, load, steps, visited};
use super::{BLOCK_Q, Operands, Task};
use crate::Result;
use crate::attention::{AttentionProblem, ScoresProblem};
use crate::float::Float;
use crate::math;
use blockflash_safe::{View, ViewMut, host_gemm};
use blockflash_sys::HeadDims;
use std::ops::Range;

/// Keys per step, chosen so that scores, keys and values of a step stay in the L2 cache.
const BLOCK_KV: usize = 256;

/// The f32 panels of one thread: a block of queries and its running softmax.
pub(super) struct Tile {
    head_dims: HeadDims,
    /// `[rows, head_dims.qk]`
    q: Vec<f32>,
    /// `[keys, head_dims.qk]`
    k: Vec<f32>,
    /// `[keys, head_dims.v]`
    v: Vec<f32>,
    /// Scores and then probabilities, `[rows, keys]`.
    s: Vec<f32>,
    /// Sums of probability times value, `[rows, head_dims.v]`.
    o: Vec<f32>,
    /// Largest score of each row, −∞ before the first.
    max: Vec<f32>,
    /// Sum of probabilities of each row, relative to `max`.
    sum: Vec<f32>,
    rows: usize,
}

impl Tile {
    pub(super) fn new(problem: &AttentionProblem) -> Self {
        let AttentionProblem { head_dims, seqlen_q, seqlen_kv, .. } = *problem;
        let (rows, keys) = (BLOCK_Q.min(seqlen_q), BLOCK_KV.min(seqlen_kv));
        let panel = |rows: usize, columns: usize| vec![0.0; rows * columns];
        Self {
            head_dims,
            q: panel(rows, head_dims.qk),
            k: panel(keys, head_dims.qk),
            v: panel(keys, head_dims.v),
            s: panel(rows, keys),
            o: panel(rows, head_dims.v),
            max: panel(rows, 1),
            sum: panel(rows, 1),
            rows: 0,
        }
    }

    /// Output rows of the last task.
    pub(super) fn o(&self) -> &[f32] {
        &self.o[..self.rows * self.head_dims.v]
    }

    /// Log-sum-exp of each row of the last task.
    pub(super) fn lse(&self) -> &[f32] {
        &self.max[..self.rows]
    }

    /// Computes one block of queries.
    pub(super) fn compute<T: Float>(
        &mut self,
        operands: &Operands<'_, T>,
        task: &Task,
    ) -> Result<()> {
        let (problem, sequence) = (operands.problem, &task.sequence);
        self.rows = task.queries.len();
        self.max[..self.rows].fill(f32::NEG_INFINITY);
        self.sum[..self.rows].fill(0.0);
        self.o[..self.rows * self.head_dims.v].fill(0.0);
        let HeadDims { qk, v } = self.head_dims;
        load(&mut self.q, operands.q, task.queries.clone(), qk, |query| {
            sequence.q_row(problem.q, task.head, query)
        });

        let head_kv = task.head / (problem.num_heads_q / problem.num_heads_kv);
        let visible =
            |query| problem.scores.mask.visible(query, sequence.seqlen_q, sequence.seqlen_kv);
        // Both ends of the visible range are nondecreasing from query to query.
        let (first, last) = (visible(task.queries.start), visible(task.queries.end - 1));
        let visited = visited(
            operands.block_mask,
            problem,
            [sequence.entry, task.head],
            task.queries.start,
            sequence.seqlen_kv,
        )?;
        for keys in steps(visited, first.start..last.end, BLOCK_KV) {
            load(&mut self.k, operands.k, keys.clone(), qk, |key| {
                sequence.kv_row(problem.k, head_kv, key)
            });
            load(&mut self.v, operands.v, keys.clone(), v, |key| {
                sequence.kv_row(problem.v, head_kv, key)
            });
            let masked = last.start > keys.start || first.end < keys.end;
            let in_step = |row: usize| match masked {
                true => clip(visible(task.queries.start + row), &keys),
                false => 0..keys.len(),
            };
            self.scores(keys.len(), problem.scores.softmax_scale)?;
            self.softmax(keys.len(), &problem.scores, in_step);
            self.accumulate(keys.len(), masked, in_step)?;
        }
        self.finish(operands.sink.map(|sink| sink[task.head]));
        Ok(())
    }

    /// `s = scale·q·kᵀ`. Scores of masked pairs are computed too, and never read.
    fn scores(&mut self, keys: usize, scale: f32) -> Result<()> {
        let (rows, head_dim) = (self.rows, self.head_dims.qk);
        let q = View::from_slice(&self.q[..rows * head_dim], &[rows, head_dim])?;
        let k_t = View::from_slice_strided(&self.k, &[head_dim, keys], &[1, head_dim])?;
        let s = ViewMut::from_slice(&mut self.s[..rows * keys], &[rows, keys])?;
        Ok(host_gemm(scale, q, k_t, false, s)?)
    }

    /// Turns scores into probabilities relative to the rows' new maxima. Masked pairs become 0.
    fn softmax(
        &mut self,
        keys: usize,
        scores: &ScoresProblem,
        in_step: impl Fn(usize) -> Range<usize>,
    ) {
        for row in 0..self.rows {
            let s = &mut self.s[row * keys..][..keys];
            let visible = in_step(row);
            s[..visible.start].fill(0.0);
            s[visible.end..].fill(0.0);
            let s = &mut s[visible];
            if s.is_empty() {
                continue;
            }
            scores.cap(s);
            let max = math::max(s).max(self.max[row]);
            let shift = shift(max);
            let shrink = math::exp(self.max[row] - shift);
            self.max[row] = max;
            self.sum[row] = self.sum[row] * shrink + math::exp_sum(s, shift);
            if shrink != 1.0 {
                let head_dim = self.head_dims.v;
                let o = &mut self.o[row * head_dim..][..head_dim];
                o.iter_mut().for_each(|o| *o *= shrink);
            }
        }
    }

    /// `o += s·v`. A masked pair must contribute nothing, but 0·NaN and 0·∞ are NaN. Where pairs
    /// are masked, values with such elements are therefore taken out of the product and added only
    /// to the rows that attend them.
    fn accumulate(
        &mut self,
        keys: usize,
        masked: bool,
        in_step: impl Fn(usize) -> Range<usize>,
    ) -> Result<()> {
        let (rows, head_dim) = (self.rows, self.head_dims.v);
        let panel = &mut self.v[..keys * head_dim];
        let mut taken_out: Vec<(usize, Vec<f32>)> = Vec::new();
        if masked && math::any_non_finite(panel) {
            for (key, v) in panel.chunks_exact_mut(head_dim).enumerate() {
                if math::any_non_finite(v) {
                    taken_out.push((key, v.to_vec()));
                    v.fill(0.0);
                }
            }
        }
        let s = View::from_slice(&self.s[..rows * keys], &[rows, keys])?;
        let v = View::from_slice(&self.v[..keys * head_dim], &[keys, head_dim])?;
        let o = ViewMut::from_slice(&mut self.o[..rows * head_dim], &[rows, head_dim])?;
        host_gemm(1.0, s, v, true, o)?;
        for (key, v) in taken_out {
            for row in (0..rows).filter(|&row| in_step(row).contains(&key)) {
                let (p, o) = (self.s[row * keys + key], &mut self.o[row * head_dim..][..head_dim]);
                o.iter_mut().zip(&v).for_each(|(o, v)| *o += p * v);
            }
        }
        Ok(())
    }

    /// Divides by the sums and turns `max` into the log-sum-exp. A sink is one more score that has
    /// no value.
    fn finish(&mut self, sink: Option<f32>) {
        let head_dim = self.head_dims.v;
        for (row, o) in self.o[..self.rows * head_dim].chunks_exact_mut(head_dim).enumerate() {
            let sink = sink.unwrap_or(f32::NEG_INFINITY);
            let max = if sink > self.max[row] { sink } else { self.max[row] };
            let shift = shift(max);
            let shrink = math::exp(self.max[row] - shift);
            let sum = self.sum[row] * shrink + math::exp(sink - shift);
            if sum == 0.0 {
                // No key was attended, or only keys with a score of −∞.
                o.fill(0.0);
                self.max[row] = f32::NEG_INFINITY;
            } else {
                o.iter_mut().for_each(|o| *o = *o * shrink / sum);
                self.max[row] = shift + sum.ln();
            }
        }
    }
}

/// The shift of scores: their maximum, or 0 while it is −∞, since −∞ − (−∞) is NaN.
fn shift(max: f32) -> f32 {
    if max == f32::NEG_INFINITY { 0.0 } else { max }
}
