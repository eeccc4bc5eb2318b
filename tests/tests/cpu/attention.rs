//! The CPU backend of attention against the oracle.

use blockflash_ops::DType;
use blockflash_ops::attention::{Align, Mask, Scores};
use blockflash_tests::attention::{
    AttentionCase, AttentionData, AttentionInputs, AttentionOutputs, Choice, Codes, Content,
    Lengths, Limits, MoreContent, attention_cases, block_sparse_cases, edge_cases, many_heads,
    run_case, special_cases, with_terms,
};
use blockflash_tests::host::{all_pass, cpu};
use blockflash_tests::property;
use proptest::strategy::Strategy;

fn run_all(cases: Vec<AttentionCase>) {
    all_pass(&cases, |case, stream| run_case(case, Choice::Selected, stream));
}

fn outputs(case: &AttentionCase) -> [Vec<u32>; 2] {
    let stream = cpu();
    let inputs = AttentionInputs::upload(case, &AttentionData::generate(case), &stream).unwrap();
    let mut outputs = AttentionOutputs::poisoned(case, &stream).unwrap();
    outputs.launch(&inputs, Choice::Selected, &stream).unwrap();
    outputs.bits(&stream).unwrap()
}

#[test]
fn random_cases_in_half_precision() {
    let limits = Limits::in_half_precision(4_000_000);
    let stream = cpu();
    property::check(160, attention_cases(limits), |case| {
        run_case(&case, Choice::Selected, &stream).map(drop)
    });
}

#[test]
fn random_cases_that_only_the_cpu_takes() {
    let limits = Limits::of_the_cpu(2_000_000);
    let stream = cpu();
    property::check(80, attention_cases(limits), |case| {
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
    check(120, attention_cases(Limits::in_half_precision(2_000_000)).boxed());
    check(120, attention_cases(Limits::of_the_cpu(1_000_000)).boxed());
    check(60, block_sparse_cases(Limits::in_half_precision(1_000_000)).boxed());
}

#[test]
fn tile_edges() {
    // The tile sizes of the backend are its own affair; powers of two and their neighbours are a
    // good guess.
    run_all(edge_cases(DType::BF16, &[40, 64], 64, 64));
    run_all(edge_cases(DType::F16, &[8, 72], 32, 128));
}

#[test]
fn special_cases_of_every_mask() {
    run_all(special_cases(DType::F16, 64, 32));
    run_all(special_cases(DType::BF16, 24, 32));
}

#[test]
fn many_heads_and_a_long_row() {
    run_all(many_heads(DType::F16, 8));
    run_all(vec![
        AttentionCase::simple(DType::BF16, (2, 1), 128, (1, 5000)),
        AttentionCase {
            scores: Mask::causal().into(),
            ..AttentionCase::simple(DType::F16, (1, 1), 64, (700, 700))
        },
    ]);
}

#[test]
fn masks_that_mean_the_same_give_the_same_bits() {
    let base = AttentionCase::simple(DType::F16, (4, 2), 48, (90, 90));
    let with = |mask: Mask| outputs(&AttentionCase { scores: mask.into(), ..base.clone() });
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
    assert_eq!(outputs(&dense)[0], outputs(&packed)[0]);
}

#[test]
fn repeats_are_equal_bit_by_bit() {
    let case = AttentionCase {
        lengths: Lengths::Dense { batch: 2, seqlen_q: 150, seqlen_kv: 333 },
        scores: Scores { mask: Mask::causal(), sink: Some(()), ..Scores::default() },
        ..AttentionCase::simple(DType::BF16, (6, 2), 72, (0, 0))
    };
    let first = outputs(&case);
    for repeat in 1..30 {
        assert!(outputs(&case) == first, "repeat {repeat} differs");
    }
}

#[test]
fn threads_do_not_disturb_each_other() {
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            scope.spawn(move || {
                for seed in 0..4 {
                    let case = AttentionCase {
                        seed: 10 * thread + seed,
                        scores: Mask::causal().into(),
                        ..AttentionCase::simple(DType::F16, (2, 2), 64, (65 + thread as usize, 130))
                    };
                    run_case(&case, Choice::Selected, &cpu())
                        .unwrap_or_else(|error| panic!("{error}"));
                }
            });
        }
    });
}

/// q, k and v in e4m3, with scales of every kind: probabilities are not rounded here, so errors are
/// below those of the plain computation.
#[test]
fn random_cases_of_codes() {
    let stream = cpu();
    let run = |(case, seed): (AttentionCase, u64)| {
        let content = match case.content {
            Content::Normal => None,
            _ => Some(MoreContent::Nothing),
        };
        let codes = Codes::drawn(64, seed);
        let codes = Codes { more: content.unwrap_or(codes.more), ..codes };
        run_case(&case.coded(codes), Choice::Selected, &stream).map(drop)
    };
    let seeds = proptest::num::u64::ANY;
    let limits = |alignment| Limits {
        head_dims: vec![1, 7, 16, 33, 64, 80, 128, 256],
        alignment,
        ..Limits::in_half_precision(1_000_000)
    };
    property::check(120, (attention_cases(limits(1)), seeds), run);
    property::check(60, (block_sparse_cases(limits(8)), seeds), run);
}

#[test]
fn edges_and_special_cases_of_codes() {
    let cases = edge_cases(DType::BF16, &[16, 64], 64, 64).into_iter();
    let cases = cases.chain(special_cases(DType::F16, 48, 32));
    let cases = cases.filter(|case| case.content != Content::HugeScores).enumerate();
    run_all(cases.map(|(at, case)| case.coded(Codes::drawn(128, at as u64))).collect());
}
