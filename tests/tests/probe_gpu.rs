//! Every probe of the manifest on the GPU: what it writes against the host.

use blockflash_bench::ceilings;
use blockflash_sys::manifest::Variant;
use blockflash_tests::gpu::{Report, gpu};

#[test]
fn probes_compute_what_they_are_timed_for() {
    let Some(gpu) = gpu("probes_compute_what_they_are_timed_for") else { return };
    let mut report = Report::default();
    for kernel in gpu.kernels().filter(|kernel| matches!(kernel.variant, Variant::Probe(_))) {
        report.run(kernel, || {
            ceilings::verify(kernel, &gpu.stream).map_err(|error| error.to_string())
        });
    }
    report.finish(&gpu, "probe");
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    use blockflash_safe::{DType, Error, Tensor};
    let Some(gpu) = gpu("operands_that_do_not_fit_are_refused") else { return };
    let kernel = gpu
        .kernels()
        .find(|kernel| kernel.symbol().ends_with("exp2"))
        .expect("a probe of exponentials");
    let threads = kernel.threads() as usize;
    let launch = |words: usize, out: usize, blocks: u32| {
        let input = Tensor::zeros(&gpu.stream, DType::I32, &[words]).unwrap();
        let mut output = Tensor::zeros(&gpu.stream, DType::I32, &[out]).unwrap();
        gpu.stream.launch_probe(kernel, blocks, 1, input.view(), output.view_mut())
    };
    assert!(launch(16384, threads, 1).is_ok());
    for (words, out, blocks) in [
        (16383, threads, 1),
        (4096, threads, 1),
        (16384, threads - 1, 1),
        (16384, threads, 2),
        (16384, threads, 0),
    ] {
        assert!(
            matches!(launch(words, out, blocks), Err(Error::Launch { .. })),
            "{words} {out} {blocks}"
        );
    }
    gpu.stream.synchronize().unwrap();
}
