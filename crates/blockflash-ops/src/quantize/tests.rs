use super::*;
use crate::fixtures::{cpu, f32s, rounded, values, widened};
use crate::{AppendKv, Attention, CacheScale, E4M3, KvCacheMut, Mask, OperandScales, Scores};
use proptest::prelude::*;

const CODES: [DType; 3] = [DType::E4M3, DType::E5M2, DType::I8];

fn greatest(codes: DType) -> f32 {
    match codes {
        DType::E4M3 => 448.0,
        DType::E5M2 => 57344.0,
        _ => 127.0,
    }
}

/// Half a step of the codes of numbers up to 1, as multiples of the greatest magnitude, and of the
/// number itself.
fn steps(codes: DType) -> [f32; 2] {
    match codes {
        DType::E4M3 => [1e-5, 1.0 / 16.0],
        DType::E5M2 => [1e-9, 1.0 / 8.0],
        _ => [0.5 / 127.0, 0.0],
    }
}

/// The numbers that codes and their scales stand for.
fn numbers(problem: &QuantizeProblem, output: &QuantizeOutput) -> Vec<f32> {
    let (codes, scales) = (widened(&output.codes), widened(output.scale.as_ref().unwrap()));
    let (heads, rows) = (problem.num_heads, problem.tokens);
    let of_row = |row: usize| match problem.scale_shape().unwrap().len() {
        1 => scales[0],
        2 => scales[row / heads / rows * heads + row % heads],
        _ => scales[row],
    };
    let at = |(at, code): (usize, &f32)| code * of_row(at / problem.head_dim);
    codes.iter().enumerate().map(at).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Each number comes back but for half a step, and the greatest one exactly.
    #[test]
    fn numbers_come_back(
        codes in prop::sample::select(&CODES[..]),
        dtype in prop::sample::select(vec![DType::F16, DType::BF16, DType::F32]),
        which in 0usize..3,
        sizes in (1usize..3, 1usize..300, 1usize..4),
        seed in 0u64..1000,
    ) {
        let shape = [sizes.0, sizes.1, sizes.2, 6];
        let x = rounded(dtype, &values(shape.iter().product(), seed), &shape);
        let scale = [QuantizeScale::Tensor, QuantizeScale::Head, QuantizeScale::Token][which];
        let call = Quantize { scale, ..Quantize::new(x.view()) };
        let output = call.quantize(codes, &cpu()).unwrap();
        let found = numbers(&call.problem(codes).unwrap(), &output);
        let x = widened(&x);
        let most = x.iter().fold(0f32, |most, x| most.max(x.abs()));
        let [absolute, relative] = steps(codes);
        for (x, found) in x.iter().zip(&found) {
            let limit = 1.001 * (absolute * most + relative * x.abs());
            prop_assert!((x - found).abs() <= limit, "{} for {}", found, x);
        }
        let at = x.iter().position(|x| x.abs() == most).unwrap();
        prop_assert!((found[at] - x[at]).abs() <= 1e-6 * most);
        let codes_of = widened(&output.codes);
        prop_assert_eq!(codes_of[at].abs(), greatest(codes));
    }
}

/// A cache whose append chooses the scales has the same codes and scales.
#[test]
fn appends_to_caches_round_alike() {
    let stream = cpu();
    let mut numbers = values(2 * 5 * 2 * 16, 3);
    numbers[3] = f32::NAN;
    numbers[40] = f32::INFINITY;
    numbers[64..80].fill(0.0);
    let x = f32s(&numbers, &[2, 5, 2, 16]);
    for codes in CODES {
        let call = Quantize { scale: QuantizeScale::Token, ..Quantize::new(x.view()) };
        let found = call.quantize(codes, &stream).unwrap();
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(&stream, dtype, shape).unwrap();
        let (mut k, mut v) = (zeros(codes, x.shape()), zeros(codes, x.shape()));
        let mut scales = [(); 2].map(|()| zeros(DType::F32, &[2, 5, 2]));
        let [k_scale, v_scale] =
            scales.each_mut().map(|s| Some(CacheScale::PerToken(s.view_mut())));
        let cache = KvCacheMut { k_scale, v_scale, ..KvCacheMut::new(k.view_mut(), v.view_mut()) };
        AppendKv::new(x.view(), x.view()).append_into(cache, &stream).unwrap();
        let bits =
            |tensor: &Tensor| widened(tensor).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&found.codes), bits(&k));
        assert_eq!(bits(found.scale.as_ref().unwrap()), bits(&scales[0]));
    }
}

#[test]
fn extremes_are_as_documented() {
    let numbers = [[0.0; 4], [1.0, f32::NAN, -2.0, 0.0], [1.0, f32::NEG_INFINITY, 0.0, 3.0]];
    let x = f32s(numbers.as_flattened(), &[1, 3, 1, 4]);
    let call = Quantize { scale: QuantizeScale::Token, ..Quantize::new(x.view()) };
    let output = call.quantize(DType::E4M3, &cpu()).unwrap();
    assert_eq!(widened(output.scale.as_ref().unwrap()), [1.0, 2.0 / 448.0, f32::INFINITY]);
    let codes = output.codes.to_vec::<E4M3>(&cpu()).unwrap();
    let is_nan = |code: &E4M3| code.to_f32().is_nan();
    assert_eq!(codes.iter().map(is_nan).collect::<Vec<_>>().iter().filter(|&&nan| nan).count(), 2);
    assert!(is_nan(&codes[5]) && is_nan(&codes[9]));
    assert!(codes[..4].iter().chain(&codes[8..9]).all(|code| code.to_f32() == 0.0));
    // Scales that are given: saturated, and IEEE for 0.
    for (scale, expected) in [(1e-3, [448.0, -448.0, 448.0]), (0.0, [448.0, -448.0, 448.0])] {
        let (x, scale) = (f32s(&[1.0, -2.0, 3e38], &[1, 1, 1, 3]), f32s(&[scale], &[1]));
        let scale = QuantizeScale::Given(scale.view());
        let output = Quantize { scale, ..Quantize::new(x.view()) };
        let output = output.quantize(DType::E4M3, &cpu()).unwrap();
        assert!(output.scale.is_none());
        assert_eq!(widened(&output.codes), expected);
    }
    let x = f32s(&[f32::NAN, 1.5, 2.5, -200.0], &[1, 1, 1, 4]);
    let one = f32s(&[1.0], &[1, 1]);
    let call = Quantize { scale: QuantizeScale::Given(one.view()), ..Quantize::new(x.view()) };
    assert_eq!(widened(&call.quantize(DType::I8, &cpu()).unwrap().codes), [0.0, 2.0, 2.0, -127.0]);
}

/// Packed sequences have scales and means of their own; rows of none stay 0.
#[test]
fn packed_sequences_are_apart() {
    let stream = cpu();
    let x = values(9 * 2 * 4, 7);
    let packed = f32s(&x, &[9, 2, 4]);
    let offsets = Tensor::from_slice(&stream, &[0, 3, 3, 8], &[4]).unwrap();
    let tokens = PackedTokens { cu_seqlens: offsets.view(), max_seqlen: 6 };
    let options = Quantize { subtract_mean: true, ..Quantize::new(packed.view()) };
    let call = Quantize { packed: Some(tokens), ..options };
    let found = call.quantize(DType::I8, &stream).unwrap();
    let (scales, means) = (widened(found.scale.as_ref().unwrap()), widened(&found.mean.unwrap()));
    assert_eq!((&scales[2..4], &means[8..16]), (&[1.0; 2][..], &[0.0; 8][..]));
    for (at, rows) in [(0, 0..3), (2, 3..8)] {
        let own = f32s(&x[rows.start * 8..rows.end * 8], &[1, rows.len(), 2, 4]);
        let alone = Quantize { x: own.view(), ..options }.quantize(DType::I8, &stream).unwrap();
        let codes = widened(&found.codes)[rows.start * 8..rows.end * 8].to_vec();
        assert_eq!(codes, widened(&alone.codes));
        assert_eq!(scales[at * 2..][..2], widened(&alone.scale.unwrap())[..]);
        assert_eq!(means[at * 8..][..8], widened(&alone.mean.unwrap())[..]);
    }
    assert_eq!(widened(&found.codes)[64..], [0.0; 8]);
}

/// The error of attention over what is quantised, and that rotation and the removal of the mean of
/// keys leave scores as they are.
#[test]
fn attention_over_codes_is_close() {
    let stream = cpu();
    let shape = [2, 60, 2, 32];
    let [q, mut k, v] = [1, 2, 3].map(|seed| values(shape.iter().product(), seed));
    // Keys with a mean that is the same for all tokens.
    k.iter_mut().enumerate().for_each(|(at, x)| *x += 4.0 * ((at % 32) as f32).sin());
    let [q, k, v] = [q, k, v].map(|x| f32s(&x, &shape));
    let (qv, kv, vv) = (q.view(), k.view(), v.view());
    let scores: Scores<View<'_>> = Mask::causal().into();
    let exact = Attention { scores, ..Attention::new(qv, kv, vv) }.forward(&stream).unwrap();
    let (exact_o, exact_lse) = (widened(&exact.o), widened(&exact.lse));
    let mut errors = Vec::new();
    for (subtract_mean, rotate) in [(false, false), (true, false), (false, true), (true, true)] {
        let of = |x, subtract_mean, rotate| {
            let call = Quantize { subtract_mean, rotate, ..Quantize::new(x) };
            call.quantize(DType::I8, &stream).unwrap()
        };
        let (q8, v8) = (of(qv, false, rotate), of(vv, false, false));
        let k8 = of(kv, subtract_mean, rotate);
        let [of_q, of_k, of_v] = [&q8, &k8, &v8].map(|x| x.scale.as_ref().map(Tensor::view));
        let call = Attention {
            scores,
            scales: OperandScales { q: of_q, k: of_k, v: of_v },
            o_dtype: Some(DType::F32),
            ..Attention::new(q8.codes.view(), k8.codes.view(), v8.codes.view())
        };
        let found = call.forward(&stream).unwrap();
        let mut lse = widened(&found.lse);
        if let Some(mean) = &k8.mean {
            let (mean, q) = (widened(mean), widened(&q));
            for (at, lse) in lse.iter_mut().enumerate() {
                let (entry, head, query) = (at / 120, at / 60 % 2, at % 60);
                let (q, mean) = (
                    &q[((entry * 60 + query) * 2 + head) * 32..][..32],
                    &mean[(entry * 2 + head) * 32..][..32],
                );
                let product: f32 = q.iter().zip(mean).map(|(q, mean)| q * mean).sum();
                *lse += product / 32f32.sqrt();
            }
        }
        let worst = |found: &[f32], exact: &[f32]| {
            found.iter().zip(exact).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max)
        };
        let error = worst(&widened(&found.o), &exact_o);
        assert!(error < 0.12 && worst(&lse, &exact_lse) < 0.12, "{error}");
        errors.push(error);
    }
    // Keys without their mean have smaller steps.
    assert!(errors[1] < errors[0] && errors[3] < errors[2], "{errors:?}");
}

/// The rotation is orthonormal, and its own inverse.
#[test]
fn rotated_rows_have_the_same_products() {
    let row = values(64, 5);
    let x = f32s(&[row.clone(), values(64, 6)].concat(), &[1, 2, 1, 64]);
    let one = f32s(&[0.02], &[1]);
    let turned = |rotate| {
        let scale = QuantizeScale::Given(one.view());
        let call = Quantize { rotate, scale, ..Quantize::new(x.view()) };
        widened(&call.quantize(DType::I8, &cpu()).unwrap().codes)
    };
    let dot = |x: &[f32]| -> f32 { x[..64].iter().zip(&x[64..]).map(|(a, b)| a * b * 1e-4).sum() };
    let (plain, rotated) = (turned(false), turned(true));
    assert!((dot(&plain) - dot(&rotated)).abs() < 0.2);
    // Exact for numbers whose sums are small integers.
    let x = f32s(&[8.0, 0.0, 0.0, 0.0], &[1, 1, 1, 4]);
    let one = f32s(&[1.0], &[1]);
    let scale = QuantizeScale::Given(one.view());
    let call = Quantize { rotate: true, scale, ..Quantize::new(x.view()) };
    assert_eq!(widened(&call.quantize(DType::I8, &cpu()).unwrap().codes), [4.0; 4]);
}

#[test]
fn threads_change_no_bits_and_strides_do_not_matter() {
    let x = f32s(&values(2 * 700 * 3 * 8, 1), &[2, 700, 3, 8]);
    let with = |threads, scale| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let call = Quantize { scale, subtract_mean: true, rotate: true, ..Quantize::new(x.view()) };
        let found = pool.install(|| call.quantize(DType::E4M3, &cpu())).unwrap();
        [found.codes, found.scale.unwrap(), found.mean.unwrap()].map(|tensor| widened(&tensor))
    };
    for scale in [QuantizeScale::Tensor, QuantizeScale::Head, QuantizeScale::Token] {
        assert_eq!(with(1, scale), with(3, scale));
        // Heads before tokens, in x and in what is written.
        let turned = x.view().permute(&[0, 2, 1, 3]).unwrap().to_vec::<f32>(&cpu()).unwrap();
        let turned = f32s(&turned, &[2, 3, 700, 8]);
        let turned = turned.view().permute(&[0, 2, 1, 3]).unwrap();
        let call = Quantize { scale, subtract_mean: true, rotate: true, ..Quantize::new(turned) };
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(&cpu(), dtype, shape).unwrap();
        let mut codes = zeros(DType::E4M3, &[2, 3, 700, 8]);
        let view = codes.view_mut().permute(&[0, 2, 1, 3]).unwrap();
        let out = QuantizeOutputMut { codes: view, scale: None, mean: None };
        call.quantize_into(out, &cpu()).unwrap();
        let found = codes.view().permute(&[0, 2, 1, 3]).unwrap().to_vec::<E4M3>(&cpu()).unwrap();
        let found: Vec<f32> = found.iter().map(|code| code.to_f32()).collect();
        assert_eq!(found, with(1, scale)[0]);
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let x = f32s(&values(2 * 3 * 2 * 6, 1), &[2, 3, 2, 6]);
    let call = Quantize::new(x.view());
    let message = |call: &Quantize<'_>, codes| call.problem(codes).unwrap_err().to_string();
    assert_eq!(message(&call, DType::BF16), "codes is bf16, expected e4m3 or e5m2 or i8");
    let rotated = Quantize { rotate: true, ..call };
    let expected = "x has shape [2, 3, 2, 6], expected a head_dim that is a power of 2, since it \
                    is rotated";
    assert_eq!(message(&rotated, DType::I8), expected);
    let wrong = f32s(&[1.0; 3], &[3]);
    let given = Quantize { scale: QuantizeScale::Given(wrong.view()), ..call };
    let expected = "scale has shape [3], expected [1] or [2 or 1, 2 or 1]";
    assert_eq!(message(&given, DType::I8), expected);
    let ints = Tensor::zeros(&cpu(), DType::I32, &[1, 1, 1, 4]).unwrap();
    let found = message(&Quantize::new(ints.view()), DType::I8);
    assert_eq!(found, "x is i32, expected f16 or bf16 or f32");
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(&cpu(), dtype, shape).unwrap();
    let (mut codes, mut scale) = (zeros(DType::I8, x.shape()), zeros(DType::F32, &[2]));
    let out =
        QuantizeOutputMut { codes: codes.view_mut(), scale: Some(scale.view_mut()), mean: None };
    let error = call.quantize_into(out, &cpu()).unwrap_err().to_string();
    assert_eq!(error, "scale has shape [2], expected [2, 2]");
    let mut mean = zeros(DType::F32, &[2, 2, 6]);
    let out =
        QuantizeOutputMut { codes: codes.view_mut(), scale: None, mean: Some(mean.view_mut()) };
    let error = call.quantize_into(out, &cpu()).unwrap_err().to_string();
    let expected = "mean has shape [2, 2, 6], expected no output, since no mean is subtracted";
    assert_eq!(error, expected);
    // Without tokens there are scales, and of sizes beyond any memory no list is made.
    let none = zeros(DType::F16, &[2, 0, 3, 6]);
    let found = Quantize { subtract_mean: true, ..Quantize::new(none.view()) };
    let found = found.quantize(DType::I8, &cpu()).unwrap();
    assert_eq!(widened(&found.scale.unwrap()), [1.0; 6]);
    assert_eq!(widened(&found.mean.unwrap()), [0.0; 36]);
    let huge = [(1 << 31) - 1, 0, 1 << 16, 6];
    let none = zeros(DType::F16, &huge);
    let call = Quantize { scale: QuantizeScale::Token, ..Quantize::new(none.view()) };
    assert_eq!(call.quantize(DType::I8, &cpu()).unwrap().codes.shape(), huge);
    assert!(Quantize::new(none.view()).quantize(DType::I8, &cpu()).is_err());
    let mut codes = zeros(DType::I8, &huge);
    let out = QuantizeOutputMut { codes: codes.view_mut(), scale: None, mean: None };
    let error = Quantize::new(none.view()).quantize_into(out, &cpu()).unwrap_err();
    assert!(error.to_string().contains("memory"), "{error}");
    // Nothing to do is done.
    let none = zeros(DType::F16, &[0, 3, 2, 6]);
    let found = Quantize::new(none.view()).quantize(DType::I8, &cpu()).unwrap();
    assert_eq!(found.codes.shape(), [0, 3, 2, 6]);
}
