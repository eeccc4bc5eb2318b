//! Every kernel that summarises or chooses pages that the GPU can run against the definitions.
#![forbid(unsafe_code)]

use blockflash_sys::Kernel;
use blockflash_sys::manifest::{PageKernel, Variant};
use blockflash_tests::gpu::{Gpu, Report, gpu};
use blockflash_tests::page_choice::{
    PageCase, PageKernels, page_replays, pages_survive_garbage, run_pages,
};

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("page_choice_gpu::every_kernel") else { return };
    let kernels = gpu.kernels().filter_map(|kernel| match kernel.variant {
        Variant::PageChoice(
            PageKernel::Summaries { dtype, .. } | PageKernel::Choice { dtype, .. },
        ) => Some((kernel, dtype)),
        _ => None,
    });
    let kernels: Vec<_> = kernels.collect();
    let check = |(kernel, dtype): (&'static Kernel, _), gpu: &Gpu, report: &mut Report| {
        let (these, stream) = (PageKernels::with(kernel), &gpu.stream);
        let dims = [8, 24, 64, 72, 128, 136, 256];
        for case in (0..300).map(|seed| PageCase::random(seed, dtype, &dims)) {
            report.run(kernel, || run_pages(&case, these, stream));
        }
        let long = PageCase::long(dtype);
        report.run(kernel, || run_pages(&long, these, stream));
        report.run(kernel, || page_replays(&long, these, stream));
        for seed in 0..300 {
            report.run(kernel, || pages_survive_garbage(seed, dtype, these, stream));
        }
    };
    gpu.check_groups("page_choice_gpu", &Report::default(), kernels, check);
}
