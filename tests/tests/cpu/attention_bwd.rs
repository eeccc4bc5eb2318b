//! Gradients of attention on the CPU against the oracle.

use blockflash_ops::attention::{Align, Mask, Scores};
use blockflash_ops::{DType, Tensor};
use blockflash_tests::attention::{
    AttentionCase, Choice, Lengths, Limits, attention_cases, block_cases, block_sparse_cases,
    edge_cases, many_heads, special_cases, with_terms,
};
use blockflash_tests::attention_bwd::{
    BackwardData, BackwardInputs, BackwardOutputs, BackwardReference, run_case,
};
use blockflash_tests::host::{all_pass, cpu, download};
use blockflash_tests::number::decode;
use blockflash_tests::property;
use blockflash_tests::tolerance::check;
use proptest::strategy::Strategy;

fn run_all(cases: Vec<AttentionCase>) {
    all_pass(&cases, |case, stream| run_case(case, Choice::Selected, stream));
}

fn gradients(case: &AttentionCase) -> [Vec<u32>; 5] {
    let stream = cpu();
    let inputs = BackwardInputs::upload(case, &BackwardData::generate(case), &stream).unwrap();
    let mut outputs = BackwardOutputs::poisoned(&inputs, &stream).unwrap();
    outputs.launch(&inputs, Choice::Selected, &stream).unwrap();
    outputs.bits(&stream).unwrap()
}

#[test]
fn random_cases_in_half_precision() {
    let limits = Limits::in_half_precision(2_000_000);
    let stream = cpu();
    property::check(100, attention_cases(limits), |case| {
        run_case(&case, Choice::Selected, &stream).map(drop)
    });
}

#[test]
fn random_cases_that_only_the_cpu_takes() {
    let limits = Limits::of_the_cpu(1_000_000);
    let stream = cpu();
    property::check(80, attention_cases(limits), |case| {
        run_case(&case, Choice::Selected, &stream).map(drop)
    });
}

#[test]
fn random_block_masks() {
    let limits = Limits {
        dtypes: vec![DType::F16, DType::BF16, DType::F32],
        head_dims: vec![8, 20, 64],
        seqlen: 300,
        alignment: 1,
        work: 1_000_000,
    };
    let stream = cpu();
    property::check(80, block_sparse_cases(limits), |case| {
        run_case(&case, Choice::Selected, &stream).map(drop)
    });
}

/// A bias and ALiBi, alone, together, and with every other option.
#[test]
fn random_cases_with_terms() {
    let stream = cpu();
    let check = |cases, strategy: proptest::strategy::BoxedStrategy<AttentionCase>| {
        property::check(cases, with_terms(strategy), |case| {
            run_case(&case, Choice::Selected, &stream).map(drop)
        });
    };
    check(80, attention_cases(Limits::in_half_precision(1_000_000)).boxed());
    check(80, attention_cases(Limits::of_the_cpu(500_000)).boxed());
    check(40, block_sparse_cases(Limits::in_half_precision(500_000)).boxed());
}

#[test]
fn tile_edges() {
    run_all(edge_cases(DType::BF16, &[8, 24], 64, 64));
    run_all(edge_cases(DType::F32, &[5], 128, 128));
}

#[test]
fn special_cases_of_every_mask() {
    run_all(special_cases(DType::F16, 32, 32));
    run_all(special_cases(DType::F32, 9, 32));
}

#[test]
fn block_masks_of_every_kind() {
    run_all(block_cases(DType::F16, 8));
}

#[test]
fn many_heads_and_steps_of_queries_and_keys() {
    run_all(many_heads(DType::F16, 8));
    run_all(vec![
        AttentionCase::simple(DType::BF16, (2, 1), 16, (1, 1500)),
        AttentionCase::simple(DType::F16, (2, 1), 16, (1500, 1)),
        AttentionCase {
            scores: Mask::causal().into(),
            ..AttentionCase::simple(DType::F16, (2, 1), 16, (600, 700))
        },
    ]);
}

/// The gradients of the library's own output, beginning to end, and the log-sum-exp with a sink.
#[test]
fn after_the_forward_pass() {
    let stream = cpu();
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        let case = AttentionCase {
            scores: Scores {
                mask: Mask::causal(),
                sink: Some(()),
                softcap: Some(20.0),
                ..Scores::default()
            },
            ..AttentionCase::simple(dtype, (4, 2), 32, (150, 200))
        };
        let mut data = BackwardData::generate(&case);
        let inputs = BackwardInputs::upload(&case, &data, &stream).unwrap();
        let call = inputs.backward();
        let output = call.attention.forward(&stream).unwrap();
        let gradients = call.attention.backward(&output, call.d_o, &stream).unwrap();

        let values = |tensor: &Tensor| -> Vec<f32> {
            let bits = download(&stream, tensor).unwrap();
            bits.into_iter().map(|bits| decode(tensor.dtype(), bits)).collect()
        };
        (data.o, data.lse) = (values(&output.o), values(&output.lse));
        let reference = BackwardReference::compute(&case, &data);
        let rounding = reference.rounding(&case);
        for (i, tensor) in [&gradients.dq, &gradients.dk, &gradients.dv].into_iter().enumerate() {
            let got: Vec<f64> = values(tensor).into_iter().map(f64::from).collect();
            let name = |at: usize| format!("gradient {i}, element {at} in {dtype}");
            check(&got, &reference.qkv[i], &rounding[i], name).unwrap();
        }
        let d_sink: Vec<f64> =
            values(&gradients.d_sink.unwrap()).into_iter().map(f64::from).collect();
        let rounding = reference.sink_rounding(&case);
        check(&d_sink, &reference.d_sink, &rounding, |head| format!("d_sink[{head}]")).unwrap();
    }
}

#[test]
fn masks_that_mean_the_same_give_the_same_bits() {
    let base = AttentionCase::simple(DType::F16, (4, 2), 48, (90, 90));
    let with = |mask: Mask| gradients(&AttentionCase { scores: mask.into(), ..base.clone() });
    let window = |left, right, align| Mask::Window { left, right, align };
    let (top, bottom) = (Align::TopLeft, Align::BottomRight);
    assert_eq!(with(Mask::Full), with(window(None, None, top)));
    assert_eq!(with(Mask::Full), with(window(Some(90), Some(90), bottom)));
    let causal = with(Mask::Causal { align: bottom });
    assert_eq!(causal, with(Mask::Causal { align: top }), "the lengths are equal");
    assert_eq!(causal, with(window(None, Some(0), top)));
    assert_ne!(causal, with(Mask::Full));
    // A packed batch of equal lengths is a dense batch.
    let dense = AttentionCase {
        lengths: Lengths::Dense { batch: 3, seqlen_q: 20, seqlen_kv: 30 },
        ..base.clone()
    };
    let packed = AttentionCase {
        lengths: Lengths::Packed { lengths: vec![(20, 30); 3], slack: (0, 0) },
        ..base.clone()
    };
    assert_eq!(gradients(&dense), gradients(&packed));
}

#[test]
fn repeats_are_equal_bit_by_bit() {
    let case = AttentionCase {
        lengths: Lengths::Dense { batch: 2, seqlen_q: 150, seqlen_kv: 333 },
        scores: Scores { mask: Mask::causal(), sink: Some(()), ..Scores::default() },
        ..AttentionCase::simple(DType::BF16, (6, 2), 40, (0, 0))
    };
    let stream = cpu();
    let inputs = BackwardInputs::upload(&case, &BackwardData::generate(&case), &stream).unwrap();
    let run = || {
        let mut outputs = BackwardOutputs::poisoned(&inputs, &stream).unwrap();
        outputs.launch(&inputs, Choice::Selected, &stream).unwrap();
        outputs.bits(&stream).unwrap()
    };
    let first = run();
    for repeat in 1..20 {
        assert!(run() == first, "repeat {repeat} differs");
    }
    for threads in [1, 2, 3, 7] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert!(pool.install(run) == first, "{threads} threads differ");
    }
}
