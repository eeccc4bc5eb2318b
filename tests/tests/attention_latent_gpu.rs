//! Every kernel of attention to caches whose values are the first columns of the keys that the GPU
//! can run, against the oracle.

use blockflash_tests::attention::Choice;
use blockflash_tests::attention_latent::{
    LatentCase, LatentGroup, alone_as_in_a_batch, latent_cases, latent_groups,
    latents_survive_garbage, replays_of_latents, run_latent_case, run_or_refuse_latents,
    same_bits_of_latents,
};
use blockflash_tests::gpu::{Gpu, Report, gpu};

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("attention_latent_gpu::every_kernel") else { return };
    let check = |(form, kernels): LatentGroup, gpu: &Gpu, report: &mut Report| {
        let stream = &gpu.stream;
        for case in latent_cases(form) {
            for &(kernel, _) in &kernels {
                report.run(kernel, || run_or_refuse_latents(&case, kernel, stream));
            }
        }
        for &(kernel, _) in &kernels {
            let story = |what: &'static str| {
                move |error| format!("{what} of {}: {error}", kernel.image_name())
            };
            let simple = |heads, lengths: &[_]| LatentCase::simple(form, heads, lengths);
            // One sequence of many splits; many sequences; row tiles; known lengths.
            let known = LatentCase { seqused: false, ..simple(16, &[(1, 2048)]) };
            for case in [
                simple(16, &[(1, 9000)]),
                simple(7, &(0..40).map(|b| (1, 37 * b)).collect::<Vec<_>>()),
                simple(128, &[(2, 700), (2, 40)]),
                LatentCase { window: [Some(500), Some(0)], ..simple(16, &[(3, 1500); 2]) },
                known.clone(),
            ] {
                let repeats = || same_bits_of_latents(&case, kernel, stream);
                report.run(kernel, || repeats().map_err(story("repeat")));
            }
            for (case, times) in [
                (simple(16, &[(1, 1), (1, 0), (1, 130), (1, 4200), (1, 777)]), 1),
                (simple(16, &[(1, 1), (1, 0), (1, 130), (1, 4200), (1, 777)]), 24),
                (simple(40, &[(2, 300), (2, 1300)]), 9),
                (simple(1, &[(1, 30_000)]), 3),
                (known.clone(), 64),
                (known, 300),
            ] {
                let alone = || alone_as_in_a_batch(&case, times, kernel, stream);
                report.run(kernel, || alone().map_err(story("batch")));
            }
            let replays = || replays_of_latents(form, kernel, stream, 300);
            report.run(kernel, || replays().map_err(story("graph")));
            let garbage = || {
                let run = |seed| latents_survive_garbage(seed, form, kernel, stream);
                (0..200).map(run).sum::<Result<usize, _>>()
            };
            report.run(kernel, || garbage().map_err(story("garbage")));
        }
    };
    gpu.check_groups("attention_latent_gpu", &Report::default(), latent_groups(&gpu), check);
}

/// Through the selection, with the workspace that it asks for.
#[test]
fn the_selected_kernel() {
    let Some(gpu) = gpu("attention_latent_gpu::the_selected_kernel") else { return };
    for (form, _) in latent_groups(&gpu) {
        for case in latent_cases(form).iter().step_by(3) {
            run_latent_case(case, Choice::Selected, &gpu.stream).unwrap();
        }
    }
}
