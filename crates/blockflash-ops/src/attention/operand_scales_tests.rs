//! Attention over codes on the CPU: what it is to the numbers that they stand for.

use super::*;
use crate::attention::select;
use crate::fixtures::{codes, cpu, f32s, gpus, rounded, values, widened};
use crate::{Align, CuSeqlens, E4M3, Error, Mask, Operation, Scores, Tensor};
use proptest::prelude::*;

const CODES: [DType; 3] = [DType::E4M3, DType::E5M2, DType::I8];
const D: usize = 12;

/// Codes of q, k and v, and what they are to their scales.
struct Coded {
    codes: [Tensor; 3],
    scales: [Option<Tensor>; 3],
    numbers: [Tensor; 3],
    exact: [Vec<f64>; 3],
}

impl Coded {
    fn new(
        dtype: DType,
        sizes: [usize; 3],
        heads: [usize; 2],
        of: &[Option<Vec<usize>>; 3],
        seed: u64,
    ) -> Self {
        let [batch, seqlen_q, seqlen_kv] = sizes;
        let shapes = [[seqlen_q, heads[0]], [seqlen_kv, heads[1]], [seqlen_kv, heads[1]]];
        let made = [0, 1, 2].map(|at| {
            let [seqlen, heads] = shapes[at];
            let shape = [batch, seqlen, heads, D];
            let (tensor, mut numbers) = codes(dtype, seed + at as u64, &shape);
            let scale = of[at].as_ref().map(|shape| {
                let scales = values(shape.iter().product(), seed + 7 + at as u64);
                // Codes of i8 are greater by far.
                let unit = if dtype == DType::I8 { 0.02 } else { 1.0 };
                f32s(&scales.iter().map(|x| unit * (0.2 + x.abs())).collect::<Vec<_>>(), shape)
            });
            let mut exact: Vec<f64> = numbers.iter().copied().map(f64::from).collect();
            let rows = numbers.chunks_mut(D).zip(exact.chunks_mut(D));
            for (row, (numbers, exact)) in rows.enumerate() {
                let (entry, head) = (row / heads / seqlen, row % heads);
                let factor =
                    scale.as_ref().map_or(1.0, |scale| scale_of(scale, entry, head, heads));
                numbers.iter_mut().for_each(|x| *x *= factor);
                exact.iter_mut().for_each(|x| *x *= f64::from(factor));
            }
            (tensor, scale, f32s(&numbers, &shape), exact)
        });
        let [q, k, v] = made;
        Self {
            codes: [q.0, k.0, v.0],
            scales: [q.1, k.1, v.1],
            numbers: [q.2, k.2, v.2],
            exact: [q.3, k.3, v.3],
        }
    }

    fn simple(dtype: DType) -> Self {
        Self::new(dtype, [2, 5, 40], [4, 2], &[const { None }; 3], 3)
    }

    fn call(&self) -> Attention<'_> {
        let [q, k, v] = self.codes.each_ref().map(Tensor::view);
        let [of_q, of_k, of_v] =
            self.scales.each_ref().map(|scale| scale.as_ref().map(Tensor::view));
        Attention { scales: OperandScales { q: of_q, k: of_k, v: of_v }, ..Attention::new(q, k, v) }
    }

    fn of_numbers(&self) -> Attention<'_> {
        let [q, k, v] = self.numbers.each_ref().map(Tensor::view);
        Attention::new(q, k, v)
    }
}

/// o and lse of 4 and 2 heads in f64, by the definition.
fn reference(
    coded: &Coded,
    scores: &Scores<View<'_>>,
    [batch, seqlen_q, seqlen_kv]: [usize; 3],
) -> [Vec<f64>; 2] {
    let floats = |view: View<'_>| view.to_vec::<f32>(&cpu()).unwrap();
    let (sink, alibi) = (scores.sink.map(floats), scores.alibi.map(floats));
    let scale = scores.softmax_scale.map_or(1.0 / (D as f64).sqrt(), f64::from);
    let [q, k, v] = &coded.exact;
    let mut o = vec![0.0; q.len()];
    let mut lse = Vec::new();
    for (b, h, i) in
        (0..batch).flat_map(|b| (0..4).flat_map(move |h| (0..seqlen_q).map(move |i| (b, h, i))))
    {
        let row = ((b * seqlen_q + i) * 4 + h) * D;
        let key = |j: usize| ((b * seqlen_kv + j) * 2 + h / 2) * D;
        let score = |j: usize| {
            let dot: f64 = q[row..][..D].iter().zip(&k[key(j)..]).map(|(q, k)| q * k).sum();
            let score = dot * scale;
            let capped = scores.softcap.map(f64::from).map(|cap| cap * (score / cap).tanh());
            let distance = (i + seqlen_kv).abs_diff(seqlen_q + j) as f64;
            let slope = alibi.as_ref().map_or(0.0, |slopes| f64::from(slopes[h]));
            capped.unwrap_or(score) - slope * distance
        };
        let keys = scores.mask.visible(i, seqlen_q, seqlen_kv);
        let all: Vec<f64> = keys.clone().map(score).collect();
        let logit = sink.as_ref().map(|sink| f64::from(sink[h]));
        let most = all.iter().copied().chain(logit).fold(f64::NEG_INFINITY, f64::max);
        if most == f64::NEG_INFINITY {
            lse.push(most);
            continue;
        }
        let sum: f64 = all.iter().copied().chain(logit).map(|x| (x - most).exp()).sum();
        lse.push(most + sum.ln());
        for (j, score) in keys.zip(all) {
            let p = (score - most).exp() / sum;
            o[row..][..D].iter_mut().zip(&v[key(j)..]).for_each(|(o, v)| *o += p * v);
        }
    }
    [o, lse]
}

/// The scale of a sequence and a head, by the documented shapes.
fn scale_of(scale: &Tensor, entry: usize, head: usize, heads: usize) -> f32 {
    let scales = scale.to_vec::<f32>(&cpu()).unwrap();
    let &[entries, columns] = scale.shape() else { return scales[0] };
    let entry = if entries == 1 { 0 } else { entry };
    // Heads of q may share the scales of those of k.
    scales[entry * columns + head / (heads / columns)]
}

/// o and lse.
fn run(call: &Attention<'_>) -> [Vec<f32>; 2] {
    let output = call.forward(&cpu()).unwrap();
    [widened(&output.o), widened(&output.lse)]
}

fn assert_close(found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    let finite = expected.iter().filter(|x| x.is_finite());
    let limit = 3e-5 * finite.fold(1f64, |most, x| most.max(x.abs()));
    for (&found, &expected) in found.iter().zip(expected) {
        let found = f64::from(found);
        let close = (found - expected).abs() <= limit;
        assert!(close || found == expected, "{found} instead of {expected}");
    }
}

/// Shapes of scales of 2 sequences and these numbers of heads.
fn shapes(heads: &'static [usize]) -> impl Strategy<Value = Option<Vec<usize>>> {
    let extent = |extents: Vec<usize>| prop::sample::select(extents);
    let heads = [&[1], heads].concat();
    prop_oneof![
        Just(None),
        Just(Some(vec![1])),
        (extent(vec![1, 2]), extent(heads)).prop_map(|(a, b)| Some(vec![a, b])),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    /// Attention over codes is that to the numbers that they stand for, in f64, with few and many
    /// rows, for scales of any shape and all options.
    #[test]
    fn codes_stand_for_numbers(
        dtype in prop::sample::select(&CODES[..]),
        seqlens in (1usize..70, 1usize..300),
        of in (shapes(&[4, 2]), shapes(&[2]), shapes(&[2])),
        mask in prop::sample::select(vec![
            Mask::Full,
            Mask::causal(),
            Mask::Window { left: Some(20), right: Some(3), align: Align::TopLeft },
        ]),
        (softcap, sink, alibi, packed) in any::<(bool, bool, bool, bool)>(),
        seed in 0u64..1000,
    ) {
        let stream = cpu();
        let coded = Coded::new(dtype, [2, seqlens.0, seqlens.1], [4, 2], &of.into(), seed);
        let (sinks, slopes) = (f32s(&values(4, seed), &[4]), f32s(&[0.1, 0.2, 0.0, 0.3], &[4]));
        let scores = Scores {
            // Products of codes of i8 are large.
            softmax_scale: (dtype == DType::I8).then_some(1e-4),
            softcap: softcap.then_some(5.0),
            sink: sink.then(|| sinks.view()),
            alibi: alibi.then(|| slopes.view()),
            ..mask.into()
        };
        let offsets = [seqlens.0, seqlens.1].map(|length| {
            Tensor::from_slice(&stream, &[0, length as i32, 2 * length as i32], &[3]).unwrap()
        });
        let call = coded.call();
        let [q, k, v] = [call.q, call.k, call.v]
            .map(|view| if packed { view.flatten(0..2).unwrap() } else { view });
        let cu_seqlens = packed.then(|| CuSeqlens {
            q: offsets[0].view(),
            kv: offsets[1].view(),
            max_seqlen_q: seqlens.0,
            max_seqlen_kv: seqlens.1,
        });
        let o_dtype = Some(DType::F32);
        let call = Attention { q, k, v, scores, cu_seqlens, o_dtype, ..call };
        let ([o, lse], [expected_o, expected_lse]) =
            (run(&call), reference(&coded, &scores, [2, seqlens.0, seqlens.1]));
        assert_close(&o, &expected_o);
        // Packed, heads come before sequences.
        let rows = expected_lse.chunks(seqlens.0);
        let packed_lse = (0..4).flat_map(|head| rows.clone().skip(head).step_by(4)).flatten();
        let packed_lse: Vec<f64> = packed_lse.copied().collect();
        assert_close(&lse, if packed { &packed_lse } else { &expected_lse });
    }
}

/// The output is bf16 unless another type is asked for, also beside 16-bit q.
#[test]
fn outputs_have_the_type_that_is_asked_for() {
    let coded = Coded::simple(DType::E4M3);
    let q = rounded(DType::BF16, &values(5 * 2 * D, 1), &[1, 5, 2, D]);
    let [codes, floats] = [coded.call(), Attention::new(q.view(), q.view(), q.view())];
    for (call, default) in [(codes, DType::BF16), (floats, DType::BF16)] {
        let exact = Attention { o_dtype: Some(DType::F32), ..call };
        let exact = exact.forward(&cpu()).unwrap().o;
        for o_dtype in [None, Some(DType::F16), Some(DType::BF16), Some(DType::F32)] {
            let o = Attention { o_dtype, ..call }.forward(&cpu()).unwrap().o;
            let dtype = o_dtype.unwrap_or(default);
            assert_eq!(o.dtype(), dtype);
            assert_eq!(widened(&o), widened(&rounded(dtype, &widened(&exact), exact.shape())));
        }
    }
}

/// Scales of any value follow IEEE, and touch neither other heads nor rows that attend nothing.
#[test]
fn hostile_scales_are_arithmetic() {
    for (seqlen_q, dtype) in [(1, DType::E4M3), (30, DType::I8)] {
        let coded = Coded::new(dtype, [1, seqlen_q, 20], [2, 2], &[const { None }; 3], 5);
        let mask = Mask::Window { left: None, right: Some(0), align: Align::BottomRight };
        let out = |k: f32, v: f32| {
            let (k, v) = (f32s(&[k, 0.5], &[1, 2]), f32s(&[v, 0.5], &[1, 2]));
            let scales = OperandScales { q: None, k: Some(k.view()), v: Some(v.view()) };
            let call = coded.call();
            let call = Attention { scales, scores: mask.into(), o_dtype: Some(DType::F32), ..call };
            let [o, _] = run(&call);
            let of_head = |head| {
                let rows = o.chunks(D).skip(head).step_by(2);
                rows.filter(|row| row.iter().any(|&x| x != 0.0)).flatten().copied().collect()
            };
            [of_head(0), of_head(1)] as [Vec<f32>; 2]
        };
        let [first, second] = out(0.5, 2.0);
        let negated: Vec<f32> = first.iter().map(|x| -x).collect();
        assert_eq!(out(0.5, -2.0), [negated, second.clone()]);
        assert_eq!(out(0.5, 0.0), [vec![], second.clone()]);
        // Without scores all keys weigh the same.
        assert!(out(0.0, 1.0)[0].iter().all(|x| x.is_finite()));
        for hostile in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let [of_k, other] = out(hostile, 1.0);
            assert!(of_k.iter().all(|x| x.is_nan()), "{hostile}: {of_k:?}");
            assert_eq!(other, second);
            assert!(out(1.0, hostile)[0].iter().all(|x| !x.is_finite()));
        }
        // Of 30 queries the first 10 see no key.
        let nan = f32s(&[f32::NAN], &[1]);
        let scales = OperandScales { v: Some(nan.view()), ..OperandScales::NONE };
        let [o, lse] = run(&Attention { scales, scores: mask.into(), ..coded.call() });
        let unseen = seqlen_q.saturating_sub(20);
        assert!(o[..unseen * 2 * D].iter().all(|&x| x == 0.0));
        let sink = f32s(&[1.0, 2.0], &[2]);
        let scores = Scores { sink: Some(sink.view()), ..mask.into() };
        let [o, _] = run(&Attention { scales, scores, ..coded.call() });
        assert!(o[..unseen * 2 * D].iter().all(|&x| x == 0.0), "with a sink, too");
        assert!(lse[..unseen].iter().all(|&x| x == f32::NEG_INFINITY));
    }
}

/// NaN in a key or value that no query attends reaches nothing.
#[test]
fn what_is_masked_contributes_nothing() {
    for seqlen_q in [2, 40] {
        let coded = Coded::new(DType::E4M3, [1, seqlen_q, 50], [2, 1], &[const { None }; 3], 5);
        let mask = Mask::Window { left: Some(5), right: Some(0), align: Align::TopLeft };
        let [q, k, v] = coded.codes.each_ref().map(Tensor::view);
        let expected = run(&Attention { scores: mask.into(), ..Attention::new(q, k, v) });
        let poisoned = [k, v].map(|view| {
            let mut codes = view.to_vec::<E4M3>(&cpu()).unwrap();
            codes[seqlen_q * D..].fill(E4M3(0x7f));
            Tensor::from_slice(&cpu(), &codes, view.shape()).unwrap()
        });
        let [k, v] = poisoned.each_ref().map(Tensor::view);
        assert_eq!(run(&Attention { scores: mask.into(), ..Attention::new(q, k, v) }), expected);
    }
}

/// Bits do not depend on the number of threads.
#[test]
fn threads_change_no_bits() {
    let of = [Some(vec![2, 4]), Some(vec![2, 2]), Some(vec![1, 2])];
    let coded = Coded::new(DType::E4M3, [2, 150, 300], [4, 2], &of, 9);
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| run(&Attention { o_dtype: Some(DType::F32), ..coded.call() }))
    };
    let bits = |threads| with(threads).map(|x| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
    assert_eq!(bits(1), bits(3));
}

#[test]
fn what_does_not_fit_is_named() {
    let coded = Coded::simple(DType::E4M3);
    let message = |call: Attention<'_>| call.problem().unwrap_err().to_string();
    let call = coded.call();
    let other = Coded::simple(DType::E5M2);
    let found = message(Attention { k: other.call().k, ..call });
    assert_eq!(found, "k is e5m2, expected e4m3");
    let wrong = f32s(&[1.0; 6], &[2, 3]);
    let (q, k) = (Some(wrong.view()), Some(wrong.view()));
    let found = message(Attention { scales: OperandScales { q, ..call.scales }, ..call });
    assert_eq!(found, "scales.q has shape [2, 3], expected [1] or [2 or 1, 4 or 2 or 1]");
    let found = message(Attention { scales: OperandScales { k, ..call.scales }, ..call });
    assert_eq!(found, "scales.k has shape [2, 3], expected [1] or [2 or 1, 2 or 1]");
    let half = rounded(DType::F16, &[1.0], &[1]);
    let v = Some(half.view());
    let found = message(Attention { scales: OperandScales { v, ..call.scales }, ..call });
    assert_eq!(found, "scales.v is f16, expected f32");
    let one = f32s(&[1.0], &[1]);
    let v = Some(one.view());
    let scales = OperandScales { v, ..OperandScales::NONE };
    let found = message(Attention { scales, ..coded.of_numbers() });
    assert_eq!(found, "q is f32, expected e4m3 or e5m2 or i8, since scales.v is given");
    let found = message(Attention { o_dtype: Some(DType::E4M3), ..call });
    assert_eq!(found, "o_dtype is e4m3, expected f16 or bf16 or f32");
}

/// Scales are verified like other data that is read at each call.
#[test]
fn checks_name_a_hostile_scale() {
    let coded = Coded::simple(DType::I8);
    for hostile in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let scale = f32s(&[1.0, 1.0, 1.0, hostile], &[2, 2]);
        let scales = OperandScales { q: Some(scale.view()), ..OperandScales::NONE };
        let call = Attention { scales, ..coded.call() };
        let mut o = call.forward(&cpu()).unwrap().o;
        let error = call.check(&(o.view_mut(), None), &cpu()).unwrap_err();
        assert!(matches!(error, Error::InvalidScale { what: "scales.q", .. }), "{error}");
    }
}

#[test]
fn gpus_and_gradients_say_what_is_missing() {
    let coded = Coded::simple(DType::E4M3);
    let call = coded.call();
    for gpu in gpus() {
        for (dtype, instead) in [
            (DType::E4M3, "the kernels of Hopper take: convert them to f16 or bf16"),
            (
                DType::E5M2,
                "only the CPU takes: convert them to f16 or bf16, for Hopper also to e4m3",
            ),
            (DType::I8, "only the CPU takes: convert them to f16 or bf16, for Hopper also to e4m3"),
        ] {
            if dtype == DType::E4M3 && gpu.compute_capability.major == 9 {
                continue;
            }
            let problem = Coded::simple(dtype).call().problem().unwrap();
            let message = select(&problem, &gpu).unwrap_err().to_string();
            let expected = format!(
                "kernels take f16 and bf16, but the tensors are {dtype}, which {instead}, or \
                 attend to a cache of 8 bits"
            );
            assert!(message.ends_with(&expected), "{message}");
        }
    }
    let output = call.forward(&cpu()).unwrap();
    let error = call.backward(&output, output.o.view(), &cpu()).unwrap_err().to_string();
    assert_eq!(error, "q is e4m3, expected f16 or bf16 or f32, since codes have no gradients");
    let call = Attention { o_dtype: Some(DType::BF16), ..coded.of_numbers() };
    let output = call.forward(&cpu()).unwrap();
    let error = call.backward(&output, output.o.view(), &cpu()).unwrap_err().to_string();
    assert_eq!(error, "o_dtype is bf16, expected f32, as q, since gradients are asked for");
}
