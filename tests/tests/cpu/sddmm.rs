//! The CPU backend of the sampled product against the oracle.

use blockflash_cases::case::Operands;
use blockflash_ops::{DType, Major};
use blockflash_tests::bsr::{Choice, Pattern};
use blockflash_tests::host::{cpu, download};
use blockflash_tests::property;
use blockflash_tests::sddmm::{Limits, SddmmCase, SddmmData, edge_cases, run_case, sddmm_cases};

fn layouts() -> Vec<[Major; 2]> {
    Major::ALL.into_iter().flat_map(|a| Major::ALL.map(|b| [a, b])).collect()
}

#[test]
fn tile_edges() {
    let stream = cpu();
    let mut failures = Vec::new();
    for (dtype, size) in [(DType::F16, 16), (DType::BF16, 32)] {
        for majors in layouts() {
            let cases = edge_cases(dtype, size, majors);
            failures.extend(
                cases.iter().filter_map(|case| run_case(case, Choice::Selected, &stream).err()),
            );
        }
    }
    assert!(failures.is_empty(), "{} cases failed:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn random_cases() {
    let stream = cpu();
    let limits = Limits {
        dtypes: vec![DType::F16, DType::BF16],
        block_sizes: vec![16, 32, 64, 128],
        blocks: 4,
        depth: 300,
        majors: layouts(),
    };
    let odd = Limits {
        dtypes: vec![DType::F32, DType::F32, DType::F16],
        block_sizes: vec![1, 2, 3, 5, 8, 24, 100],
        blocks: 7,
        depth: 1300,
        majors: layouts(),
    };
    for limits in [limits, odd] {
        property::check(100, sddmm_cases(limits), |case| {
            run_case(&case, Choice::Selected, &stream).map(drop)
        });
    }
}

#[test]
fn repeats_are_equal_bit_by_bit() {
    let simple = SddmmCase::simple(DType::BF16, 32, [300, 500, 130], Pattern::Random(0.5));
    let case = SddmmCase { majors: [Major::Column, Major::Row], ..simple };
    let (stream, data) = (cpu(), SddmmData::generate(&case));
    let mut operands = data.operands(&case, &stream).unwrap();
    let mut run = || {
        operands.reset(None, &stream).unwrap();
        operands.launch(None, &stream).unwrap();
        download(&stream, operands.values()).unwrap()
    };
    let first = run();
    for repeat in 1..20 {
        assert!(run() == first, "repeat {repeat} differs");
    }
}
