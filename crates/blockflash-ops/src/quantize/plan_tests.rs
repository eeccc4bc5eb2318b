use super::super::select::{accepts, select, support};
use super::*;
use crate::Error;
use crate::fixtures::gpu;
use blockflash_sys::{DType, Target};

/// 4 sequences of 8192 tokens and 8 heads of 128 elements.
fn problem() -> QuantizeProblem {
    let (_, mut problem) = support(DType::BF16).swap_remove(0);
    (problem.batch, problem.tokens, problem.num_heads, problem.head_dim) = (4, 8192, 8, 128);
    (problem.x.batch, problem.x.seq, problem.x.head) = (8192 * 1024, 1024, 128);
    problem
}

fn planned(problem: &QuantizeProblem) -> QuantizeLaunches {
    let gpu = gpu(9, 0);
    plan(select(problem, &gpu).unwrap(), problem, &gpu).unwrap()
}

/// Step, CTAs, and whether the last tiles come first.
fn steps(problem: &QuantizeProblem) -> Vec<(i32, u32, bool)> {
    let of =
        |(plan, config): (QuantizePlan, LaunchConfig)| (plan.step, config.grid[0], plan.descends);
    planned(problem).steps.into_iter().map(of).collect()
}

#[test]
fn each_option_has_the_launches_that_it_needs() {
    let (sums, means) = (BLOCKFLASH_QUANTIZE_SUMS, BLOCKFLASH_QUANTIZE_MEANS);
    let (greatest, codes) = (BLOCKFLASH_QUANTIZE_GREATEST, BLOCKFLASH_QUANTIZE_CODES);
    let of_tokens = QuantizeProblem { scale: ScaleOf::Token, ..problem() };
    // 4 tokens of 8 heads at once, and 16 rows of each thread.
    assert_eq!(steps(&of_tokens), [(codes, 512, false)]);
    let shared = [(means, 1, false), (greatest, 512, true), (codes, 512, false)];
    assert_eq!(steps(&problem()), shared);
    assert_eq!(steps(&QuantizeProblem { scale: ScaleOf::Tensor, ..problem() }), shared);
    let subtracted = QuantizeProblem { subtract_mean: true, ..of_tokens };
    // Two heads at once, as 32 rows are 16 classes of tokens twice.
    let of_sums = 4 * 64 * 4;
    let expected = [(sums, of_sums, true), (means, 32, false), (codes, 512, false)];
    assert_eq!(steps(&subtracted), expected);
    let all = QuantizeProblem { subtract_mean: true, ..problem() };
    let expected =
        [(sums, of_sums, false), (means, 32, false), (greatest, 512, true), (codes, 512, false)];
    assert_eq!(steps(&all), expected);
}

#[test]
fn few_rows_are_shared_among_many_ctas() {
    let of = |batch, tokens, packed| {
        let problem = QuantizeProblem { batch, tokens, packed, ..problem() };
        let steps = planned(&QuantizeProblem { scale: ScaleOf::Token, ..problem }).steps;
        (steps[0].0.tokens, steps[0].1.grid[0])
    };
    assert_eq!(of(1, 100, None), (4, 25));
    assert_eq!(of(256, 1, None), (4, 256));
    assert_eq!(of(1, 1 << 20, None), (128, 8192));
    // A CTA for the rest of each sequence.
    assert_eq!(of(6, 4000, Some(4003)), (8, 500 + 6));
    assert_eq!(of(6, 0, Some(0)), (4, 6));
}

/// Ada and Hopper have machine code with conversions; their elders and PTX compute them.
#[test]
fn each_gpu_has_a_kernel() {
    let targets = [
        ((8, 0), Target::Sm80),
        ((8, 6), Target::Sm80),
        ((8, 9), Target::Sm89),
        ((9, 0), Target::Sm90),
        ((10, 0), Target::Ptx80),
        ((12, 0), Target::Ptx80),
    ];
    for ((major, minor), target) in targets {
        let kernel = select(&problem(), &gpu(major, minor)).unwrap();
        assert_eq!(kernel.target, target, "{major}.{minor}");
    }
    assert!(select(&problem(), &gpu(7, 5)).is_err());
}

#[test]
fn what_no_kernel_takes_is_named() {
    let gpu = gpu(9, 0);
    let kernel = select(&problem(), &gpu).unwrap();
    for head_dim in [4, 100, 264] {
        let odd = QuantizeProblem { head_dim, ..problem() };
        for error in [select(&odd, &gpu).map(drop), accepts(kernel, &odd, &gpu)] {
            let text = error.unwrap_err().to_string();
            assert!(
                text.contains(&format!("head_dim {head_dim} is not a multiple of 8")),
                "{text}"
            );
        }
    }
    let mut odd = problem();
    odd.x.seq = 1028;
    let error = plan(kernel, &odd, &gpu).unwrap_err();
    assert!(matches!(error, Error::Misaligned { what: "x", .. }), "{error}");
    odd.dtype = DType::F32;
    assert!(plan(kernel, &odd, &gpu).is_ok());
    let huge = QuantizeProblem { batch: 1 << 30, tokens: 1, num_heads: 2, ..problem() };
    let error = plan(kernel, &huge, &gpu).unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
}
