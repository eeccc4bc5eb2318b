//! Summaries and choices of pages by the CPU backend against the definitions.
#![forbid(unsafe_code)]

use blockflash_ops::{DType, Device};
use blockflash_tests::page_choice::{PageCase, PageKernels, pages_survive_garbage, run_pages};

#[test]
fn against_the_definitions() {
    let stream = Device::cpu().stream().unwrap();
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        for seed in 0..100 {
            let case = PageCase::random(seed, dtype, &[1, 8, 59, 64, 128]);
            run_pages(&case, PageKernels::SELECTED, &stream).unwrap();
        }
    }
    run_pages(&PageCase::long(DType::BF16), PageKernels::SELECTED, &stream).unwrap();
}

#[test]
fn garbage() {
    let stream = Device::cpu().stream().unwrap();
    for seed in 0..100 {
        pages_survive_garbage(seed, DType::BF16, PageKernels::SELECTED, &stream).unwrap();
    }
}
