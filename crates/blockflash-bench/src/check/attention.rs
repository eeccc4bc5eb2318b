use super::sequences::{Sequence, heads_of, sequences};
use super::{
    BUDGET, Blocks, Comparison, Element, Mismatch, representable, round, rounding, sample,
};
use super::{PRODUCTS, TRUNCATION};
use crate::io::Array;
use blockflash_sys::DType;
use rayon::prelude::*;
use std::ops::Range;

/// Heads that a sample takes from a large problem.
const SAMPLED_HEADS: usize = 16;

/// Attention: `q` is `[batch, seqlen_q, num_heads_q, head_dim]`, `k` and `v` are
/// `[batch, seqlen_kv, num_heads_kv, head_dim]`; or all are packed, `[rows, heads, head_dim]`.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCase<'a> {
    /// Queries.
    pub q: &'a Array,
    /// Keys.
    pub k: &'a Array,
    /// Values.
    pub v: &'a Array,
    /// f32 `[num_heads_q]`: a score of each head that joins the sum of exponentials and has no
    /// value.
    pub sink: Option<&'a Array>,
    /// Lengths of the packed sequences, of their queries and of their keys; `None` for a dense
    /// batch.
    pub lengths: Option<[&'a [usize]; 2]>,
    /// Which blocks of keys are seen at all; `None` for all.
    pub blocks: Option<Blocks<'a>>,
    /// The last query of a sequence is aligned with its last key; otherwise the first with the
    /// first.
    pub bottom_right: bool,
    /// Keys to see before the aligned one; `None` is all.
    pub left: Option<usize>,
    /// Keys to see after the aligned one; `None` is all.
    pub right: Option<usize>,
    /// Factor of the scores.
    pub softmax_scale: f32,
    /// Scores become `softcap · tanh(score / softcap)`.
    pub softcap: Option<f32>,
}

impl AttentionCase<'_> {
    /// Keys that a query of `head` of so many sees.
    fn visible(&self, query: usize, head: [usize; 2], sequence: &Sequence) -> Vec<Range<usize>> {
        let shown = self.shown(query, sequence);
        match &self.blocks {
            Some(blocks) => blocks.seen(query, head, sequence, shown),
            None => Vec::from_iter((!shown.is_empty()).then_some(shown)),
        }
    }

    /// Keys that the mask shows to a query.
    fn shown(
        &self,
        query: usize,
        &Sequence { seqlen_q, seqlen_kv, .. }: &Sequence,
    ) -> Range<usize> {
        let diagonal = if self.bottom_right { seqlen_kv as i128 - seqlen_q as i128 } else { 0 };
        let aligned = query as i128 + diagonal;
        let bound = |at: i128| at.clamp(0, seqlen_kv as i128) as usize;
        let start = self.left.map_or(0, |left| bound(aligned - left as i128));
        let end = self.right.map_or(seqlen_kv, |right| bound(aligned + right as i128 + 1));
        start..end.max(start)
    }

    fn score(&self, dot: f64) -> f64 {
        let score = dot * f64::from(self.softmax_scale);
        self.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
    }

    fn plain_score(&self, dot: f32) -> f32 {
        let score = dot * self.softmax_scale;
        self.softcap.map_or(score, |cap| cap * (score / cap).tanh())
    }
}

/// Compares the output `o` (shape of `q`) and `lse` (f32 `[batch, num_heads_q, seqlen_q]`, packed
/// `[num_heads_q, rows]`) with the reference. `progress` is told the fraction that is done.
///
/// # Errors
/// If shapes do not belong together.
pub fn attention(
    case: &AttentionCase<'_>,
    o: &Array,
    lse: &Array,
    seed: u64,
    progress: impl Fn(f64) + Sync,
) -> Result<[Comparison; 2], Mismatch> {
    outputs(case, o, Some(lse), seed, &progress)
}

/// The same of the output alone.
///
/// # Errors
/// As [`attention`].
pub fn attention_output(
    case: &AttentionCase<'_>,
    o: &Array,
    seed: u64,
    progress: impl Fn(f64) + Sync,
) -> Result<Comparison, Mismatch> {
    outputs(case, o, None, seed, &progress).map(|[o, _]| o)
}

fn outputs(
    case: &AttentionCase<'_>,
    o: &Array,
    lse: Option<&Array>,
    seed: u64,
    progress: &(dyn Fn(f64) + Sync),
) -> Result<[Comparison; 2], Mismatch> {
    let sequences = sequences(case, o, lse)?;
    let results = match case.lengths {
        None => compare((case, o, lse), &sequences, BUDGET, seed, progress),
        // Every sequence is looked at, for its share of the budget.
        Some(_) => {
            let (count, rows) = (sequences.len() as f64, case.q.shape()[0].max(1) as u64);
            let compare_one = |(index, sequence): (usize, &Sequence)| {
                let budget =
                    (u128::from(BUDGET) * sequence.seqlen_q as u128 / u128::from(rows)) as u64;
                let seed = seed.wrapping_add(index as u64);
                let of_all = |done: f64| progress((index as f64 + done) / count);
                compare((case, o, lse), std::slice::from_ref(sequence), budget, seed, &of_all)
            };
            sequences.iter().enumerate().map(compare_one).fold(Default::default(), merge)
        }
    };
    let [o_result, lse_result] = results;
    Ok([o_result.finish(o.len()), lse_result.finish(lse.map_or(0, Array::len))])
}

/// Compares a sample of sequences of one length.
fn compare(
    (case, o, lse): (&AttentionCase<'_>, &Array, Option<&Array>),
    sequences: &[Sequence],
    budget: u64,
    seed: u64,
    progress: &(dyn Fn(f64) + Sync),
) -> [Comparison; 2] {
    let ([heads, head_dim], [heads_kv, _]) = (heads_of(case.q), heads_of(case.k));
    let [seqlen_q, seqlen_kv] =
        sequences.first().map_or([0; 2], |sequence| [sequence.seqlen_q, sequence.seqlen_kv]);
    let keys = case.blocks.map_or(seqlen_kv, |blocks| blocks.mean_keys()).max(1);
    let cost = |heads: usize| (heads * keys) as u64 * 2 * head_dim as u64;
    let affordable = |rows: usize, heads: usize| rows as u64 <= budget / cost(heads).max(1);
    let all_heads = sequences.len() * heads;
    let (sampled_heads, sampled_rows) = if affordable(seqlen_q, all_heads) {
        (all_heads, seqlen_q)
    } else {
        let heads = all_heads.min(SAMPLED_HEADS);
        (heads, ((budget / cost(heads)) as usize).max(2).min(seqlen_q))
    };
    let pairs = sample(sampled_heads, all_heads, seed, 0);
    let done = std::sync::atomic::AtomicUsize::new(0);
    pairs
        .par_iter()
        .map(|&pair| {
            let (sequence, head) = (&sequences[pair / heads], pair % heads);
            let head_kv = head / (heads / heads_kv);
            let kv = sequence.kv..sequence.kv + seqlen_kv;
            let (keys, values) =
                (rows_of(case.k, kv.clone(), head_kv), rows_of(case.v, kv, head_kv));
            let rows = sample(sampled_rows, seqlen_q, seed, 1 + pair as u64);
            let results: Vec<_> = rows
                .par_iter()
                .map(|&row| {
                    let start = ((sequence.q + row) * heads + head) * head_dim;
                    let range = start..start + head_dim;
                    let query = case.q.to_f32(range.clone());
                    let lse_at = sequence.lse + head * sequence.lse_head + row;
                    let lse = lse.map_or_else(Vec::new, |lse| lse.to_f32(lse_at..lse_at + 1));
                    let result = (o.to_f32(range), lse);
                    let visible = case.visible(row, [head, heads], sequence);
                    let sink =
                        case.sink.and_then(|sink| sink.to_f32(head..head + 1).first().copied());
                    compare_row(case, sink, o.dtype(), &query, &visible, [&keys, &values], &result)
                })
                .collect();
            let finished = 1 + done.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            progress(finished as f64 / pairs.len() as f64);
            results.into_iter().fold(Default::default(), merge)
        })
        .reduce(Default::default, merge)
}

fn merge(left: [Comparison; 2], right: [Comparison; 2]) -> [Comparison; 2] {
    [left[0].merge(right[0]), left[1].merge(right[1])]
}

/// `[rows, head_dim]` of one head.
fn rows_of(array: &Array, rows: Range<usize>, head: usize) -> Vec<f32> {
    let [heads, head_dim] = heads_of(array);
    let start = |row: usize| (row * heads + head) * head_dim;
    rows.flat_map(|row| array.to_f32(start(row)..start(row) + head_dim)).collect()
}

fn compare_row(
    case: &AttentionCase<'_>,
    sink: Option<f32>,
    dtype: DType,
    query: &[f32],
    visible: &[Range<usize>],
    [keys, values]: [&[f32]; 2],
    (o, lse): &(Vec<f32>, Vec<f32>),
) -> [Comparison; 2] {
    let head_dim = query.len();
    let row = |of: &'_ [f32], at: usize| at * head_dim..((at + 1) * head_dim).min(of.len());
    let seen = || visible.iter().cloned().flatten();
    let (exact_scores, plain_scores): (Vec<f64>, Vec<f32>) = seen()
        .map(|at| {
            let pairs = || query.iter().zip(&keys[row(keys, at)]);
            let exact: f64 = pairs().map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
            let plain: f32 = pairs().map(|(&q, &k)| q * k).sum();
            (case.score(exact), case.plain_score(plain))
        })
        .unzip();
    // A sink of -inf is none.
    let sink = sink.filter(|&sink| sink != f32::NEG_INFINITY);
    let exact_max =
        exact_scores.iter().copied().fold(sink.map_or(f64::NEG_INFINITY, f64::from), f64::max);
    let plain_max = plain_scores.iter().copied().fold(sink.unwrap_or(f32::NEG_INFINITY), f32::max);
    let (mut exact, mut plain, mut squares) =
        (vec![0f64; head_dim], vec![0f32; head_dim], vec![0f32; head_dim]);
    let mut exact_sum = sink.map_or(0f64, |sink| (f64::from(sink) - exact_max).exp());
    let mut plain_sum = sink.map_or(0f32, |sink| (sink - plain_max).exp());
    for (at, (exact_score, plain_score)) in seen().zip(exact_scores.iter().zip(&plain_scores)) {
        let exact_p = (exact_score - exact_max).exp();
        let plain_p = (plain_score - plain_max).exp();
        exact_sum += exact_p;
        plain_sum += plain_p;
        let rounded_p = round(dtype, plain_p);
        let sums = exact.iter_mut().zip(&mut plain).zip(&mut squares);
        for (((exact, plain), squares), &value) in sums.zip(&values[row(values, at)]) {
            let term = rounded_p * value;
            *exact += exact_p * f64::from(value);
            *plain += term;
            *squares += term * term;
        }
    }
    // A row that sees nothing is zero, and its lse that of the sink, without one -inf.
    let nothing = visible.is_empty() && sink.is_none();
    let (exact_inverse, plain_inverse) =
        if nothing { (0.0, 0.0) } else { (exact_sum.recip(), plain_sum.recip()) };
    let mut results = <[Comparison; 2]>::default();
    let elements = exact.iter().zip(&plain).zip(&squares).zip(o).map(
        |(((exact, plain), squares), &result)| Element {
            result,
            reference: representable(dtype, exact * exact_inverse),
            plain: round(dtype, plain * plain_inverse),
            magnitude: f64::from(squares.sqrt() * plain_inverse),
            // Any key may come first and outweigh the others.
            partial: (exact * exact_inverse).abs().max(f64::from(squares.sqrt() * plain_inverse)),
        },
    );
    // The result is rounded, and the probabilities are: their errors are independent, four standard
    // deviations are enough.
    let additions = exact_scores.len().div_ceil(PRODUCTS) as f64;
    results[0].add_row(elements, |sizes| {
        rounding(dtype, sizes.exact)
            + 4.0 * rounding(dtype, sizes.magnitude)
            + additions * TRUNCATION * sizes.partial
    });
    let elements = lse.iter().map(|&result| Element {
        result,
        reference: if nothing { f64::NEG_INFINITY } else { exact_max + exact_sum.ln() },
        plain: if nothing { f32::NEG_INFINITY } else { plain_max + plain_sum.ln() },
        magnitude: 1.0,
        partial: 0.0,
    });
    // 2^-20: the exponential and logarithm units of a GPU work to about 2^-22, and both products
    // are summed in f32.
    results[1].add_row(elements, |sizes| 2f64.powi(-20) * sizes.exact.max(sizes.magnitude));
    results
}
