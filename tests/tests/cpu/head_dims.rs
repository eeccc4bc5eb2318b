//! Values, and so outputs, with another head dimension than queries and keys: the CPU backend
//! against the oracle, and against the same problem with all of them padded to one.

use blockflash_cases::case::{AttentionData, AttentionOperands, Case, Operands};
use blockflash_cases::io::Array;
use blockflash_ops::{
    Attention, AttentionBackward, DType, HeadDims, Mask, Scores, Stream, Tensor, View,
};
use blockflash_tests::host::cpu;
use blockflash_tests::number::normal;

/// Of models, and odd ones.
const HEAD_DIMS: [[usize; 2]; 9] =
    [[512, 256], [192, 128], [64, 128], [72, 40], [576, 512], [13, 7], [7, 13], [1, 9], [5, 1]];

/// Runs operands and compares what they compute with the oracle.
fn check(what: &str, operands: &mut dyn Operands, stream: &Stream) {
    operands.launch(None, stream).unwrap();
    let results = operands.results(None, stream).unwrap();
    let results: Vec<Array> = results.into_iter().map(|(_, array)| array).collect();
    let compared = operands.compare(&results, 3, &|_| ()).unwrap();
    assert!(!compared.is_empty(), "{what}");
    for (at, comparison) in compared.iter().enumerate() {
        assert!(comparison.checked > 0 && comparison.passed(), "{what}, {at}: {comparison:?}");
    }
}

fn check_ids(ids: &[String]) {
    let stream = cpu();
    for id in ids {
        let case: Case = id.parse().unwrap_or_else(|error| panic!("{id}: {error}"));
        assert_eq!(case.to_string(), *id);
        check(id, &mut *case.operands(&stream, 5).unwrap(), &stream);
    }
}

#[test]
fn forward_and_backward_agree_with_the_oracle() {
    let mut ids = Vec::new();
    for (at, [qk, v]) in HEAD_DIMS.into_iter().enumerate() {
        let dtype = ["f16", "bf16"][at % 2];
        for pass in ["", "bwd_"] {
            ids.push(format!("{pass}b2_s70_h2_d{qk}v{v}_causal_{dtype}"));
            ids.push(format!("{pass}b1_q33_kv300_h4kv2_d{qk}v{v}_window9_{dtype}"));
            ids.push(format!("{pass}varlen40+3x2+1_h4kv1_d{qk}v{v}_full_{dtype}"));
            ids.push(format!("{pass}b1_s256_h2_d{qk}v{v}_q64kv64_d0.5_uniform_causal_{dtype}"));
        }
    }
    check_ids(&ids);
}

#[test]
fn attention_to_a_cache_agrees_with_the_oracle() {
    let mut ids = Vec::new();
    for (at, [qk, v]) in HEAD_DIMS.into_iter().enumerate() {
        let dtype = ["bf16", "f16"][at % 2];
        for rest in ["contiguous_equal", "page16_power", "page16top2_full"] {
            ids.push(format!("decode_b3_q2_kv96_h4kv2_d{qk}v{v}_{rest}_{dtype}"));
        }
    }
    check_ids(&ids);
}

/// Whose values are the first columns of the keys.
#[test]
fn attention_to_a_latent_cache_agrees_with_the_oracle() {
    let mut ids = Vec::new();
    for (at, [qk, v]) in [[576, 512], [512, 512], [24, 16], [13, 7]].into_iter().enumerate() {
        let dtype = ["bf16", "f16", "f32"][at % 3];
        for rest in [
            "b3_q1_kv160_h16kv1_{}_page16_power",
            "b3_q4_kv96_h128kv1_{}_page32_equal",
            "b2_q8_kv70_h8kv1_{}_contiguous_full",
            "b2_q8_kv96_h8kv1_{}_page16_equal_window9",
        ] {
            let rest = rest.replace("{}", &format!("d{}", blockflash_ops::HeadDims { qk, v }));
            ids.push(format!("decode_{rest}_latent_{dtype}"));
        }
    }
    check_ids(&ids);
}

#[test]
fn sinks_and_caps_agree_with_the_oracle() {
    let stream = cpu();
    for [qk, v] in HEAD_DIMS {
        let id = format!("b2_q20_kv50_h4kv2_d{qk}v{v}_causal_f16");
        let case: Case = id.parse().unwrap();
        let data = AttentionData::random(&case.attention().unwrap().problem(), 7).unwrap();
        let sink = Array::new(&[4], vec![0.5f32, -1.0, 2.0, f32::NEG_INFINITY]).unwrap();
        let scores = Scores {
            softmax_scale: Some(0.3),
            softcap: Some(1.5),
            sink: Some(sink),
            ..Mask::causal().into()
        };
        check(&id, &mut AttentionOperands::new(scores, data, true, &stream).unwrap(), &stream);
    }
}

/// `[…, width]` with rows of more elements, which are 0.
fn padded(values: &[f32], width: usize, to: usize) -> Vec<f32> {
    let row = |row: &[f32]| row.iter().copied().chain(vec![0.0; to - width]).collect::<Vec<_>>();
    values.chunks_exact(width).flat_map(row).collect()
}

/// Output, log-sum-exp and all gradients of a call with every option, in rows of these widths.
fn all(
    [q, k, v, d_o]: [&[f32]; 4],
    HeadDims { qk, v: width }: HeadDims,
    scores: Scores<View<'_>>,
) -> [Vec<f32>; 6] {
    let stream = cpu();
    let view = |data, sizes: [usize; 3], width| {
        View::from_slice(data, &[sizes[0], sizes[1], sizes[2], width]).unwrap()
    };
    let attention = Attention {
        scores,
        ..Attention::new(
            view(q, [2, 9, 4], qk),
            view(k, [2, 30, 2], qk),
            view(v, [2, 30, 2], width),
        )
    };
    let output = attention.forward(&stream).unwrap();
    assert_eq!(output.o.shape(), [2, 9, 4, width]);
    let d_o = view(d_o, [2, 9, 4], width);
    let call = AttentionBackward { attention, o: output.o.view(), lse: output.lse.view(), d_o };
    let gradients = call.backward(&stream).unwrap();
    assert_eq!(gradients.dq.shape(), [2, 9, 4, qk]);
    assert_eq!(gradients.dk.shape(), [2, 30, 2, qk]);
    assert_eq!(gradients.dv.shape(), [2, 30, 2, width]);
    let d_sink = gradients.d_sink.unwrap();
    let read = |tensor: &Tensor| tensor.to_vec::<f32>(&stream).unwrap();
    let tensors = [&output.o, &output.lse, &gradients.dq, &gradients.dk, &gradients.dv, &d_sink];
    tensors.map(read)
}

/// Zeros behind rows change neither scores nor values, so all results are those of one head_dim.
#[test]
fn padding_to_one_head_dim_changes_nothing() {
    for [qk, v] in HEAD_DIMS {
        let widest = qk.max(v);
        let [q, k, d_o] = [(1, 72 * qk), (2, 120 * qk), (3, 72 * v)].map(|(s, n)| normal(s, n));
        let (values, sink) = (normal(4, 120 * v), [0.5, -1.0, 2.0, 0.0]);
        let scores = Scores {
            softmax_scale: Some(1.0 / (qk as f32).sqrt()),
            softcap: Some(2.0),
            sink: Some(View::from_slice(&sink, &[4]).unwrap()),
            ..Mask::causal().into()
        };
        let found = all([&q, &k, &values, &d_o], HeadDims { qk, v }, scores);
        let [q, k] = [&q, &k].map(|rows| padded(rows, qk, widest));
        let [values, d_o] = [&values, &d_o].map(|rows| padded(rows, v, widest));
        let expected = all([&q, &k, &values, &d_o], HeadDims::all(widest), scores);
        let widths = [Some(v), None, Some(qk), Some(qk), Some(v), None];
        for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let found = widths[at].map_or(found.clone(), |width| padded(found, width, widest));
            for (found, expected) in found.iter().zip(expected) {
                let close = (found - expected).abs() <= 2e-5 * (1.0 + expected.abs());
                assert!(close, "{qk}v{v}, {at}: {found}, expected {expected}");
            }
        }
    }
}

#[test]
fn kernels_take_two_head_dims_and_refuse_two_types() {
    use blockflash_ops::{
        AttentionBackwardProblem, AttentionProblem, ElementTypes, attention, attention_bwd,
    };
    let gpu = crate::select::fabricated("H100", (9, 0), 227);
    let problem =
        |types, head_dims| AttentionProblem::contiguous(types, [1, 64, 64], [2, 2], head_dims);
    let f16 = ElementTypes::all(DType::F16);
    for [qk, v] in HEAD_DIMS {
        let unequal = problem(f16, HeadDims { qk, v });
        let forward = attention::select(&unequal, &gpu);
        let backward = attention_bwd::select(&AttentionBackwardProblem::of(unequal), &gpu);
        if qk.max(v) <= 512 && qk % 8 == 0 && v % 8 == 0 {
            assert!(forward.is_ok() && backward.is_ok(), "{qk}, {v}");
            continue;
        }
        let reason = format!("head_dim {qk} of q and k, {v} of v: kernels take multiples of 8");
        for error in [forward, backward].map(|selected| selected.unwrap_err().to_string()) {
            assert!(error.contains(&reason), "{error}");
        }
    }
    let types = ElementTypes { kv: DType::BF16, ..f16 };
    let error = attention::select(&problem(types, HeadDims::all(64)), &gpu).unwrap_err();
    let reason = "q is f16, k and v are bf16 and o is f16: kernels take one type";
    assert!(error.to_string().contains(reason), "{error}");
}
