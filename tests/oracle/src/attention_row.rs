//! One row of attention. Attended keys only are touched: a masked key cannot leak.

use crate::code_row::{CodeRow, plain_of_codes};
use crate::elements::{Element, round};
use crate::scores::{Added, Scores};
use blockflash_sys::DType;
use std::ops::Range;

/// The output of a query, and its log-sum-exp.
#[derive(Clone, Debug, Default)]
pub struct AttentionRow {
    /// The output, `[head_dim of v]`.
    pub o: Vec<Element>,
    /// The log-sum-exp; -inf without a key and a sink. Its magnitude is the magnitude of the
    /// largest score before the cap or of what is added to it, at least 1.
    pub lse: Element,
}

/// In what a row is computed plainly.
#[derive(Clone, Copy, Debug)]
pub struct Precision {
    /// Type of the output, and of tensors and probabilities where they are no codes.
    pub output: DType,
    /// Set where q, k and v are codes of e4m3.
    pub codes: Option<CodeRow>,
}

impl From<DType> for Precision {
    fn from(output: DType) -> Self {
        Self { output, codes: None }
    }
}

/// Keys that a query sees. It is aligned with the key of its own position or, if `bottom_right`, so
/// that the last query is aligned with the last key; `left` and `right` are the keys that it sees
/// before and after that one, `None` is all.
pub fn visible(
    query: usize,
    [seqlen_q, seqlen_kv]: [usize; 2],
    [left, right]: [Option<usize>; 2],
    bottom_right: bool,
) -> Range<usize> {
    let diagonal = if bottom_right { seqlen_kv as i128 - seqlen_q as i128 } else { 0 };
    let aligned = query as i128 + diagonal;
    let bound = |at: i128| at.clamp(0, seqlen_kv as i128) as usize;
    let start = left.map_or(0, |left| bound(aligned - left as i128));
    let end = right.map_or(seqlen_kv, |right| bound(aligned + right as i128 + 1));
    start..end.max(start)
}

/// Attention of a query to some keys: `row` gives the key and the value at a position, the latter
/// of `width` elements, and `added` what is added to the score.
pub fn attention_row<'a>(
    precision: impl Into<Precision>,
    scores: Scores,
    query: &[f32],
    width: usize,
    keys: &[usize],
    row: impl Fn(usize) -> [&'a [f32]; 2],
    added: impl Fn(usize) -> Added,
) -> AttentionRow {
    let Precision { output, codes } = precision.into();
    let [of_scores, of_values] =
        codes.map_or([1.0; 2], |codes| [codes.of_scores, codes.of_values].map(f64::from));
    let (key, value) = (|at: usize| row(at)[0], |at: usize| row(at)[1]);
    let sink = scores.sink();

    let mut largest_score = 1f64;
    let score = |&at: &usize| {
        let score = dot_f64(query, key(at)) * f64::from(scores.scale) * of_scores;
        largest_score = largest_score.max(score.abs()).max(added(at).size());
        scores.exact(score, added(at))[0]
    };
    let mut weights: Vec<f64> = keys.iter().map(score).collect();
    // Without a key, or with keys that have no part in the sum.
    let nothing = weights.iter().all(|&score| score == f64::NEG_INFINITY);
    if nothing && sink.is_none() {
        let none =
            Element { exact: f64::NEG_INFINITY, plain: f64::NEG_INFINITY, ..Element::default() };
        let lse = Element { magnitude: largest_score, ..none };
        // NaN and infinity times 0 is NaN: such keys are not masked.
        let nothing_of = |column: usize| {
            let sum = keys.iter().map(|&at| 0.0 * f64::from(value(at)[column])).sum();
            Element { exact: sum, plain: sum, ..Element::default() }
        };
        return AttentionRow { o: (0..width).map(nothing_of).collect(), lse };
    }
    // Then no scale of values counts.
    let codes = codes.map(|codes| match nothing {
        true => CodeRow { of_values: 1.0, ..codes },
        false => codes,
    });
    let of_values = if nothing { 1.0 } else { of_values };
    let max = weights.iter().copied().chain(sink.map(f64::from)).fold(f64::NEG_INFINITY, f64::max);
    weights.iter_mut().for_each(|score| *score = (*score - max).exp());
    let sum = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (f64::from(sink) - max).exp());
    // Apart from each other, so that they are added by vector instructions.
    let [mut exact, mut squares] = [(); 2].map(|()| vec![0f64; width]);
    for (p, &at) in weights.iter().map(|p| p / sum).zip(keys) {
        for ((exact, squares), &v) in exact.iter_mut().zip(&mut squares).zip(value(at)) {
            let term = p * f64::from(v);
            *exact += term;
            *squares += term * term;
        }
    }

    let (plain, plain_lse) = match codes {
        Some(codes) => plain_of_codes(codes, scores, sink, query, width, keys, row, added),
        None => plain_row(output, scores, query, width, keys, row, added),
    };
    let element = |((exact, squares), plain): ((f64, f64), f32)| {
        let (exact, magnitude) = (exact * of_values, squares.sqrt() * of_values.abs());
        Element {
            exact,
            plain: f64::from(round(output, plain)),
            magnitude,
            // Any key may come first and outweigh the others: partial sums may be as large as the
            // output all along.
            partial: exact.abs().max(magnitude),
        }
    };
    let o = exact.into_iter().zip(squares).zip(plain).map(element).collect();
    let lse = Element {
        exact: max + sum.ln(),
        plain: f64::from(plain_lse),
        magnitude: largest_score,
        partial: 0.0,
    };
    AttentionRow { o, lse }
}

/// The output before it is rounded, and the log-sum-exp: unnormalised probabilities, of which the
/// largest is 1, are rounded to the type of the tensors.
fn plain_row<'a>(
    dtype: DType,
    scores: Scores,
    query: &[f32],
    width: usize,
    keys: &[usize],
    row: impl Fn(usize) -> [&'a [f32]; 2],
    added: impl Fn(usize) -> Added,
) -> (Vec<f32>, f32) {
    let (key, value) = (|at: usize| row(at)[0], |at: usize| row(at)[1]);
    let sink = scores.sink();
    let score = |&at: &usize| scores.plain(dot_f32(query, key(at)) * scores.scale, added(at))[0];
    let scores: Vec<f32> = keys.iter().map(score).collect();
    let key_max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // Keys without a part in the sum: -inf minus -inf is NaN.
    let shift = if key_max == f32::NEG_INFINITY { 0.0 } else { key_max };
    let plain_max = sink.map_or(key_max, |sink| key_max.max(sink));
    let (mut plain_sum, mut plain) = (0f32, vec![0f32; width]);
    for (&score, &at) in scores.iter().zip(keys) {
        let p = (score - shift).exp();
        plain_sum += p;
        let p = round(dtype, p);
        plain.iter_mut().zip(value(at)).for_each(|(o, &v)| *o += p * v);
    }
    // The sum relative to the largest score, sink included.
    let rescale = if key_max == f32::NEG_INFINITY { 0.0 } else { (key_max - plain_max).exp() };
    let total = plain_sum * rescale + sink.map_or(0.0, |sink| (sink - plain_max).exp());
    let factor = if total == 0.0 { 0.0 } else { rescale / total };
    plain.iter_mut().for_each(|x| *x *= factor);
    (plain, plain_max + total.ln())
}

/// Eight partial sums: they allow vector instructions without reordering anything.
pub(crate) fn dot_f64(a: &[f32], b: &[f32]) -> f64 {
    let ([a, b], [rest_a, rest_b]) = chunks(a, b);
    let mut sums = [0f64; 8];
    for (a, b) in a.iter().zip(b) {
        (0..8).for_each(|lane| sums[lane] += f64::from(a[lane]) * f64::from(b[lane]));
    }
    let rest = rest_a.iter().zip(rest_b).map(|(&a, &b)| f64::from(a) * f64::from(b));
    sums.iter().sum::<f64>() + rest.sum::<f64>()
}

pub(crate) fn dot_f32(a: &[f32], b: &[f32]) -> f32 {
    let ([a, b], [rest_a, rest_b]) = chunks(a, b);
    let mut sums = [0f32; 8];
    for (a, b) in a.iter().zip(b) {
        (0..8).for_each(|lane| sums[lane] += a[lane] * b[lane]);
    }
    sums.iter().sum::<f32>() + rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum::<f32>()
}

type Chunks<'a> = ([&'a [[f32; 8]]; 2], [&'a [f32]; 2]);

fn chunks<'a>(a: &'a [f32], b: &'a [f32]) -> Chunks<'a> {
    let ((a, rest_a), (b, rest_b)) = (a.as_chunks(), b.as_chunks());
    ([a, b], [rest_a, rest_b])
}
