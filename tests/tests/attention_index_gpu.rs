//! Every kernel of attention by an index that the GPU can run, against the oracle.
#![forbid(unsafe_code)]

use blockflash_ops::attention_index::{IndexTile, LatentScheme};
use blockflash_ops::{DType, HeadDims};
use blockflash_sys::{Kernel, manifest::Variant};
use blockflash_tests::attention::Choice;
use blockflash_tests::attention_index::{
    IndexCase, IndexForm, IndexGroup, KeyLayout, RowKind, index_groups, lists_alone_as_in_a_batch,
    lists_survive_garbage, replays_of_lists, run_index_case, run_or_refuse_lists,
    same_bits_of_lists,
};
use blockflash_tests::gpu::{Gpu, Report, gpu};

/// Random cases of each form and head dimensions.
const CASES: u64 = 120;

/// The head dimensions with which kernels of a form are run.
fn head_dims(form: IndexForm) -> Vec<HeadDims> {
    let HeadDims { qk, v } = form.head_dims;
    let smaller = match form.rows {
        RowKind::Latent | RowKind::LatentCodes => vec![],
        RowKind::Codes => vec![HeadDims { qk: qk - 16, v: v / 2 }],
        RowKind::Plain => vec![HeadDims { qk: qk - 8, v }, HeadDims { qk: qk - 24, v: v / 2 + 8 }],
    };
    [form.head_dims].into_iter().chain(smaller).collect()
}

/// Cases that are not drawn: long lists, many queries, what published models have.
fn cases(form: IndexForm) -> Vec<IndexCase> {
    let latent = form.is_latent();
    let heads = |q: usize, kv: usize| if latent { [q, 1] } else { [q, kv] };
    let simple = |heads, list, lengths: &[_]| IndexCase::simple(form, heads, list, lengths);
    let mut cases = vec![
        // Capacities around those of a split and of a step.
        simple(heads(16, 1), [1, 2048], &[(1, 5000), (1, 2048), (1, 30)]),
        simple(heads(32, 2), [1, 257], &[(1, 400); 3]),
        simple(heads(32, 2), [16, 128], &[(2, 3000); 2]),
        simple(heads(64, 4), [128, 16], &[(1, 4000), (1, 700), (1, 0)]),
        simple(heads(24, 2), [4, 512], &[(3, 2500)]),
        simple(heads(8, 8), [64, 16], &[(1, 2000); 2]),
        // Many queries that share keys.
        simple(heads(16, 2), [64, 8], &[(200, 900)]),
        simple(heads(64, 4), [128, 4], &[(70, 900)]),
        simple(heads(12, 1), [16, 24], &[(131, 500)]),
        simple(heads(3, 3), [16, 7], &[(90, 90), (90, 300)]),
    ];
    let packed = simple(heads(8, 2), [64, 5], &[(130, 400), (0, 0), (7, 900), (64, 64), (1, 70)]);
    cases.push(IndexCase { packed: true, layout: KeyLayout::Packed, ..packed.clone() });
    let packed = IndexCase { packed: true, odd_entries: true, ascending: false, ..packed };
    cases.push(IndexCase { window: [Some(300), Some(0)], ..packed.clone() });
    // Each head of queries has its own lists; one list serves all; more heads than rows.
    cases.push(IndexCase { groups: if latent { 4 } else { 8 }, ..packed });
    let many = simple(heads(140, 1), [16, 20], &[(5, 600), (5, 40)]);
    cases.push(IndexCase { groups: 1, batch_invariant: true, ..many });
    let invariant = simple(heads(16, 1), [64, 70], &[(1, 6000); 2]);
    cases.push(IndexCase { batch_invariant: true, ..invariant });
    for case in &mut cases {
        if case.groups > 1 && case.groups != case.heads[1] {
            case.groups = case.heads[0];
        }
    }
    cases
}

/// How often a kernel gives the same bits, and does not depend on what is beside a sequence.
fn bits(form: IndexForm, kernel: &'static Kernel, gpu: &Gpu, report: &mut Report) {
    let stream = &gpu.stream;
    let story =
        |what: &'static str| move |error| format!("{what} of {}: {error}", kernel.image_name());
    let heads = |q: usize, kv: usize| if form.is_latent() { [q, 1] } else { [q, kv] };
    let simple = |heads, list, lengths: &[_]| IndexCase::simple(form, heads, list, lengths);
    for case in [
        simple(heads(16, 1), [16, 300], &[(1, 9000)]),
        simple(heads(14, 2), [64, 9], &(0..40).map(|b| (1, 37 * b)).collect::<Vec<_>>()),
        simple(heads(128, 4), [128, 8], &[(40, 1500); 2]),
        simple(heads(16, 2), [1, 700], &[(2, 1200); 3]),
    ] {
        report.run(kernel, || same_bits_of_lists(&case, kernel, stream).map_err(story("repeat")));
    }
    for (case, times) in [
        (simple(heads(16, 2), [16, 90], &[(1, 1), (1, 0), (1, 130), (1, 4200), (1, 777)]), 1),
        (simple(heads(16, 2), [16, 90], &[(1, 1), (1, 0), (1, 130), (1, 4200), (1, 777)]), 24),
        (simple(heads(40, 1), [64, 20], &[(2, 300), (2, 1300)]), 9),
        (simple(heads(16, 1), [1, 2048], &[(1, 3000)]), 40),
        (simple(heads(4, 4), [128, 30], &[(1, 8000)]), 300),
    ] {
        let alone = || lists_alone_as_in_a_batch(&case, times, kernel, stream);
        report.run(kernel, || alone().map_err(story("batch")));
    }
    for granularity in [1, 16, 128] {
        let least = kernel_granularity(kernel);
        if granularity >= least {
            let replays = || replays_of_lists(form, granularity, kernel, stream, 60);
            report.run(kernel, || replays().map_err(story("graph")));
        }
    }
    let garbage = || {
        let run = |seed| lists_survive_garbage(seed, form, Choice::This(kernel), stream);
        (0..200).map(run).sum::<Result<usize, _>>()
    };
    report.run(kernel, || garbage().map_err(story("garbage")));
}

fn kernel_granularity(kernel: &Kernel) -> usize {
    let tile = blockflash_ops::attention_index::tile(kernel);
    tile.map_or(1, |tile| tile.least_granularity())
}

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("attention_index_gpu::every_kernel") else { return };
    let check = |(form, kernels): IndexGroup, gpu: &Gpu, report: &mut Report| {
        let union = gpu.kernels().find(|kernel| matches!(kernel.variant, Variant::IndexUnion(_)));
        let drawn = head_dims(form).into_iter().flat_map(|head_dims| {
            let form = IndexForm { head_dims, ..form };
            (0..CASES).map(move |seed| IndexCase::random(seed, form, &[1, 4, 16, 64, 128]))
        });
        let cases: Vec<_> = drawn.chain(cases(form)).collect();
        for case in &cases {
            // Beside codes queries of either type are computed.
            let types = match form.rows {
                RowKind::Codes => vec![DType::F16, DType::BF16],
                _ => vec![form.dtype],
            };
            for dtype in types {
                let case = IndexCase { form: IndexForm { dtype, ..case.form }, ..case.clone() };
                for &(kernel, tile) in &kernels {
                    let mut result = None;
                    report.run(kernel, || {
                        result.insert(run_or_refuse_lists(&case, kernel, &gpu.stream)).clone()
                    });
                    // What it writes is seen in the outputs of the kernel behind it alone.
                    let union = union.filter(|_| matches!(tile, IndexTile::United(_)));
                    if let (Some(union), Some(result)) = (union, result) {
                        report.run(union, || result);
                    }
                }
            }
        }
        for &(kernel, _) in &kernels {
            bits(form, kernel, gpu, report);
        }
    };
    gpu.check_groups("attention_index_gpu", &Report::default(), index_groups(&gpu), check);
}

/// Through the selection, with the workspace that it asks for.
#[test]
fn the_selected_kernel() {
    let Some(gpu) = gpu("attention_index_gpu::the_selected_kernel") else { return };
    for (form, _) in index_groups(&gpu) {
        let drawn = (0..40).map(|seed| IndexCase::random(seed, form, &[1, 4, 16, 64, 128]));
        for case in drawn.chain(cases(form)) {
            run_index_case(&case, Choice::Selected, &gpu.stream).unwrap();
        }
    }
}

/// Neither of the schemes of latent rows is forgotten by the groups.
#[test]
fn kernels_of_all_schemes_are_run() {
    let Some(gpu) = gpu("attention_index_gpu::kernels_of_all_schemes_are_run") else { return };
    let groups = index_groups(&gpu);
    let tiles = || groups.iter().flat_map(|(_, kernels)| kernels).map(|(_, tile)| *tile);
    if gpu.properties.compute_capability.major == 9 {
        assert!(tiles().any(|tile| matches!(tile, IndexTile::United(_))));
        let scheme = |scheme| {
            tiles().any(|tile| matches!(tile, IndexTile::Latent(tile) if tile.scheme == scheme))
        };
        assert!(scheme(LatentScheme::Clusters) && scheme(LatentScheme::Persistent));
    }
    assert!(tiles().any(|tile| matches!(tile, IndexTile::Listed(_))));
}
