//! What attention means, in f64 and in the plain same-precision form. Both touch attended pairs
//! only: a masked key cannot leak.

use super::{AttentionCase, AttentionData, Blocks, Sequence};
use crate::number::{rng, round, unit_roundoff};
use crate::tolerance::{PRODUCTS, Reference, Rounding};
use blockflash_ops::attention::Mask;
use blockflash_sys::DType;
use rand::Rng;
use rayon::prelude::*;
use std::ops::Range;

/// Keys that a query of a sequence sees under the token mask. Query i sees key j when
/// `-left <= j - (i + diagonal) <= right`.
pub fn visible_keys(case: &AttentionCase, sequence: &Sequence, query: usize) -> Range<usize> {
    let (left, right) = match case.mask {
        Mask::Full => (None, None),
        Mask::Causal { .. } => (None, Some(0)),
        Mask::Window { left, right, .. } => (left, right),
        other => panic!("the oracle knows no mask {other:?}"),
    };
    let keys = sequence.kv_len as i64;
    let center = query as i64 + case.diagonal(sequence);
    let start = left.map_or(0, |left| center.saturating_sub_unsigned(left as u64)).clamp(0, keys);
    let end = right
        .map_or(keys, |right| center.saturating_add_unsigned(right as u64).saturating_add(1))
        .clamp(0, keys);
    start as usize..end.max(start) as usize
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
        let key_norms: Vec<f64> = data.k.par_chunks(d).map(|k| dot_f64(k, k).sqrt()).collect();
        let mut computed = vec![Row::default(); rows.len()];
        let call = Call { case, data, blocks: Blocks::of(case), key_norms, sequences };
        computed.par_iter_mut().zip(&rows).for_each_init(
            Scratch::default,
            |scratch, (out, &at)| {
                *out = row(&call, at, scratch);
            },
        );
        let mut reference = Self { rows, ..Self::default() };
        reference.o.width = d;
        reference.lse.width = computed.len();
        for row in computed {
            // Any key may come first and outweigh the others: partial sums may be as large as the
            // output all along.
            let partial =
                row.exact.iter().zip(&row.magnitude).map(|(o, magnitude)| o.abs().max(*magnitude));
            reference.o.partial.extend(partial);
            reference.o.exact.extend(row.exact);
            reference.o.plain.extend(row.plain);
            reference.o.magnitude.extend(row.magnitude);
            reference.lse.exact.push(row.lse);
            reference.lse.plain.push(row.plain_lse);
            reference.lse.magnitude.push(row.largest_score);
            reference.lse.partial.push(0.0);
        }
        reference
    }

    /// What a correct implementation may round in the output.
    pub fn rounding(&self, case: &AttentionCase) -> Rounding {
        let keys = case.sequences().iter().map(|s| s.kv_len).max().unwrap_or(0);
        let largest_score =
            self.lse.magnitude.iter().copied().filter(|s| s.is_finite()).fold(0.0, f64::max);
        let exponent = score_steps(case) as f64 * unit_roundoff(DType::F32) * largest_score;
        Rounding {
            factor: Some(case.dtype),
            exponent,
            ..Rounding::of_products(keys, 1, case.dtype)
        }
    }

    /// What a correct implementation may round in the log-sum-exp: it sums unrounded probabilities.
    pub fn lse_rounding(case: &AttentionCase) -> Rounding {
        Rounding::of_products(0, score_steps(case), DType::F32)
    }
}

/// Roundings of a score: those of its sum, and 8 for the change to base 2 and back, the exponential
/// and the logarithm (2 units each in hardware).
fn score_steps(case: &AttentionCase) -> usize {
    8 + case.head_dim.div_ceil(PRODUCTS)
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

#[derive(Clone, Default)]
struct Row {
    exact: Vec<f64>,
    plain: Vec<f64>,
    magnitude: Vec<f64>,
    lse: f64,
    plain_lse: f64,
    largest_score: f64,
}

/// What all rows share.
struct Call<'a> {
    case: &'a AttentionCase,
    data: &'a AttentionData,
    blocks: Option<Blocks>,
    key_norms: Vec<f64>,
    sequences: Vec<Sequence>,
}

#[derive(Default)]
struct Scratch {
    keys: Vec<usize>,
    exact: Vec<f64>,
    plain: Vec<f32>,
    sum: Vec<f32>,
}

fn row(call: &Call<'_>, [b, i, h]: [usize; 3], scratch: &mut Scratch) -> Row {
    let Call { case, data, blocks, key_norms, sequences } = call;
    let (d, s) = (case.head_dim, &sequences[b]);
    let keys = &mut scratch.keys;
    keys.clear();
    keys.extend(case.attended_keys(blocks.as_ref(), [b, i, h], s));
    let kv_head = h / (case.heads_q / case.heads_kv);
    let q = &data.q[((s.q_start + i) * case.heads_q + h) * d..][..d];
    let at = |j: usize| ((s.kv_start + j) * case.heads_kv + kv_head) * d;
    let sink = case.sink.then(|| data.sink[h]);
    let (scale, softcap) = (case.scale(), case.softcap);

    // Exact. A score is as large as its value, or as the terms that cancel in it.
    let q_norm = dot_f64(q, q).sqrt() * f64::from(scale) / (d as f64).sqrt();
    let mut largest_score = 1f64;
    let scores = &mut scratch.exact;
    scores.clear();
    scores.extend(keys.iter().map(|&j| {
        let score = dot_f64(q, &data.k[at(j)..][..d]) * f64::from(scale);
        largest_score = largest_score.max(score.abs()).max(q_norm * key_norms[at(j) / d]);
        softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
    }));
    let max = scores.iter().copied().chain(sink.map(f64::from)).fold(f64::NEG_INFINITY, f64::max);
    scores.iter_mut().for_each(|s| *s = (*s - max).exp());
    let sum = scores.iter().sum::<f64>() + sink.map_or(0.0, |sink| (f64::from(sink) - max).exp());
    let nothing = sum == 0.0; // no key and no sink
    let mut exact = vec![0.0; d];
    let mut magnitude = vec![0.0; d];
    for (p, j) in scores.iter().map(|p| p / sum).zip(keys.iter().copied()) {
        for ((o, m), &v) in exact.iter_mut().zip(&mut magnitude).zip(&data.v[at(j)..][..d]) {
            let term = p * f64::from(v);
            *o += term;
            *m += term * term;
        }
    }
    magnitude.iter_mut().for_each(|m| *m = m.sqrt());

    // Plain, in the precision of the tensors: unnormalised probabilities, the largest is 1.
    let scores = &mut scratch.plain;
    scores.clear();
    scores.extend(keys.iter().map(|&j| {
        let score = dot_f32(q, &data.k[at(j)..][..d]) * scale;
        softcap.map_or(score, |cap| cap * (score / cap).tanh())
    }));
    let plain_max = scores.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
    let key_max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut plain_sum = 0f32;
    let accumulator = &mut scratch.sum;
    accumulator.clear();
    accumulator.resize(d, 0.0);
    for (&score, &j) in scores.iter().zip(keys.iter()) {
        let p = (score - key_max).exp();
        plain_sum += p;
        let p = round(case.dtype, p);
        for (o, &v) in accumulator.iter_mut().zip(&data.v[at(j)..][..d]) {
            *o += p * v;
        }
    }
    // The sum relative to the largest score, sink included.
    let rescale = if key_max == f32::NEG_INFINITY { 0.0 } else { (key_max - plain_max).exp() };
    let total = plain_sum * rescale + sink.map_or(0.0, |sink| (sink - plain_max).exp());
    let factor = if total == 0.0 { 0.0 } else { rescale / total };
    let plain = accumulator.iter().map(|o| f64::from(round(case.dtype, o * factor))).collect();
    let (lse, plain_lse) = match nothing {
        true => (f64::NEG_INFINITY, f64::NEG_INFINITY),
        false => (max + sum.ln(), f64::from(plain_max + total.ln())),
    };
    Row { exact, plain, magnitude, lse, plain_lse, largest_score }
}

/// Eight partial sums: they allow vector instructions without reordering anything.
fn dot_f64(a: &[f32], b: &[f32]) -> f64 {
    let (mut sums, tail) = ([0f64; 8], a.len() / 8 * 8);
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        for lane in 0..8 {
            sums[lane] += f64::from(a[lane]) * f64::from(b[lane]);
        }
    }
    let rest: f64 =
        a[tail..].iter().zip(&b[tail..]).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    sums.iter().sum::<f64>() + rest
}

fn dot_f32(a: &[f32], b: &[f32]) -> f32 {
    let (mut sums, tail) = ([0f32; 8], a.len() / 8 * 8);
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        for lane in 0..8 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f32>() + a[tail..].iter().zip(&b[tail..]).map(|(a, b)| a * b).sum::<f32>()
}

#[cfg(test)]
#[path = "oracle_tests.rs"]
mod tests;
