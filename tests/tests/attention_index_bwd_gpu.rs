//! Every kernel of the gradients of attention by an index that the GPU can run, against the oracle.
#![forbid(unsafe_code)]

use blockflash_ops::{DType, HeadDims};
use blockflash_safe::AttentionIndexBwdKernels;
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{AttentionIndexBwd, Variant};
use blockflash_tests::attention_index_bwd::{
    IndexBackwardCase, IndexBackwardChoice, gradients_of_lists_survive_garbage,
    replays_of_gradients_of_lists, run_index_backward, same_gradients_of_lists,
    with_workspace_of_many_passes,
};
use blockflash_tests::gpu::{Gpu, Report, gpu};

/// Random cases of each pair of head dimensions.
const CASES: u64 = 30;
const GRANULARITIES: [usize; 3] = [16, 64, 128];

fn variant(kernel: &Kernel) -> Option<AttentionIndexBwd> {
    match kernel.variant {
        Variant::AttentionIndexBwd(variant) => Some(variant),
        _ => None,
    }
}

/// A kernel with others for the remaining steps, for the narrowest tile of a type.
fn around(gpu: &Gpu, kernel: &'static Kernel) -> Vec<(AttentionIndexBwdKernels<'static>, usize)> {
    let find = |fits: &dyn Fn(AttentionIndexBwd) -> bool| {
        let mut all = gpu.all_kernels();
        all.find(|kernel| variant(kernel).is_some_and(fits)).expect("a kernel for every step")
    };
    let keys_of = |dtype: DType| {
        find(&|kernel| matches!(kernel, AttentionIndexBwd::Keys(tile) if tile.types.q == dtype))
    };
    let transpose = find(&|kernel| matches!(kernel, AttentionIndexBwd::Transpose { .. }));
    let sums_of = |dtype| find(&|kernel| kernel == AttentionIndexBwd::Sums { dtype });
    match variant(kernel).expect("a kernel of these families") {
        AttentionIndexBwd::Keys(tile) => {
            let sums = sums_of(tile.types.q);
            let kernels = AttentionIndexBwdKernels { transpose, keys: kernel, sums };
            vec![(kernels, tile.head_dims.max())]
        }
        AttentionIndexBwd::Sums { dtype } => {
            let keys = keys_of(dtype);
            vec![(AttentionIndexBwdKernels { transpose, keys, sums: kernel }, 64)]
        }
        AttentionIndexBwd::Transpose { .. } => [DType::F16, DType::BF16]
            .map(|dtype| {
                let (keys, sums) = (keys_of(dtype), sums_of(dtype));
                (AttentionIndexBwdKernels { transpose: kernel, keys, sums }, 64)
            })
            .to_vec(),
    }
}

/// Cases that are not drawn.
fn cases(of: (DType, HeadDims)) -> Vec<IndexBackwardCase> {
    let simple = |heads, list, lengths: &[_]| IndexBackwardCase::simple(of, heads, list, lengths);
    let packed = [(130, 200), (0, 50), (77, 77), (1, 640), (90, 90), (5, 0)];
    let packed = IndexBackwardCase { packed: true, ..simple([6, 2], [64, 5], &packed) };
    let window = [Some(150), Some(30)];
    vec![
        simple([4, 2], [64, 4], &[(222, 301); 2]),
        simple([4, 2], [16, 9], &[(100, 301); 2]),
        simple([4, 4], [128, 3], &[(150, 301); 2]),
        // One list for all heads; lists of all heads; heads that do not share; a full tile of rows.
        IndexBackwardCase { groups: 1, ..simple([8, 4], [64, 6], &[(200, 400)]) },
        IndexBackwardCase { groups: 8, ..simple([8, 2], [128, 3], &[(150, 500)]) },
        simple([3, 3], [64, 3], &[(200, 300)]),
        simple([48, 2], [64, 3], &[(40, 200)]),
        IndexBackwardCase { window, ..simple([2, 1], [64, 8], &[(300, 500)]) },
        IndexBackwardCase { softcap: Some(5.0), ..simple([4, 2], [64, 4], &[(150, 200)]) },
        // Bins with many items, others with none.
        simple([2, 1], [64, 3], &[(1100, 2000)]),
        IndexBackwardCase { groups: 6, ..packed.clone() },
        IndexBackwardCase { list: [16, 9], ..packed.clone() },
        IndexBackwardCase { list: [128, 3], ..packed.clone() },
        IndexBackwardCase { list: [64, 0], ..packed.clone() },
        packed,
        simple([4, 2], [64, 4], &[(30, 0)]),
    ]
}

fn check(kernel: &'static Kernel, gpu: &Gpu, report: &mut Report) {
    let stream = &gpu.stream;
    for (kernels, head_dim) in around(gpu, kernel) {
        let choice: IndexBackwardChoice = Some(kernels);
        let story =
            |what: &'static str| move |error| format!("{what} of {}: {error}", kernel.image_name());
        let Some(AttentionIndexBwd::Keys(tile)) = variant(kernels.keys) else { return };
        let dtype = tile.types.q;
        let own = HeadDims::all(head_dim);
        for head_dims in [
            own,
            HeadDims { qk: head_dim - 8, v: head_dim },
            HeadDims { qk: head_dim, v: head_dim / 2 + 8 },
        ] {
            for seed in 0..CASES {
                let case = IndexBackwardCase::random(seed, (dtype, head_dims), &GRANULARITIES);
                report.run(kernel, || run_index_backward(&case, choice, stream));
            }
        }
        let simple = |heads, list, lengths: &[_]| {
            IndexBackwardCase::simple((dtype, own), heads, list, lengths)
        };
        for case in cases((dtype, own)) {
            report.run(kernel, || run_index_backward(&case, choice, stream));
        }
        let packed = [(300, 400), (0, 10), (200, 90), (150, 700)];
        let packed = IndexBackwardCase { packed: true, ..simple([4, 2], [64, 4], &packed) };
        for case in [
            simple([2, 1], [64, 4], &[(700, 900)]),
            simple([4, 2], [16, 6], &[(300, 300); 2]),
            IndexBackwardCase { groups: 4, ..simple([4, 2], [128, 3], &[(600, 700)]) },
            packed.clone(),
        ] {
            report.run(kernel, || {
                with_workspace_of_many_passes(&case, choice, stream).map_err(story("passes"))
            });
            report.run(kernel, || {
                same_gradients_of_lists(&case, choice, stream).map_err(story("repeat"))
            });
        }
        for case in [simple([4, 2], [64, 4], &[(150, 300); 2]), packed.clone()] {
            report.run(kernel, || {
                replays_of_gradients_of_lists(&case, choice, stream).map_err(story("graph"))
            });
        }
        let dense = simple([4, 2], [16, 5], &[(90, 200); 2]);
        let packed = IndexBackwardCase { lengths: vec![(60, 150), (40, 90)], ..packed };
        for case in [dense, packed] {
            let run = |seed| gradients_of_lists_survive_garbage(seed, &case, choice, stream);
            report.run(kernel, || {
                (0..40).map(run).sum::<Result<usize, _>>().map_err(story("garbage"))
            });
        }
    }
}

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("attention_index_bwd_gpu::every_kernel") else { return };
    let kernels: Vec<_> = gpu.kernels().filter(|kernel| variant(kernel).is_some()).collect();
    gpu.check_groups("attention_index_bwd_gpu", &Report::default(), kernels, check);
}

/// Through the selection, with the workspace that it asks for.
#[test]
fn the_selected_kernels() {
    let Some(gpu) = gpu("attention_index_bwd_gpu::the_selected_kernels") else { return };
    for dtype in [DType::F16, DType::BF16] {
        for head_dim in [64, 104, 256] {
            for case in cases((dtype, HeadDims::all(head_dim))).iter().step_by(4) {
                run_index_backward(case, None, &gpu.stream).unwrap();
            }
        }
    }
}
