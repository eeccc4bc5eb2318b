//! Attention to caches on the CPU against the oracle.

use blockflash_ops::DType;
use blockflash_tests::attention::{Choice, Limits, head_dims};
use blockflash_tests::attention_decode::{
    DecodeCase, alone_as_in_a_batch, decode_cases, decode_cases_of_codes, decode_cases_with_terms,
    decode_edges, decode_lengths, decode_terms, merge_cases, run_case, run_merge, same_bits,
    survives_garbage,
};
use blockflash_tests::host::{all_pass, cpu};
use blockflash_tests::property;
use proptest::strategy::Strategy;

/// The sizes of cases with options that few kernels look at.
fn small() -> Limits {
    Limits {
        dtypes: vec![DType::F32, DType::F16, DType::BF16],
        head_dims: vec![1, 5, 8, 20, 64, 96],
        seqlen: 200,
        alignment: 1,
        work: 0,
    }
}

fn random(count: u32, cases: impl Strategy<Value = DecodeCase>) {
    let stream = cpu();
    property::check(count, cases, |case| run_case(&case, Choice::Selected, &stream).map(drop));
}

fn run_all(cases: Vec<DecodeCase>) {
    all_pass(&cases, |case, stream| run_case(case, Choice::Selected, stream));
}

#[test]
fn random_cases_in_half_precision() {
    let limits = Limits {
        dtypes: vec![DType::F16, DType::BF16],
        head_dims: head_dims(8..=512),
        seqlen: 300,
        alignment: 8,
        work: 0,
    };
    random(200, decode_cases(limits, vec![16, 48, 64, 256]));
}

#[test]
fn random_cases_that_only_the_cpu_takes() {
    let limits = Limits {
        dtypes: vec![DType::F32, DType::F32, DType::F16, DType::BF16],
        head_dims: vec![1, 2, 3, 5, 7, 12, 20, 33, 60, 100, 129],
        seqlen: 150,
        alignment: 1,
        work: 0,
    };
    random(150, decode_cases(limits, vec![1, 3, 16, 100]));
}

/// ALiBi, a bias and a mask of the last keys with every other option, listed pages and rotation
/// among them.
#[test]
fn random_cases_with_terms() {
    random(200, decode_cases_with_terms(small(), vec![1, 3, 16, 100]));
}

/// Codes of 8 bits, with every kind of scales and every option.
#[test]
fn random_cases_over_codes() {
    random(300, decode_cases_of_codes(small(), vec![1, 3, 16, 100]));
}

#[test]
fn lengths_about_every_boundary() {
    run_all(decode_lengths(DType::BF16, 64, 4200));
    run_all(decode_lengths(DType::F32, 20, 300));
}

#[test]
fn every_mask_and_option() {
    run_all(decode_edges(DType::F16, 64));
    run_all(decode_edges(DType::BF16, 24));
    run_all(decode_edges(DType::F32, 10));
}

#[test]
fn every_score_term() {
    run_all(decode_terms(DType::BF16, 64));
    run_all(decode_terms(DType::F32, 12));
}

/// Sequences of many lengths with equally many queries.
fn batch(dtype: DType) -> DecodeCase {
    let lengths = [70, 1, 0, 333, 64, 500].map(|keys| (2, keys));
    DecodeCase { equal: true, ..DecodeCase::simple(dtype, (8, 2), 72, &lengths) }
}

#[test]
fn a_sequence_does_not_depend_on_the_batch() {
    for dtype in [DType::BF16, DType::F32] {
        alone_as_in_a_batch(&batch(dtype), 2, Choice::Selected, &cpu()).unwrap();
    }
}

#[test]
fn repeats_are_equal_bit_by_bit() {
    same_bits(&batch(DType::F16), Choice::Selected, &cpu()).unwrap();
}

#[test]
fn garbage_stays_inside() {
    let stream = cpu();
    for seed in 0..500 {
        let error = survives_garbage([seed / 7, seed], 8, None, Choice::Selected, &stream).err();
        assert_eq!(error, None);
        let terms = Some(seed % 2 == 0);
        let error = survives_garbage([seed / 7, seed], 8, terms, Choice::Selected, &stream).err();
        assert_eq!(error, None);
    }
}

#[test]
fn random_merges() {
    let stream = cpu();
    property::check(300, merge_cases(0, vec![1, 5, 8, 64, 100]), |case| {
        run_merge(&case, Choice::Selected, &stream).map(drop)
    });
}
