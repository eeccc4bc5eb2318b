//! Scores of blocks and choices among them by the CPU backend against the definitions.
#![forbid(unsafe_code)]

use blockflash_ops::{DType, Device};
use blockflash_tests::attention::Choice;
use blockflash_tests::index_choice::{
    IndexKernels, ScoresCase, TopKCase, index_choice_survives_garbage, run_index_scores, run_top_k,
};

#[test]
fn scores_against_the_definitions() {
    let stream = Device::cpu().stream().unwrap();
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        for seed in 0..60 {
            let case = ScoresCase::random(seed, dtype, &[1, 8, 59, 64, 128]);
            run_index_scores(&case, Choice::Selected, &stream).unwrap();
        }
    }
}

#[test]
fn choices_against_the_definition() {
    let stream = Device::cpu().stream().unwrap();
    for seed in 0..200 {
        run_top_k(&TopKCase::random(seed), Choice::Selected, &stream).unwrap();
    }
    for (k, distinct) in [(2048, 0), (100, 3)] {
        let case = TopKCase::long(1, 100_000, k, distinct);
        run_top_k(&case, Choice::Selected, &stream).unwrap();
    }
}

#[test]
fn garbage() {
    let stream = Device::cpu().stream().unwrap();
    for seed in 0..100 {
        let kernels = IndexKernels::SELECTED;
        index_choice_survives_garbage(seed, DType::BF16, kernels, usize::MAX, &stream).unwrap();
    }
}
