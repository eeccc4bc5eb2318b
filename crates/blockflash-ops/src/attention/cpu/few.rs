//! Attention of few queries to many keys, as in decoding: rows of queries are too few to be lanes,
//! so elements of heads are, and f32 keys and values are read where they are.

use super::Operands;
use super::sequence::{QueryRows, clip, load, row_stride, steps, visited};
use super::softmax::{add as add_terms, finish, shift};
use crate::Result;
use crate::attention::{ScoresProblem, Strides};
use crate::float::Float;
use crate::math;
use crate::panels::vectorized;
use blockflash_sys::HeadDims;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Rows up to which elements of heads are the lanes.
pub(super) const MOST: usize = 8;

/// Keys per step: their scores stay in the L1 cache.
const STEP: usize = 256;

/// Rows that share the elements of a key while they are in registers.
const TOGETHER: usize = 4;

/// Vectors of a value that are summed at a time.
const VECTORS: usize = 2;

/// The same of a row that is alone: mostly whole values, so each is visited once.
const VECTORS_ALONE: usize = 8;

/// The f32 operands of one thread.
#[derive(Default)]
pub(super) struct Few {
    /// `[rows, head_dims.qk]`
    q: Vec<f32>,
    /// Scores and then probabilities of some rows, `[rows, STEP]`.
    s: Vec<f32>,
    /// What is added to these scores.
    terms: Vec<f32>,
    running: Vec<Running>,
    /// What the scores of each row are multiplied with.
    factors: Vec<f32>,
    /// Converted keys and values of a step.
    converted: [Vec<f32>; 2],
}

/// The running softmax of a row.
#[derive(Clone, Copy)]
struct Running {
    max: f32,
    sum: f32,
}

impl Few {
    /// Computes a block of rows: outputs `[rows, head_dims.v]` and the log-sum-exp of each row.
    pub(super) fn compute<T: Float>(
        &mut self,
        operands: &Operands<'_, T>,
        task: &QueryRows,
        o: &mut Vec<f32>,
        lse: &mut Vec<f32>,
    ) -> Result<()> {
        let (problem, sequence, rows) = (operands.problem, &task.sequence, task.rows.len());
        let HeadDims { qk, v: v_dim } = problem.head_dims;
        o.clear();
        o.resize(rows * v_dim, 0.0);
        self.q.resize(rows * qk, 0.0);
        self.s.resize(rows * STEP, 0.0);
        self.factors.clear();
        self.running.clear();
        self.running.resize(rows, Running { max: f32::NEG_INFINITY, sum: 0.0 });
        let mut visible = Vec::with_capacity(rows);
        for (q, row) in self.q.chunks_exact_mut(qk).zip(task.rows.clone()) {
            let [head, query] = task.at(row);
            T::widen(&operands.q[sequence.q_row(problem.q, head, query)..][..qk], q);
            self.factors.push(operands.factor(sequence, head));
            let lengths = [sequence.seqlen_q, sequence.seqlen_kv];
            visible.push(problem.scores.mask.visible(query, lengths[0], lengths[1]));
        }
        let [head, first_query] = task.at(task.rows.start);
        let head_kv = head / (problem.num_heads_q / problem.num_heads_kv);
        let at = [sequence.entry, head];
        let visited = visited(operands.block_mask, problem, at, first_query, sequence.seqlen_kv)?;
        let within = visible[0].start..visible[rows - 1].end;
        let [converted_k, converted_v] = &mut self.converted;
        for keys in steps(visited.ranges, within, STEP) {
            let first_key = |strides| sequence.kv_row(strides, head_kv, keys.start);
            let [k, v] = [
                (operands.k, problem.k, qk, &mut *converted_k),
                (operands.v, problem.v, v_dim, &mut *converted_v),
            ]
            .map(|(source, strides, head_dim, buffer)| {
                Keys::of(&source[first_key(strides)..], strides, head_dim, keys.len(), buffer)
            });
            let mut first = 0;
            // Rows that see the same keys of the step go together, so no pair is masked.
            while first < rows {
                let seen = clip(visible[first].clone(), &keys);
                let same = |row: &usize| clip(visible[*row].clone(), &keys) == seen;
                let end = (first + 1..rows).take_while(same).count() + first + 1;
                if let Some(terms) = &operands.terms {
                    self.terms.resize(rows * STEP, 0.0);
                    let added = keys.start + seen.start..keys.start + seen.end;
                    for (row, row_terms) in (first..end).zip(self.terms.chunks_exact_mut(STEP)) {
                        let row_terms = &mut row_terms[..seen.len()];
                        let at = task.at(task.rows.start + row);
                        terms.load(sequence, at, added.clone(), row_terms);
                    }
                }
                vectorized(Attend {
                    keys: seen,
                    q: &self.q[first * qk..end * qk],
                    k,
                    v,
                    s: &mut self.s,
                    terms: &self.terms,
                    o: &mut o[first * v_dim..end * v_dim],
                    running: &mut self.running[first..end],
                    factors: &self.factors[first..end],
                    scores: &problem.scores,
                });
                first = end;
            }
        }
        lse.clear();
        for (row, (o, running)) in
            task.rows.clone().zip(o.chunks_exact_mut(v_dim).zip(&self.running))
        {
            let [head, _] = task.at(row);
            let factor = operands.scales.of_values(sequence.entry, head);
            let sums = [running.max, running.sum];
            lse.push(finish(sums, operands.without_value(head), factor, o));
        }
        Ok(())
    }
}

/// Rows of keys or values in f32.
#[derive(Clone, Copy)]
struct Keys<'a> {
    elements: &'a [f32],
    stride: usize,
    head_dim: usize,
}

impl<'a> Keys<'a> {
    /// The first rows of `source`, where they are or converted.
    fn of<T: Float>(
        source: &'a [T],
        strides: Strides,
        head_dim: usize,
        count: usize,
        buffer: &'a mut Vec<f32>,
    ) -> Self {
        if let Some(elements) = T::as_f32(source) {
            return Self { elements, stride: strides.seq, head_dim };
        }
        let stride = row_stride(head_dim);
        buffer.resize(count * stride, 0.0);
        load(buffer, source, 0..count, head_dim, |key| key * strides.seq);
        Self { elements: buffer, stride, head_dim }
    }

    #[inline(always)]
    fn row(&self, key: usize) -> &'a [f32] {
        &self.elements[key * self.stride..][..self.head_dim]
    }
}

/// Some rows and the keys of a step that all of them see.
struct Attend<'a> {
    keys: Range<usize>,
    q: &'a [f32],
    k: Keys<'a>,
    v: Keys<'a>,
    s: &'a mut [f32],
    /// Nothing, or a row of [`STEP`] for each of the rows.
    terms: &'a [f32],
    o: &'a mut [f32],
    running: &'a mut [Running],
    factors: &'a [f32],
    scores: &'a ScoresProblem,
}

impl WithSimd for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let mut first = 0;
        while first < self.running.len() {
            if self.running.len() - first >= TOGETHER {
                self.rows::<S, TOGETHER>(simd, first);
                first += TOGETHER;
            } else {
                self.rows::<S, 1>(simd, first);
                first += 1;
            }
        }
    }
}

impl Attend<'_> {
    /// Computes `M` rows.
    #[inline(always)]
    fn rows<S: Simd, const M: usize>(&mut self, simd: S, first: usize) {
        let (qk, head_dim) = (self.k.head_dim, self.v.head_dim);
        let q = &self.q[first * qk..][..M * qk];
        for (at, key) in self.keys.clone().enumerate() {
            let (k, k_rest) = S::as_simd_f32s(self.k.row(key));
            for row in 0..M {
                let (q, q_rest) = S::as_simd_f32s(&q[row * qk..][..qk]);
                let mut sum = simd.splat_f32s(0.0);
                for (q, k) in q.iter().zip(k) {
                    sum = simd.mul_add_e_f32s(*q, *k, sum);
                }
                if !k_rest.is_empty() {
                    let (q, k) = (simd.partial_load_f32s(q_rest), simd.partial_load_f32s(k_rest));
                    sum = simd.mul_add_e_f32s(q, k, sum);
                }
                self.s[row * STEP + at] = self.factors[first + row] * simd.reduce_sum_f32s(sum);
            }
        }
        let mut shrink = [0.0; M];
        for (row, shrink) in shrink.iter_mut().enumerate() {
            let s = &mut self.s[row * STEP..][..self.keys.len()];
            let running = &mut self.running[first + row];
            self.scores.cap(s);
            if let Some(terms) = self.terms.chunks_exact(STEP).nth(first + row) {
                add_terms(s, terms);
            }
            let max = math::max(s);
            let max = if max > running.max { max } else { running.max };
            let shift = shift(max);
            *shrink = math::exp(running.max - shift);
            running.max = max;
            running.sum = running.sum * *shrink + math::exp_sum(s, shift);
        }
        let o = &mut self.o[first * head_dim..][..M * head_dim];
        let (p, keys, lanes) = (&*self.s, &self.keys, S::F32_LANES);
        let mut column = 0;
        while M == 1 && column + VECTORS_ALONE * lanes <= head_dim {
            add::<S, M, VECTORS_ALONE>(simd, p, keys, &self.v, column, o, &shrink);
            column += VECTORS_ALONE * lanes;
        }
        while column + VECTORS * lanes <= head_dim {
            add::<S, M, VECTORS>(simd, p, keys, &self.v, column, o, &shrink);
            column += VECTORS * lanes;
        }
        while column < head_dim {
            add::<S, M, 1>(simd, p, keys, &self.v, column, o, &shrink);
            column += lanes;
        }
    }
}

/// `o = shrink·o + p·v` for `N` vectors of columns, the last of which may be a part of one.
#[inline(always)]
fn add<S: Simd, const M: usize, const N: usize>(
    simd: S,
    p: &[f32],
    keys: &Range<usize>,
    v: &Keys<'_>,
    column: usize,
    o: &mut [f32],
    shrink: &[f32; M],
) {
    let lanes = S::F32_LANES;
    let columns = column..(column + N * lanes).min(v.head_dim);
    let p: [&[f32]; M] = std::array::from_fn(|row| &p[row * STEP..][..keys.len()]);
    let mut sums = [[simd.splat_f32s(0.0); N]; M];
    for (at, key) in keys.clone().enumerate() {
        let v = load_vectors::<S, N>(simd, &v.row(key)[columns.clone()]);
        for row in 0..M {
            let p = simd.splat_f32s(p[row][at]);
            for vector in 0..N {
                sums[row][vector] = simd.mul_add_e_f32s(p, v[vector], sums[row][vector]);
            }
        }
    }
    for row in 0..M {
        let o = &mut o[row * v.head_dim..][columns.clone()];
        let old = load_vectors::<S, N>(simd, o);
        let factor = simd.splat_f32s(shrink[row]);
        for (vector, o) in o.chunks_mut(lanes).enumerate() {
            let sum = simd.mul_add_e_f32s(old[vector], factor, sums[row][vector]);
            simd.partial_store_f32s(o, sum);
        }
    }
}

/// `N` vectors, where only one may be a part of a vector.
#[inline(always)]
fn load_vectors<S: Simd, const N: usize>(simd: S, row: &[f32]) -> [S::f32s; N] {
    let mut vectors = [simd.splat_f32s(0.0); N];
    if N == 1 {
        vectors[0] = simd.partial_load_f32s(row);
    } else {
        let (whole, _) = S::as_simd_f32s(row);
        vectors.copy_from_slice(&whole[..N]);
    }
    vectors
}
