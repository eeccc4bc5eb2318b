//! The rows of an attention case, computed by the oracle.

use super::{AttentionCase, AttentionData, Blocks, Content, Sequence};
use crate::number::{rng, unit_roundoff};
use crate::tolerance::Reference;
use blockflash_ops::attention::{Align, Mask};
use blockflash_oracle::{AttentionRow, CODE_PRODUCTS, PRODUCTS, Rounding, attention_row, visible};
use blockflash_sys::DType;
use rand::Rng;
use rayon::prelude::*;
use std::ops::Range;

/// Keys that a query of a sequence sees under the token mask.
pub fn visible_keys(case: &AttentionCase, sequence: &Sequence, query: usize) -> Range<usize> {
    let (left, right, align) = match case.scores.mask {
        Mask::Full => (None, None, Align::TopLeft),
        Mask::Causal { align } => (None, Some(0), align),
        Mask::Window { left, right, align } => (left, right, align),
        other => panic!("the oracle knows no mask {other:?}"),
    };
    let lengths = [sequence.q_len, sequence.kv_len];
    visible(query, lengths, [left, right], align == Align::BottomRight)
}

/// Exact and plain values of all rows of a case, or of a sample.
#[derive(Clone, Debug, Default)]
pub struct AttentionReference {
    /// The rows: sequence, query, query head.
    pub rows: Vec<[usize; 3]>,
    /// The output, `[rows, head_dim]`.
    pub o: Reference,
    /// The log-sum-exp, `[rows]`.
    pub lse: Reference,
}

impl AttentionReference {
    /// Computes the reference. At most `budget` multiply-adds are spent on each of the two
    /// computations: larger cases are sampled (first and last row of each head of the first and
    /// last sequence, others at random).
    pub fn compute(case: &AttentionCase, data: &AttentionData, budget: f64) -> Self {
        let sequences = case.sequences();
        let rows = sample(case, &sequences, budget);
        let d = case.head_dim;
        let key_norms: Vec<f64> = data.k.par_chunks(d).map(norm).collect();
        let call = Call { case, data, blocks: Blocks::of(case), key_norms, sequences };
        let mut computed = vec![AttentionRow::default(); rows.len()];
        computed
            .par_iter_mut()
            .zip(&rows)
            .for_each_init(Vec::new, |keys, (out, &at)| *out = row(&call, at, keys));
        let mut reference = Self { rows, ..Self::default() };
        reference.o.width = d;
        reference.lse.width = computed.len();
        for AttentionRow { o, lse } in computed {
            reference.o.extend(o);
            reference.lse.extend([lse]);
        }
        reference
    }

    /// The roundings that a correct implementation may make in the output.
    pub fn rounding(&self, case: &AttentionCase) -> Rounding {
        let keys = case.sequences().iter().map(|s| s.kv_len).max().unwrap_or(0);
        let largest_score =
            self.lse.magnitude.iter().copied().filter(|s| s.is_finite()).fold(0.0, f64::max);
        let exponent = match case.content {
            // Products are exact, and no two scores are close.
            Content::HugeScores if case.codes.is_none() => 0.0,
            _ => score_steps(case) as f64 * unit_roundoff(DType::F32) * largest_score,
        };
        if let Some(codes) = case.codes {
            let tiles = keys.div_ceil(codes.tile);
            return Rounding { exponent, ..Rounding::of_codes(codes.tile, tiles, case.dtype) };
        }
        Rounding {
            factor: Some(case.dtype),
            exponent,
            ..Rounding::of_products(keys, 1, case.dtype)
        }
    }

    /// The same for the log-sum-exp, which sums unrounded probabilities.
    pub fn lse_rounding(case: &AttentionCase) -> Rounding {
        Rounding::of_products(0, score_steps(case), DType::F32)
    }
}

/// Roundings of a score: the roundings of its sum, 3 where something is added, and 8 for the change
/// to base 2 and back, the exponential and the logarithm (2 units each in hardware).
/// Beyond 256 columns the partial sums of a score are at least half of it, three quarters on
/// average, and a tensor core loses 5 units of these on average with each addition (`TRUNCATION` of
/// the oracle): about four roundings of the score.
/// A product of codes is rounded to 13 fraction bits with each addition, and multiplied with three
/// factors.
fn score_steps(case: &AttentionCase) -> usize {
    let added = if case.terms.is_none() { 0 } else { 3 };
    8 + added
        + match case.codes {
            None => {
                let [first, rest] = [case.head_dim.min(256), case.head_dim.saturating_sub(256)];
                first.div_ceil(PRODUCTS) + 4 * rest.div_ceil(PRODUCTS)
            }
            Some(_) => 3 + (case.head_dim.div_ceil(CODE_PRODUCTS) << (24 - 13)),
        }
}

fn sample(case: &AttentionCase, sequences: &[Sequence], budget: f64) -> Vec<[usize; 3]> {
    let cost = |s: &Sequence, i: usize| {
        (2 * case.head_dim * visible_keys(case, s, i).len() + case.head_dim) as f64
    };
    let queries: usize = sequences.iter().map(|s| s.q_len).sum();
    let keys: usize = sequences.iter().map(|s| s.kv_len).max().unwrap_or(0);
    let all = || {
        sequences.iter().enumerate().flat_map(move |(b, s)| {
            (0..s.q_len).flat_map(move |i| (0..case.heads_q).map(move |h| [b, i, h]))
        })
    };
    let upper_bound = queries as f64 * case.heads_q as f64 * (2 * case.head_dim * keys) as f64;
    if upper_bound <= budget || all().map(|[b, i, _]| cost(&sequences[b], i)).sum::<f64>() <= budget
    {
        return all().collect();
    }
    let mut random = rng(case.seed);
    let filled: Vec<usize> = (0..sequences.len()).filter(|&b| sequences[b].q_len > 0).collect();
    let mut rows = Vec::new();
    let mut spent = 0.0;
    for b in [filled[0], filled[filled.len() - 1]] {
        for h in [0, case.heads_q - 1] {
            for i in [0, sequences[b].q_len - 1] {
                rows.push([b, i, h]);
                spent += cost(&sequences[b], i);
            }
        }
    }
    while spent < budget {
        let b = filled[random.random_range(0..filled.len())];
        let i = random.random_range(0..sequences[b].q_len);
        rows.push([b, i, random.random_range(0..case.heads_q)]);
        spent += cost(&sequences[b], i);
    }
    rows.sort_unstable();
    rows.dedup();
    rows
}

/// Data that all rows share.
struct Call<'a> {
    case: &'a AttentionCase,
    data: &'a AttentionData,
    blocks: Option<Blocks>,
    key_norms: Vec<f64>,
    sequences: Vec<Sequence>,
}

/// A row of the output; `keys` is a buffer for the keys that it attends to.
fn row(call: &Call<'_>, [b, i, h]: [usize; 3], keys: &mut Vec<usize>) -> AttentionRow {
    let Call { case, data, blocks, key_norms, sequences } = call;
    let (d, s) = (case.head_dim, &sequences[b]);
    keys.clear();
    keys.extend(case.attended_keys(blocks.as_ref(), [b, i, h], s));
    let kv_head = h / (case.heads_q / case.heads_kv);
    let q = &data.q[((s.q_start + i) * case.heads_q + h) * d..][..d];
    let at = |j: usize| ((s.kv_start + j) * case.heads_kv + kv_head) * d;
    let scores = case.scores_of(h, &data.sink);
    let kv = |j: usize| [&data.k[at(j)..][..d], &data.v[at(j)..][..d]];
    let added = |j: usize| case.added(data, s, [b, i, h], j);
    let precision = case.precision(b, h);
    let mut row = attention_row(precision, scores, q, d, keys, kv, added);
    // The size of a score is its value, or the size of the terms that cancel in it.
    let of_scores = precision.codes.map_or(1.0, |codes| f64::from(codes.of_scores));
    let q_norm = norm(q) * (f64::from(case.scale()) * of_scores).abs() / (d as f64).sqrt();
    let terms = keys.iter().map(|&j| q_norm * key_norms[at(j) / d]);
    row.lse.magnitude = terms.fold(row.lse.magnitude, f64::max);
    row
}

fn norm(row: &[f32]) -> f64 {
    row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

#[cfg(test)]
#[path = "oracle_tests.rs"]
mod tests;
