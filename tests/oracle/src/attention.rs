use crate::attention_row::{AttentionRow, Precision, attention_row};
use crate::blocks::Sequence;
use crate::code_row::{CODE_PRODUCTS, CodeRow};
use crate::comparison::{BUDGET, Comparison, Mismatch, Steps, rounding, sample};
use crate::elements::Elements;
use crate::rounding::{CODE_TRUNCATION, PRODUCTS, TRUNCATION, unit_roundoff};
use crate::sequences::{AttentionCase, heads_of, rows_of, sequences};
use blockflash_sys::DType;
use rayon::prelude::*;

/// Heads that a sample takes from a large problem.
const SAMPLED_HEADS: usize = 16;
/// Keys of the widest tiles of codes.
const CODE_TILE: usize = 128;
/// How many times as long a multiply-add takes that is rounded as those of codes are.
const CODE_COST: u64 = 16;

/// Whether q, k and v are codes that stand for numbers as they are.
fn codes(case: &AttentionCase<'_>) -> bool {
    case.q.dtype() == DType::E4M3
}

/// Compares the output `o` (shape of `q`) and `lse` (f32 `[batch, num_heads_q, seqlen_q]`, packed
/// `[num_heads_q, rows]`) with the reference. `progress` is told the fraction that is done.
///
/// # Errors
/// If shapes do not belong together.
pub fn attention(
    case: &AttentionCase<'_>,
    o: &dyn Elements,
    lse: &dyn Elements,
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
    o: &dyn Elements,
    seed: u64,
    progress: impl Fn(f64) + Sync,
) -> Result<Comparison, Mismatch> {
    outputs(case, o, None, seed, &progress).map(|[o, _]| o)
}

fn outputs(
    case: &AttentionCase<'_>,
    o: &dyn Elements,
    lse: Option<&dyn Elements>,
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
    Ok([o_result.finish(o.len()), lse_result.finish(lse.map_or(0, Elements::len))])
}

/// Compares a sample of sequences of one length.
fn compare(
    (case, o, lse): (&AttentionCase<'_>, &dyn Elements, Option<&dyn Elements>),
    sequences: &[Sequence],
    budget: u64,
    seed: u64,
    progress: &(dyn Fn(f64) + Sync),
) -> [Comparison; 2] {
    let ([heads, qk], [heads_kv, v]) = (heads_of(case.q), heads_of(case.v));
    let [seqlen_q, seqlen_kv] =
        sequences.first().map_or([0; 2], |sequence| [sequence.seqlen_q, sequence.seqlen_kv]);
    let keys = case.blocks.map_or(seqlen_kv, |blocks| blocks.mean_keys()).max(1);
    let budget = if codes(case) { budget / CODE_COST } else { budget };
    let cost = |heads: usize| (heads * keys) as u64 * (qk + v) as u64;
    let affordable = |rows: usize, heads: usize| rows as u64 <= budget / cost(heads).max(1);
    let all_heads = sequences.len() * heads;
    let (sampled_heads, sampled_rows) = if affordable(seqlen_q, all_heads) {
        (all_heads, seqlen_q)
    } else {
        let heads = all_heads.min(SAMPLED_HEADS);
        (heads, ((budget / cost(heads)) as usize).max(2).min(seqlen_q))
    };
    let pairs = sample(sampled_heads, all_heads, seed, 0);
    let steps = Steps::new(pairs.len(), progress);
    pairs
        .par_iter()
        .map(|&pair| {
            let (sequence, head) = (&sequences[pair / heads], pair % heads);
            let head_kv = head / (heads / heads_kv);
            let kv = sequence.kv..sequence.kv + seqlen_kv;
            let kv =
                [case.k, case.v].map(|tensor| rows_of(tensor, kv.clone(), head_kv..head_kv + 1));
            let rows = sample(sampled_rows, seqlen_q, seed, 1 + pair as u64);
            let results: Vec<_> = rows
                .par_iter()
                .map(|&row| compare_row((case, o, lse), sequence, [head, row], &kv))
                .collect();
            steps.step();
            results.into_iter().fold(Default::default(), merge)
        })
        .reduce(Default::default, merge)
}

fn merge(left: [Comparison; 2], right: [Comparison; 2]) -> [Comparison; 2] {
    [left[0].merge(right[0]), left[1].merge(right[1])]
}

/// The query `row` of a head; keys and values belong to its head and sequence.
fn compare_row(
    (case, o, lse): (&AttentionCase<'_>, &dyn Elements, Option<&dyn Elements>),
    sequence: &Sequence,
    [head, row]: [usize; 2],
    [keys, values]: &[Vec<f32>; 2],
) -> [Comparison; 2] {
    let ([heads, qk], [_, v], dtype) = (heads_of(case.q), heads_of(case.v), o.dtype());
    let elements = |width: usize| {
        let start = ((sequence.q + row) * heads + head) * width;
        start..start + width
    };
    let attended = case.attended(sequence, [head, row], 0..sequence.seqlen_kv);
    let query = case.q.to_f32(elements(qk));
    let added = case.added(sequence, [head, row], 0..sequence.seqlen_kv);
    let kv = |at: usize| [&keys[at * qk..][..qk], &values[at * v..][..v]];
    let codes = codes(case).then_some(CodeRow { of_scores: 1.0, of_values: 1.0, tile: CODE_TILE });
    let precision = Precision { output: dtype, codes };
    let AttentionRow { o: expected, lse: expected_lse } =
        attention_row(precision, case.scores(head), &query, v, &attended, kv, |key| added[key]);
    // The result is rounded, and the probabilities are: their errors are independent, four standard
    // deviations are enough.
    let truncation = match codes {
        None => attended.len().div_ceil(PRODUCTS) as f64 * TRUNCATION,
        // Sums of a tile are promoted.
        Some(_) => CODE_TILE.div_ceil(CODE_PRODUCTS) as f64 * CODE_TRUNCATION,
    };
    // What is small beside the maximum of a tile vanishes in the plain computation, too.
    let of_factors = |size: f64| match codes {
        None => rounding(dtype, size),
        Some(_) => size * unit_roundoff(DType::E4M3),
    };
    let found = o.to_f32(elements(v));
    let o = Comparison::of_row(dtype, found.into_iter().zip(expected), |sizes| {
        rounding(dtype, sizes.exact)
            + 4.0 * of_factors(sizes.magnitude)
            + truncation * sizes.partial
    });
    let at = sequence.lse + head * sequence.lse_head + row;
    let found = lse.map_or_else(Vec::new, |lse| lse.to_f32(at..at + 1));
    // 2^-20: the exponential and logarithm units of a GPU work to about 2^-22, and both products
    // are summed in f32. Products of codes keep 13 fraction bits in each addition.
    let cut =
        if codes.is_some() { qk.div_ceil(CODE_PRODUCTS) as f64 * 2f64.powi(-13) } else { 0.0 };
    let lse =
        Comparison::of_row(DType::F32, found.into_iter().map(|x| (x, expected_lse)), |sizes| {
            2f64.powi(-20) * sizes.exact.max(1.0) + cut * sizes.magnitude
        });
    [o, lse]
}
