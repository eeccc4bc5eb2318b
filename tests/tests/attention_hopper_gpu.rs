//! What the attention kernels for Hopper do unlike the others: blocks of threads that stay, tiles
//! taken by a counter, tensor maps, launches that begin before the previous one ends.

use blockflash_ops::Kernel;
use blockflash_ops::attention::{Align, Mask, Scores};
use blockflash_sys::manifest::{AttentionFwdHopper, AttentionTile, Variant};
use blockflash_tests::attention::persistent::{
    Job, busy, repeats_its_bits, replays_graphs, shares_the_gpu, some_blocks, stress, without_keys,
};
use blockflash_tests::attention::{
    AttentionCase, AttentionData, AttentionInputs, AttentionOutputs, AttentionReference, Choice,
    run_case, takes_lists_of, tile_cases,
};
use blockflash_tests::gpu::{Gpu, Report, gpu, say, wait};
use blockflash_tests::number::decode;
use blockflash_tests::tolerance::check_agreement;

#[test]
fn every_hopper_kernel() {
    let Some(gpu) = gpu("attention_hopper_gpu::every_hopper_kernel") else { return };
    let is_hopper = |kernel: &&Kernel| {
        matches!(
            kernel.variant,
            Variant::AttentionFwdHopper(_)
                | Variant::AttentionFwdSmall(_)
                | Variant::AttentionFwdWide(_)
        )
    };
    let kernels: Vec<_> = gpu
        .kernels()
        .filter(is_hopper)
        .filter_map(|kernel| Some((kernel, kernel.attention_tile()?)))
        .collect();
    if kernels.is_empty() {
        say("SKIPPED (no kernel for Hopper to run): attention_hopper_gpu::every_hopper_kernel");
        return;
    }
    let check = |(kernel, tile): (&'static Kernel, AttentionTile),
                 gpu: &Gpu,
                 report: &mut Report| {
        let story =
            |what: &'static str| move |error| format!("{what} of {}: {error}", kernel.image_name());
        let (head_dim, block_q, block_kv) =
            (tile.head_dims.min(), tile.block_q as usize, tile.block_kv as usize);
        let cases = tile_cases(tile.types.q, head_dim, block_q, block_kv);
        let cases = cases.into_iter().chain(stress(&tile)).chain(without_keys(&tile));
        for case in cases.filter(|case| takes_lists_of(kernel, case)) {
            report.run(kernel, || {
                run_case(&case.as_asked(kernel), Choice::This(kernel), &gpu.stream)
            });
        }
        report.run(kernel, || {
            agrees_with_the_portable_kernel(kernel, &tile, gpu).map_err(story("agreement"))
        });
        for seed in [1, 2] {
            report.run(kernel, || {
                repeats_its_bits(kernel, &tile, gpu, seed, 30).map_err(story("repeat"))
            });
        }
        if let Variant::AttentionFwdHopper(own) = kernel.variant {
            report.run(kernel, || {
                has_the_bits_of_its_twin((kernel, own), &tile, gpu).map_err(story("twin"))
            });
        }
        report.run(kernel, || shares_the_gpu(kernel, &tile, gpu).map_err(story("two streams")));
        report.run(kernel, || replays_graphs(kernel, &tile, gpu).map_err(story("graphs")));
    };
    gpu.check_groups("attention_hopper_gpu", &Report::default(), kernels, check);
}

fn agrees_with_the_portable_kernel(
    kernel: &'static Kernel,
    tile: &AttentionTile,
    gpu: &Gpu,
) -> Result<usize, String> {
    let (portable, other) = gpu
        .all_kernels()
        .filter(|kernel| matches!(kernel.variant, Variant::AttentionFwd(_)))
        .filter_map(|kernel| Some((kernel, kernel.attention_tile()?)))
        .find(|(_, other)| {
            (other.types.q, other.head_dims.min()) == (tile.types.q, tile.head_dims.min())
        })
        .ok_or("no portable kernel for this type and head_dim")?;
    let block_mask = Some(some_blocks(&[tile, &other]));
    let window = Mask::Window { left: Some(100), right: Some(7), align: Align::BottomRight };
    let base = AttentionCase::of_tile(tile, (4, 2), (413, 517));
    let cases = [
        base.clone(),
        AttentionCase {
            scores: Scores { mask: Mask::causal(), sink: Some(()), ..base.scores },
            ..base.clone()
        },
        AttentionCase { block_mask, ..base.clone() },
        AttentionCase {
            scores: Scores { mask: window, softcap: Some(15.0), ..base.scores },
            ..base
        },
    ];
    let mut compared = 0;
    for case in cases.into_iter().filter(|case| takes_lists_of(kernel, case)) {
        let data = AttentionData::generate(&case);
        // Every row, in the order of the output.
        let reference = AttentionReference::compute(&case, &data, f64::INFINITY);
        let inputs = AttentionInputs::upload(&case, &data, &gpu.stream)?;
        let run = |kernel| {
            let mut outputs = AttentionOutputs::poisoned(&case, &gpu.stream)?;
            outputs
                .launch(&inputs, Choice::This(kernel), &gpu.stream)
                .map_err(|error| error.to_string())?;
            wait(&gpu.stream, &|| format!("{} with {case:?}", kernel.image_name()))?;
            let [o, lse] = outputs.bits(&gpu.stream)?;
            let o: Vec<f64> = o.into_iter().map(|bits| decode(case.dtype, bits).into()).collect();
            let lse =
                |&[b, i, h]: &[usize; 3]| f64::from(f32::from_bits(lse[case.lse_index(b, h, i)]));
            let asked = reference.rows.iter().filter(|_| case.lse);
            Ok::<_, String>((o, asked.map(lse).collect::<Vec<f64>>()))
        };
        let ((o, lse), (other_o, other_lse)) = (run(kernel)?, run(portable)?);
        let name = |i: usize| format!("element {i} of {case:?}");
        check_agreement(&o, &other_o, &reference.o, &reference.rounding(&case), name)
            .map_err(|error| format!("o: {error}"))?;
        compared += 1;
        if case.lse {
            let rounding = AttentionReference::lse_rounding(&case);
            check_agreement(&lse, &other_lse, &reference.lse, &rounding, name)
                .map_err(|error| format!("lse: {error}"))?;
            compared += 1;
        }
    }
    Ok(compared)
}

/// The outputs of the kernels with and without the log-sum-exp are the same in every bit.
fn has_the_bits_of_its_twin(
    (kernel, own): (&'static Kernel, AttentionFwdHopper),
    tile: &AttentionTile,
    gpu: &Gpu,
) -> Result<usize, String> {
    let variant = Variant::AttentionFwdHopper(AttentionFwdHopper { lse: !own.lse, ..own });
    let twin = gpu.kernels().find(|kernel| kernel.variant == variant).ok_or("it has no twin")?;
    let outputs = |kernel: &'static Kernel| {
        let job = Job::new(busy(kernel, tile, gpu, 8).as_asked(kernel), &gpu.stream)?;
        let mut outputs = job.outputs(1)?;
        job.launch(&mut outputs[0], kernel)?;
        job.check(&outputs, kernel)?;
        Ok::<_, String>(outputs[0].bits(&gpu.stream)?[0].clone())
    };
    if outputs(kernel)? != outputs(twin)? { Err("the outputs differ".into()) } else { Ok(1) }
}
