//! Every kernel that scores blocks of keys or chooses among scores that the GPU can run against the
//! definitions.
#![forbid(unsafe_code)]

use blockflash_ops::DType;
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{IndexKernel, Variant};
use blockflash_tests::attention::Choice;
use blockflash_tests::gpu::{Gpu, Report, gpu};
use blockflash_tests::index_choice::{
    IndexKernels, ScoresCase, TopKCase, choice_replays, index_choice_survives_garbage,
    run_index_scores, run_top_k, scores_replay,
};

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("index_choice_gpu::every_kernel") else { return };
    let kernels = gpu.kernels().filter_map(|kernel| match kernel.variant {
        Variant::Index(variant) => Some((kernel, variant)),
        _ => None,
    });
    let kernels: Vec<_> = kernels.collect();
    let check =
        |(kernel, variant): (&'static Kernel, IndexKernel), gpu: &Gpu, report: &mut Report| {
            let dtype = match variant {
                IndexKernel::Scores { dtype, head_dim, .. } => {
                    check_scores(kernel, dtype, head_dim as usize, gpu, report);
                    dtype
                }
                IndexKernel::TopKWarps { columns } => {
                    check_choices(kernel, columns as usize, gpu, report);
                    DType::BF16
                }
                IndexKernel::TopK { .. } => {
                    check_choices(kernel, 1 << 20, gpu, report);
                    DType::F16
                }
            };
            let these = IndexKernels::with(kernel);
            let most = match variant {
                IndexKernel::TopKWarps { columns } => columns as usize,
                _ => usize::MAX,
            };
            for seed in 0..200 {
                report.run(kernel, || {
                    index_choice_survives_garbage(seed, dtype, these, most, &gpu.stream)
                });
            }
        };
    gpu.check_groups("index_choice_gpu", &Report::default(), kernels, check);
}

fn check_scores(
    kernel: &'static Kernel,
    dtype: DType,
    widest: usize,
    gpu: &Gpu,
    report: &mut Report,
) {
    let stream = &gpu.stream;
    let dims: Vec<usize> =
        [8, 24, 64, 72, 128, 136, 256].into_iter().filter(|&d| d <= widest).collect();
    for case in (0..200).map(|seed| ScoresCase::random(seed, dtype, &dims)) {
        report.run(kernel, || run_index_scores(&case, Choice::This(kernel), stream));
    }
    let replayed = (0..40).map(|seed| ScoresCase::random(1000 + seed, dtype, &dims));
    for case in replayed.filter(ScoresCase::has_lengths).take(4) {
        report.run(kernel, || scores_replay(&case, Choice::This(kernel), stream));
    }
}

fn check_choices(kernel: &'static Kernel, columns: usize, gpu: &Gpu, report: &mut Report) {
    let stream = &gpu.stream;
    let fits = |case: &TopKCase| case.rows.blocks() <= columns;
    for case in (0..400).map(TopKCase::random).filter(fits) {
        report.run(kernel, || run_top_k(&case, Choice::This(kernel), stream));
    }
    let long = [
        (1000, 16, 0),
        (1024, 1000, 2),
        (4096, 2048, 0),
        (10_240, 2048, 0),
        (10_242, 1, 1),
        (70_000, 2048, 3),
        (400_000, 2048, 0),
        (400_000, 64, 1),
        (1 << 20, 2048, 300),
    ];
    for (seed, (blocks, k, distinct)) in long.into_iter().enumerate() {
        let case = TopKCase::long(seed as u64, blocks, k, distinct);
        if !fits(&case) {
            continue;
        }
        report.run(kernel, || run_top_k(&case, Choice::This(kernel), stream));
        report.run(kernel, || choice_replays(&case, Choice::This(kernel), stream));
    }
}
