//! What is computed of few rows, in vectors along the elements of heads.

use super::{Running, STEP};
use crate::attention::cpu::sequence::{load, row_stride};
use crate::attention::cpu::softmax::{add as add_terms, shift};
use crate::attention::{ScoresProblem, Strides};
use crate::float::Float;
use crate::math;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Rows that share the elements of a key while they are in registers.
const TOGETHER: usize = 4;

/// Vectors of a value that are summed at a time.
const VECTORS: usize = 2;

/// The same of a row that is alone: mostly whole values, so each is visited once.
const VECTORS_ALONE: usize = 8;

/// Rows of keys or values in f32.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    pub(super) elements: &'a [f32],
    pub(super) stride: usize,
    pub(super) count: usize,
    pub(super) head_dim: usize,
}

impl<'a> Keys<'a> {
    /// The first rows of `source`, where they are or converted.
    pub(super) fn of<T: Float>(
        source: &'a [T],
        strides: Strides,
        head_dim: usize,
        count: usize,
        buffer: &'a mut Vec<f32>,
    ) -> Self {
        if let Some(elements) = T::as_f32(source) {
            return Self { elements, stride: strides.seq, count, head_dim };
        }
        let stride = row_stride(head_dim);
        buffer.resize(count * stride, 0.0);
        load(buffer, source, 0..count, head_dim, |key| key * strides.seq);
        Self { elements: buffer, stride, count, head_dim }
    }

    #[inline(always)]
    fn row(&self, key: usize) -> &'a [f32] {
        &self.elements[key * self.stride..][..self.head_dim]
    }
}

/// Scores of some rows at the keys of a part, which are the `first` of a step and those after it.
pub(super) struct Scores<'a> {
    pub(super) q: &'a [f32],
    pub(super) k: Keys<'a>,
    pub(super) s: &'a mut [f32],
    pub(super) first: usize,
    /// What the scores of each row are multiplied with.
    pub(super) factors: &'a [f32],
}

impl WithSimd for Scores<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let rows = self.q.len() / self.k.head_dim;
        let together = rows / TOGETHER * TOGETHER;
        for row in (0..together).step_by(TOGETHER) {
            self.rows::<S, TOGETHER>(simd, row);
        }
        for row in together..rows {
            self.rows::<S, 1>(simd, row);
        }
    }
}

impl Scores<'_> {
    /// Computes `M` rows.
    #[inline(always)]
    fn rows<S: Simd, const M: usize>(&mut self, simd: S, first_row: usize) {
        let qk = self.k.head_dim;
        let q = &self.q[first_row * qk..][..M * qk];
        for key in 0..self.k.count {
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
                let score = self.factors[first_row + row] * simd.reduce_sum_f32s(sum);
                self.s[(first_row + row) * STEP + self.first + key] = score;
            }
        }
    }
}

/// Turns the scores of a row into probabilities relative to the new maximum.
pub(super) struct Softmax<'a> {
    pub(super) s: &'a mut [f32],
    pub(super) terms: Option<&'a [f32]>,
    pub(super) running: &'a mut Running,
    pub(super) scores: &'a ScoresProblem,
}

impl WithSimd for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { s, terms, running, scores } = self;
        scores.cap(s);
        if let Some(terms) = terms {
            add_terms(s, terms);
        }
        let max = math::max(s);
        let max = if max > running.max { max } else { running.max };
        let shift = shift(max);
        let shrink = math::exp(running.max - shift);
        let sum = running.sum * shrink + math::exp_sum(s, shift);
        *running = Running { max, sum, shrink };
    }
}

/// Adds the values of a part times the probabilities of some rows to the sums of these.
pub(super) struct Add<'a> {
    pub(super) p: &'a [f32],
    pub(super) v: Keys<'a>,
    pub(super) sums: &'a mut [f32],
    pub(super) first: usize,
}

impl WithSimd for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let rows = self.sums.len() / self.v.head_dim;
        let together = rows / TOGETHER * TOGETHER;
        for row in (0..together).step_by(TOGETHER) {
            let column = self.columns::<S, TOGETHER, VECTORS>(simd, row, 0);
            self.columns::<S, TOGETHER, 1>(simd, row, column);
        }
        for row in together..rows {
            let column = self.columns::<S, 1, VECTORS_ALONE>(simd, row, 0);
            let column = self.columns::<S, 1, VECTORS>(simd, row, column);
            self.columns::<S, 1, 1>(simd, row, column);
        }
    }
}

impl Add<'_> {
    /// Computes `N` vectors of `M` rows at a time, up to the column that is returned. One vector
    /// may be a part of one.
    #[inline(always)]
    fn columns<S: Simd, const M: usize, const N: usize>(
        &mut self,
        simd: S,
        row: usize,
        mut column: usize,
    ) -> usize {
        let (head_dim, width) = (self.v.head_dim, N * S::F32_LANES);
        while column + width <= head_dim || N == 1 && column < head_dim {
            self.tile::<S, M, N>(simd, row, column..(column + width).min(head_dim));
            column += width;
        }
        column
    }

    #[inline(always)]
    fn tile<S: Simd, const M: usize, const N: usize>(
        &mut self,
        simd: S,
        first_row: usize,
        columns: Range<usize>,
    ) {
        let head_dim = self.v.head_dim;
        let p: [&[f32]; M] = std::array::from_fn(|row| {
            &self.p[(first_row + row) * STEP + self.first..][..self.v.count]
        });
        let mut sums = [[simd.splat_f32s(0.0); N]; M];
        for (row, sums) in sums.iter_mut().enumerate() {
            let old = &self.sums[(first_row + row) * head_dim..][columns.clone()];
            *sums = load_vectors::<S, N>(simd, old);
        }
        for key in 0..self.v.count {
            let v = load_vectors::<S, N>(simd, &self.v.row(key)[columns.clone()]);
            for row in 0..M {
                let p = simd.splat_f32s(p[row][key]);
                for vector in 0..N {
                    sums[row][vector] = simd.mul_add_e_f32s(p, v[vector], sums[row][vector]);
                }
            }
        }
        for (row, sums) in sums.into_iter().enumerate() {
            let new = &mut self.sums[(first_row + row) * head_dim..][columns.clone()];
            for (new, sum) in new.chunks_mut(S::F32_LANES).zip(sums) {
                simd.partial_store_f32s(new, sum);
            }
        }
    }
}

/// Adds the sums of a step to the outputs of a row, and clears them.
pub(super) struct Shrink<'a> {
    pub(super) o: &'a mut [f32],
    pub(super) factor: f32,
    pub(super) sums: &'a mut [f32],
}

impl WithSimd for Shrink<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { o, factor, sums } = self;
        let factor = simd.splat_f32s(factor);
        let lanes = S::F32_LANES;
        for (o, sums) in o.chunks_mut(lanes).zip(sums.chunks_mut(lanes)) {
            let (old, sum) = (simd.partial_load_f32s(o), simd.partial_load_f32s(sums));
            simd.partial_store_f32s(o, simd.mul_add_e_f32s(old, factor, sum));
            sums.fill(0.0);
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
