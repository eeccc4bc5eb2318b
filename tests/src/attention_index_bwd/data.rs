//! The numbers of a case, and what an exact computation makes of them.

use super::IndexBackwardCase;
use crate::number::{normal_rounded, round, unit_roundoff};
use crate::tolerance::Reference;
use blockflash_ops::{DType, HeadDims};
use blockflash_oracle::{
    Added, AttentionGradients, AttentionRow, Element, PRODUCTS, Pair, Query, Rounding,
    index_attention_row,
};
use rayon::prelude::*;

/// The numbers of a case, rounded to their types. Packed rows of no sequence are NaN.
#[derive(Clone)]
pub struct IndexBackwardData {
    /// `[rows, heads, qk]`.
    pub q: Vec<f32>,
    /// `[rows, heads_kv, qk]`.
    pub k: Vec<f32>,
    /// `[rows, heads_kv, v]`.
    pub v: Vec<f32>,
    /// The exact output, rounded, `[rows, heads, v]`.
    pub o: Vec<f32>,
    /// The exact log-sum-exp in f32, `[rows, heads]`.
    pub lse: Vec<f32>,
    /// `[rows, heads, v]`.
    pub d_o: Vec<f32>,
    /// `[groups, rows, capacity]`.
    pub entries: Vec<i32>,
    /// Absolute error of the exponents of the probabilities.
    exponent: f64,
}

impl IndexBackwardCase {
    fn oracle_scores(&self) -> blockflash_oracle::Scores {
        blockflash_oracle::Scores::new(self.factor(), self.softcap)
    }
}

impl IndexBackwardData {
    /// The numbers of a case.
    pub fn generate(case: &IndexBackwardCase) -> Self {
        let ([heads, heads_kv], HeadDims { qk, v }) = (case.heads, case.head_dims);
        let ([starts_q, starts_k], [rows, rows_kv]) = (case.offsets(), case.rows());
        let ends = [starts_q, starts_k].map(|starts| starts[case.batch()] as usize);
        let normal = |salt: u64, rows: usize, end: usize, width: usize| {
            let mut values = normal_rounded(case.seed << 8 ^ salt, rows * width, case.dtype);
            values[end * width..].fill(f32::NAN);
            values
        };
        let mut data = Self {
            q: normal(0, rows, ends[0], heads * qk),
            k: normal(1, rows_kv, ends[1], heads_kv * qk),
            v: normal(2, rows_kv, ends[1], heads_kv * v),
            d_o: normal(3, rows, ends[0], heads * v),
            o: vec![f32::NAN; rows * heads * v],
            lse: vec![f32::NAN; rows * heads],
            entries: case.entries(),
            exponent: 0.0,
        };
        let queries: Vec<_> = case.queries().collect();
        let row = |at: usize| -> AttentionRow {
            let (query, head) = (queries[at / heads], at % heads);
            let keys = case.seen(&data.entries, query, head);
            let q = &data.q[(query[2] * heads + head) * qk..][..qk];
            let kv = |key| data.pair(case, query[0], head, key);
            let (dtype, scores) = (case.dtype, case.oracle_scores());
            index_attention_row(dtype, scores, q, v, &keys, kv, |_| Added::default())
        };
        let all: Vec<_> = (0..queries.len() * heads).into_par_iter().map(row).collect();
        let mut largest = 0f64;
        for (at, found) in all.iter().enumerate() {
            let to = queries[at / heads][2] * heads + at % heads;
            data.lse[to] = found.lse.exact as f32;
            if found.lse.magnitude.is_finite() {
                largest = largest.max(found.lse.magnitude);
            }
            for (o, element) in data.o[to * v..][..v].iter_mut().zip(&found.o) {
                *o = round(case.dtype, element.exact as f32);
            }
        }
        let steps = (8 + qk.div_ceil(PRODUCTS)) as f64;
        data.exponent = steps * unit_roundoff(DType::F32) * largest;
        data
    }

    /// A key and a value of a sequence, for a head of queries.
    fn pair(&self, case: &IndexBackwardCase, b: usize, head: usize, key: usize) -> [&[f32]; 2] {
        let ([heads, heads_kv], HeadDims { qk, v }) = (case.heads, case.head_dims);
        let first = case.lengths[..b].iter().map(|lengths| lengths.1).sum::<usize>();
        let at = (first + key) * heads_kv + head / (heads / heads_kv);
        [&self.k[at * qk..][..qk], &self.v[at * v..][..v]]
    }

    /// Exact and plain values of the gradients of q, k and v, with the roundings that a correct
    /// computation may make. Rows of no sequence are 0.
    pub fn reference(&self, case: &IndexBackwardCase) -> [(Reference, Rounding); 3] {
        let ([heads, heads_kv], HeadDims { qk, v }) = (case.heads, case.head_dims);
        let (group, [rows, rows_kv]) = (heads / heads_kv, case.rows());
        let queries: Vec<_> = case.queries().collect();
        let of_head = |head_kv: usize| {
            let sizes = [rows * group, rows_kv, group];
            let mut gradients = AttentionGradients::new(sizes, case.head_dims);
            for (&query, member) in queries.iter().flat_map(|q| (0..group).map(move |m| (q, m))) {
                let ([b, _, row], head) = (query, head_kv * group + member);
                let at = row * heads + head;
                let keys = case.seen(&self.entries, query, head);
                let first = case.lengths[..b].iter().map(|lengths| lengths.1).sum::<usize>();
                let places: Vec<usize> = keys.iter().map(|key| first + key).collect();
                let query = Query {
                    q: &self.q[at * qk..][..qk],
                    o: &self.o[at * v..][..v],
                    lse: self.lse[at],
                    d_o: &self.d_o[at * v..][..v],
                };
                let place = [row * group + member, member];
                let pair = |place: usize| Pair {
                    kv: self.pair(case, b, head, place - first),
                    added: Added::default(),
                    of_bias: None,
                };
                gradients.add(case.dtype, case.oracle_scores(), query, place, &places, pair);
            }
            gradients
        };
        let all: Vec<_> = (0..heads_kv).into_par_iter().map(of_head).collect();
        let mut found = [
            vec![Element::default(); rows * heads * qk],
            vec![Element::default(); rows_kv * heads_kv * qk],
            vec![Element::default(); rows_kv * heads_kv * v],
        ];
        for (head, gradients) in all.iter().enumerate() {
            let AttentionGradients { dq, dk, dv, .. } = gradients;
            let sums = [(dq, case.factor(), group * qk), (dk, case.factor(), qk), (dv, 1.0, v)];
            for (target, (sums, scale, width)) in found.iter_mut().zip(sums) {
                for (at, element) in sums.elements(case.dtype, scale).enumerate() {
                    target[(at / width * heads_kv + head) * width + at % width] = element;
                }
            }
        }
        let listed = |&query: &[usize; 3]| {
            (0..heads).map(move |head| case.seen(&self.entries, query, head).len())
        };
        let keys = queries.iter().flat_map(listed).max().unwrap_or(0);
        // A key is listed several times by each query at most.
        let visits = queries.len() * group * case.list[1].min(8);
        let rounding = |terms: usize| {
            let rounding = Rounding::of_products(terms, 1, case.dtype);
            let additions = rounding.additions + case.head_dims.max().div_ceil(PRODUCTS);
            let factor = Some(case.dtype);
            Rounding { factor, exponent: self.exponent, additions, ..rounding }
        };
        let [dq, dk, dv] = found;
        [(dq, qk, keys), (dk, qk, visits), (dv, v, visits)].map(|(elements, width, terms)| {
            let mut reference = Reference { width, ..Reference::default() };
            reference.extend(elements);
            (reference, rounding(terms))
        })
    }
}
