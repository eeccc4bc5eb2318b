//! The tolerance rule is neither too strict nor too lax: it accepts a faithful model of a
//! tensor-core kernel in thousands of random problems, and rejects the mistakes that such kernels
//! are known for.

use blockflash_ops::DType;
use blockflash_ops::attention::{Align, Mask, Scores};
use blockflash_tests::attention::{
    AlibiCase, AttentionCase, AttentionData, AttentionReference, BiasCase, Content, Lengths,
    Limits, Terms, attention_cases, visible_keys, with_terms,
};
use blockflash_tests::bsr::{
    self, BiasKind, BsrCase, BsrData, BsrReference, Pattern, activate, bsr_cases,
};
use blockflash_tests::number::round;
use blockflash_tests::property;
use blockflash_tests::tolerance::check;

/// What a model kernel does wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bug {
    None,
    /// A key in the middle of the visible ones is skipped.
    DropsAKey,
    /// The accumulator is not rescaled when the maximum grows.
    NoRescale,
    /// Sums of P·V in the 16-bit type.
    HalfAccumulator,
    /// Probabilities rounded to bf16 although the inputs are f16.
    CoarseProbabilities,
    /// The denominator sums the rounded probabilities of the last tile twice.
    StaleTail,
    /// The sink is left out of the denominator.
    IgnoresSink,
    /// The softcap is left out.
    IgnoresSoftcap,
    /// The bias of the query before is added.
    ShiftedBias,
    /// The slopes of ALiBi are left out.
    IgnoresAlibi,
    /// The log-sum-exp in base 2.
    Base2Lse,
    /// The neighbour's head of k and v.
    WrongHead,
}

/// `sum + terms` as a tensor core adds: the terms exactly, the result truncated to f32.
fn add_truncated(sum: f32, terms: f64) -> f32 {
    let exact = f64::from(sum) + terms;
    let nearest = exact as f32;
    if f64::from(nearest).abs() > exact.abs() {
        f32::from_bits(nearest.to_bits() - 1)
    } else {
        nearest
    }
}

/// Row `i` of C by 16 products at a time; with `dropped` without that stored block of the row.
fn product_row(case: &BsrCase, data: &BsrData, i: usize, dropped: Option<usize>) -> Vec<f64> {
    let ([_, n, k], size) = (case.mnk, case.block_size);
    let blocks = data.row_ptr[i / size] as usize..data.row_ptr[i / size + 1] as usize;
    let mut sums = vec![0f32; n];
    for at in blocks.clone().filter(|&at| dropped != Some(at - blocks.start)) {
        let first = data.col_idx[at] as usize * size;
        for step in (first..k.min(first + size)).step_by(16) {
            let a = &data.values[(at * size + i % size) * size + step - first..];
            for (j, sum) in sums.iter_mut().enumerate() {
                let columns = step..k.min(first + size).min(step + 16);
                let terms = columns
                    .clone()
                    .map(|col| f64::from(a[col - step]) * f64::from(data.b[col * n + j]));
                *sum = add_truncated(*sum, terms.sum());
            }
        }
    }
    let finish = |(j, sum): (usize, f32)| {
        let bias = match case.bias {
            BiasKind::None => 0.0,
            BiasKind::PerRow => data.bias[i],
            BiasKind::PerColumn => data.bias[j],
        };
        let old = if case.beta == 0.0 { 0.0 } else { case.beta * data.c[i * n + j] };
        // In f64 and rounded once: the best that a kernel can do.
        let x = f64::from(case.alpha * sum + old + bias);
        f64::from(round(case.c_dtype, activate(case.activation, x) as f32))
    };
    sums.into_iter().enumerate().map(finish).collect()
}

fn judge_product(case: &BsrCase, dropped: Option<usize>) -> Result<(), String> {
    let data = BsrData::generate(case);
    let reference = BsrReference::compute(case, &data, f64::INFINITY);
    let got: Vec<f64> =
        reference.rows.iter().flat_map(|&i| product_row(case, &data, i, dropped)).collect();
    check(&got, &reference.c, &BsrReference::rounding(case, &data), |i| format!("element {i}"))
}

#[test]
fn accepts_a_faithful_product() {
    let limits = |blocks, columns| bsr::Limits {
        dtypes: vec![DType::F16, DType::BF16],
        block_sizes: vec![16, 32],
        blocks,
        columns,
        any_layout: false,
    };
    property::check(300, bsr_cases(limits(2, 9)), |case| judge_product(&case, None));
    property::check(40, bsr_cases(limits(8, 70)), |case| judge_product(&case, None));
    // Long sums in f32, where a tensor core loses most by truncating.
    let long = BsrCase::simple(DType::BF16, 64, [64, 8, 4096], Pattern::Full);
    judge_product(&BsrCase { c_dtype: DType::F32, ..long }, None)
        .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn rejects_a_missing_block() {
    for (dtype, c_dtype) in
        [(DType::F16, DType::F16), (DType::BF16, DType::BF16), (DType::BF16, DType::F32)]
    {
        let case = BsrCase { c_dtype, ..BsrCase::simple(dtype, 16, [64, 40, 4096], Pattern::Full) };
        judge_product(&case, None).unwrap_or_else(|error| panic!("{error}"));
        assert!(judge_product(&case, Some(200)).is_err(), "1 of 256 blocks is missing: {case:?}");
    }
}

/// One row by online softmax over tiles of 16 keys; o and lse.
fn model(
    case: &AttentionCase,
    data: &AttentionData,
    [b, i, h]: [usize; 3],
    bug: Bug,
) -> (Vec<f32>, f32) {
    let (d, s) = (case.head_dim, case.sequences()[b]);
    let visible = visible_keys(case, &s, i);
    let skipped =
        if bug == Bug::DropsAKey { visible.start + visible.len() / 2 } else { usize::MAX };
    let kv_head = match bug {
        Bug::WrongHead => (h / (case.heads_q / case.heads_kv) + 1) % case.heads_kv,
        _ => h / (case.heads_q / case.heads_kv),
    };
    let at = |j: usize| ((s.kv_start + j) * case.heads_kv + kv_head) * d;
    let q = &data.q[((s.q_start + i) * case.heads_q + h) * d..][..d];
    let log2e = std::f32::consts::LOG2_E;
    let (mut max, mut sum, mut o) = (f32::NEG_INFINITY, 0f32, vec![0f32; d]);
    for tile in (0..s.kv_len).step_by(16) {
        let keys = tile..s.kv_len.min(tile + 16);
        let score = |j: usize| {
            if !visible.contains(&j) || j == skipped {
                return f32::NEG_INFINITY;
            }
            let k = &data.k[at(j)..][..d];
            let steps = q.chunks(16).zip(k.chunks(16));
            let dot = steps.fold(0f32, |sum, (q, k)| {
                add_truncated(
                    sum,
                    q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum(),
                )
            });
            // Scores that are added to are scaled first, others by the exponential.
            let mut added = case.added(data, &s, [b, i, h], j);
            if bug == Bug::ShiftedBias {
                added.bias = case.added(data, &s, [b, i.saturating_sub(1), h], j).bias;
            }
            if bug == Bug::IgnoresAlibi {
                added.slope = 0.0;
            }
            let terms =
                |score: f32| (score + added.bias - added.slope * added.distance as f32) * log2e;
            match case.scores.softcap {
                Some(cap) if !case.terms.is_none() => {
                    terms(cap * (dot * (case.scale() / cap)).tanh())
                }
                None if !case.terms.is_none() => terms(dot * case.scale()),
                Some(cap) if bug != Bug::IgnoresSoftcap => {
                    cap * (dot * (case.scale() / cap)).tanh() * log2e
                }
                _ => dot * (case.scale() * log2e),
            }
        };
        let scores: Vec<f32> = keys.clone().map(score).collect();
        let new_max = scores.iter().copied().fold(max, f32::max);
        // Nothing seen yet: -inf - -inf would be NaN. (A NaN score is no maximum, and must show.)
        let shift = if new_max == f32::NEG_INFINITY { 0.0 } else { new_max };
        let rescale = if bug == Bug::NoRescale { 1.0 } else { (max - shift).exp2() };
        max = new_max;
        let p: Vec<f32> = scores.iter().map(|s| (s - shift).exp2()).collect();
        sum = sum * rescale + p.iter().sum::<f32>();
        if bug == Bug::StaleTail && keys.end == s.kv_len {
            sum += p.iter().sum::<f32>();
        }
        let p_type = if bug == Bug::CoarseProbabilities { DType::BF16 } else { case.dtype };
        for (e, o) in o.iter_mut().enumerate() {
            // A masked pair is no product: NaN in v must not meet its 0.
            let products = keys.clone().zip(&p).filter(|(j, _)| visible.contains(j));
            let terms = products
                .map(|(j, &p)| f64::from(round(p_type, p)) * f64::from(data.v[at(j) + e]))
                .sum();
            *o = add_truncated(*o * rescale, terms);
            if bug == Bug::HalfAccumulator {
                *o = round(case.dtype, *o);
            }
        }
    }
    let sink = case.scores.sink.map(|()| data.sink[h] * log2e).filter(|_| bug != Bug::IgnoresSink);
    let total_max = sink.map_or(max, |sink| sink.max(max));
    if total_max == f32::NEG_INFINITY && sum == 0.0 {
        // NaN of values stays: a key with a score of -inf is not masked.
        return (o.into_iter().map(|o| 0.0 * o).collect(), f32::NEG_INFINITY);
    }
    let rescale = if sum == 0.0 { 0.0 } else { (max - total_max).exp2() };
    let total = sum * rescale + sink.map_or(0.0, |sink| (sink - total_max).exp2());
    let o = o.into_iter().map(|o| round(case.dtype, o * rescale * (1.0 / total))).collect();
    let base = if bug == Bug::Base2Lse { 1.0 } else { std::f32::consts::LN_2 };
    (o, (total_max + total.log2()) * base)
}

fn judge(case: &AttentionCase, bug: Bug) -> Result<(), String> {
    let data = AttentionData::generate(case);
    let reference = AttentionReference::compute(case, &data, f64::INFINITY);
    let (mut o, mut lse) = (Vec::new(), Vec::new());
    for &row in &reference.rows {
        let (row_o, row_lse) = model(case, &data, row, bug);
        o.extend(row_o.into_iter().map(f64::from));
        lse.push(f64::from(row_lse));
    }
    let name = |i: usize| format!("element {i} (row {:?})", reference.rows[i / case.head_dim]);
    check(&o, &reference.o, &reference.rounding(case), name)
        .map_err(|error| format!("o: {error}"))?;
    let name = |i: usize| format!("row {:?}", reference.rows[i]);
    check(&lse, &reference.lse, &AttentionReference::lse_rounding(case), name)
        .map_err(|error| format!("lse: {error}"))
}

#[test]
fn accepts_a_faithful_kernel() {
    let limits = |seqlen, head_dims: &[usize]| Limits {
        dtypes: vec![DType::F16, DType::BF16],
        head_dims: head_dims.to_vec(),
        seqlen,
        alignment: 8,
        work: 100_000,
    };
    // Tiny ones are the hard ones: there a plain computation may be exact by luck.
    property::check(600, attention_cases(limits(9, &[8, 16])), |case| judge(&case, Bug::None));
    property::check(25, attention_cases(limits(130, &[8, 64, 128])), |case| {
        judge(&case, Bug::None)
    });
    let with_terms = |limits| with_terms(attention_cases(limits));
    property::check(600, with_terms(limits(9, &[8, 16])), |case| judge(&case, Bug::None));
    property::check(25, with_terms(limits(130, &[8, 64])), |case| judge(&case, Bug::None));
}

#[test]
fn rejects_known_mistakes() {
    let base = AttentionCase::simple(DType::F16, (4, 2), 64, (60, 1500));
    let with = |scores| AttentionCase { scores, ..base.clone() };
    let added = |bias, alibi| AttentionCase {
        terms: Terms { bias, alibi, ..Terms::default() },
        ..base.clone()
    };
    let short = AttentionCase {
        scores: Mask::Causal { align: Align::BottomRight }.into(),
        ..AttentionCase::simple(DType::F16, (4, 2), 64, (100, 100))
    };
    let cases = [
        (Bug::DropsAKey, base.clone()),
        (Bug::DropsAKey, AttentionCase { dtype: DType::BF16, ..base.clone() }),
        (Bug::NoRescale, short.clone()),
        (Bug::HalfAccumulator, base.clone()),
        (Bug::HalfAccumulator, AttentionCase { dtype: DType::BF16, ..base.clone() }),
        (Bug::CoarseProbabilities, base.clone()),
        (Bug::StaleTail, base.clone()),
        (Bug::IgnoresSink, with(Scores { sink: Some(()), ..base.scores })),
        (Bug::IgnoresSoftcap, with(Scores { softcap: Some(20.0), ..base.scores })),
        (Bug::ShiftedBias, added(Some(BiasCase::full(DType::F16)), None)),
        (Bug::IgnoresAlibi, added(None, Some(AlibiCase::PerHead))),
        (Bug::Base2Lse, short.clone()),
        (Bug::WrongHead, short.clone()),
        (Bug::NoRescale, AttentionCase { content: Content::GrowingMaxima, ..short }),
    ];
    for (bug, case) in cases {
        judge(&case, Bug::None).unwrap_or_else(|error| panic!("no bug, but {error}: {case:?}"));
        let error =
            judge(&case, bug).err().unwrap_or_else(|| panic!("{bug:?} was accepted: {case:?}"));
        assert!(!error.contains('\n'), "{error}");
    }
}

/// A mistake in one head or one row of many must not drown in the rest.
#[test]
fn rejects_a_mistake_in_one_row() {
    let lengths = Lengths::Dense { batch: 2, seqlen_q: 300, seqlen_kv: 300 };
    let mask = Mask::Causal { align: Align::TopLeft };
    let case = AttentionCase {
        lengths,
        scores: mask.into(),
        ..AttentionCase::simple(DType::F16, (2, 1), 64, (0, 0))
    };
    let data = AttentionData::generate(&case);
    let reference = AttentionReference::compute(&case, &data, f64::INFINITY);
    for wrong in [[0, 299, 0], [1, 40, 1]] {
        let mut o = reference.o.plain.clone();
        let at = reference.rows.iter().position(|&row| row == wrong).unwrap();
        let (bad, _) = model(&case, &data, wrong, Bug::DropsAKey);
        o[at * 64..][..64].iter_mut().zip(bad).for_each(|(o, bad)| *o = f64::from(bad));
        let error = check(&o, &reference.o, &reference.rounding(&case), |i| i.to_string());
        assert!(error.is_err(), "a key that row {wrong:?} does not see");
    }
}
