use super::super::{Align, Mask, plan};
use super::*;
use crate::fixtures::{gpu, gpus};
use crate::selection::select_among;
use crate::{BiasProblem, Error, ScoresProblem};
use blockflash_sys::manifest::{self, AttentionFwd, Variant};
use blockflash_sys::params::BLOCKFLASH_WINDOW_UNBOUNDED;
use blockflash_sys::{ElementTypes, HeadDims, Target};

fn problem(dtype: DType, head_dim: usize) -> AttentionProblem {
    AttentionProblem::dense(dtype, [2, 300, 500], [8, 2], head_dim)
}

fn attention_kernels() -> impl Iterator<Item = (&'static Kernel, AttentionTile)> {
    let tiles =
        manifest::kernels().iter().filter_map(|kernel| Some((kernel, kernel.attention_tile()?)));
    tiles.filter(|(_, tile)| !tile.terms)
}

#[test]
fn every_gpu_runs_every_head_dim() {
    for gpu in gpus() {
        for dtype in [DType::F16, DType::BF16] {
            for head_dim in (8..=512).step_by(8) {
                let problem = problem(dtype, head_dim);
                let kernel = select_among(manifest::kernels(), &problem, &gpu).unwrap();
                let chosen = kernel.attention_tile().unwrap();
                assert!(
                    kernel.target.runs_on(gpu.compute_capability)
                        && kernel.smem_bytes() <= gpu.smem_per_block
                );
                assert!(chosen.types.q == dtype && chosen.head_dims.qk >= head_dim);
                for (other, tile) in attention_kernels()
                    .filter(|(kernel, _)| accepts(kernel, &problem, &gpu).is_ok())
                {
                    assert!(
                        other.target != kernel.target || tile.head_dims.qk >= chosen.head_dims.qk,
                        "{}",
                        gpu.name
                    );
                    assert!(
                        !kernel.target.is_ptx() || other.target.is_ptx(),
                        "machine code comes before PTX"
                    );
                }
                plan(kernel, &problem, &gpu).unwrap();
            }
        }
    }
}

/// The narrow tiles are for block masks, and off Hopper for grids that leave SMs idle:
/// `cost_tests.rs`. An sm_86 GPU has no room for two of the wide tile of sm_80 beyond 96.
#[test]
fn large_dense_problems_take_the_widest_portable_tile() {
    for (gpu, head_dim) in gpus().iter().flat_map(|gpu| [8, 64, 72, 96, 104, 128].map(|d| (gpu, d)))
    {
        let portable =
            manifest::kernels().iter().filter(|kernel| kernel.target != Target::Sm90a).cloned();
        let portable: Vec<Kernel> = portable.collect();
        let large = AttentionProblem::dense(DType::BF16, [4, 8192, 8192], [16, 4], head_dim);
        let kernel = select_among(&portable, &large, gpu).unwrap();
        let narrow = gpu.compute_capability.minor == 6 && head_dim > 96;
        let block_q = if narrow { 64 } else { 128 };
        assert_eq!(kernel.attention_tile().unwrap().block_q, block_q, "{}", kernel.image_name());
    }
}

#[test]
fn targets_are_those_of_the_gpu() {
    let target = |major, minor, head_dim| {
        select(&problem(DType::F16, head_dim), &gpu(major, minor)).unwrap().target
    };
    assert_eq!(target(8, 0, 128), Target::Sm80);
    assert_eq!(target(8, 9, 128), Target::Sm89);
    assert_eq!(target(12, 0, 128), Target::Sm120);
    assert_eq!(target(10, 0, 128), Target::Ptx80);
    assert!(matches!(target(9, 0, 128), Target::Sm90 | Target::Sm90a));
}

#[test]
fn what_is_missing_is_said() {
    let refusal =
        |dtype, head_dim, major, minor| match select(&problem(dtype, head_dim), &gpu(major, minor))
            .unwrap_err()
        {
            Error::Unsupported { op: "attention", arch, what } => (arch, what),
            other => panic!("{other}"),
        };
    let (arch, what) = refusal(DType::F16, 20, 8, 9);
    assert_eq!(
        (arch.as_str(), what.as_str()),
        (
            "sm_89",
            "head_dim 20: kernels take multiples of 8 up to 512; it runs with q, k and v \
             zero-padded to 24 and the \
             softmax_scale of 20"
        )
    );
    for (head_dim, padded) in [(59, 64), (111, 112), (255, 256), (509, 512), (1, 8)] {
        let (_, what) = refusal(DType::BF16, head_dim, 9, 0);
        assert!(what.contains(&format!("zero-padded to {padded} ")), "{what}");
        select(&problem(DType::BF16, padded), &gpu(9, 0)).unwrap();
    }
    for head_dim in [513, 520] {
        let (_, what) = refusal(DType::F16, head_dim, 9, 0);
        assert_eq!(what, format!("head_dim {head_dim}: kernels take multiples of 8 up to 512"));
    }
    assert!(
        refusal(DType::F32, 64, 9, 0)
            .1
            .contains("kernels take f16 and bf16, but the tensors are f32")
    );
    assert!(refusal(DType::F16, 64, 7, 5).1.contains("compute capability 8.0"));
    let mut small = gpu(8, 9);
    small.smem_per_block = 1024;
    let error = select(&problem(DType::F16, 64), &small).unwrap_err().to_string();
    assert!(error.contains("1024 bytes of shared memory"), "{error}");
}

#[test]
fn preference_is_target_then_tile() {
    let kernel = |target, head_dim| Kernel {
        variant: Variant::AttentionFwd(AttentionFwd {
            types: ElementTypes::all(DType::F16),
            head_dims: HeadDims::all(head_dim),
            block_q: 64,
            block_kv: 32,
            warps: 4,
            split: 1,
            stages: 1,
            min_blocks: 1,
            terms: false,
        }),
        target,
    };
    let kernels = [
        kernel(Target::Ptx80, 64),
        kernel(Target::Sm80, 256),
        kernel(Target::Sm80, 128),
        kernel(Target::Sm89, 128),
    ];
    let chosen = |head_dim, minor| {
        let kernel =
            select_among(&kernels, &problem(DType::F16, head_dim), &gpu(8, minor)).unwrap();
        (kernel.target, kernel.attention_tile().unwrap().head_dims.qk)
    };
    assert_eq!(chosen(64, 0), (Target::Sm80, 128));
    assert_eq!(chosen(136, 0), (Target::Sm80, 256));
    assert_eq!(chosen(64, 9), (Target::Sm89, 128));
    assert_eq!(chosen(256, 9), (Target::Sm80, 256));
}

#[test]
fn every_kernel_has_a_plan() {
    for (kernel, tile) in attention_kernels() {
        let without =
            AttentionProblem::contiguous(tile.types, [2, 300, 500], [8, 2], tile.head_dims);
        let with = without.with_lse();
        let gpu_of_kernel =
            gpus().into_iter().find(|gpu| kernel.target.runs_on(gpu.compute_capability)).unwrap();
        for (problem, asks) in [(with, true), (without, false)] {
            assert_eq!(
                plan(kernel, &problem, &gpu_of_kernel).is_ok(),
                tile.lse.suits(asks),
                "{}",
                kernel.symbol()
            );
            assert_eq!(
                accepts(kernel, &problem, &gpu_of_kernel).is_ok(),
                tile.lse.suits(asks),
                "{}",
                kernel.symbol()
            );
        }
        let asks = tile.lse.suits(true);
        let plan = plan(kernel, if asks { &with } else { &without }, &gpu(9, 0)).unwrap();
        let tiles = 300u32.div_ceil(tile.block_q) * (8 / tile.heads) * 2;
        let family = kernel.family();
        let at_once = if family.is_persistent() { tiles.min(108) } else { tiles };
        assert_eq!(plan.config.grid, [at_once, 1, 1]);
        assert_eq!(plan.plan.heads_per_section > 0, tile.tensor_maps);
        assert_eq!(plan.config.programmatic_dependent_launch, kernel.target == Target::Sm90a);
        assert_eq!(
            (plan.config.block, plan.config.smem_bytes),
            (kernel.threads(), kernel.smem_bytes())
        );
        assert_eq!(plan.config.cluster, None);
        let p = &plan.plan.scalars;
        assert!(p.scores.sink.is_null());
        assert_eq!((p.longest, p.blocks), ([300, 500], [0; 2]));
        let qk = tile.head_dims.qk;
        let window = &p.scores.window;
        assert_eq!([window.left, window.right], [BLOCKFLASH_WINDOW_UNBOUNDED; 2]);
        assert_eq!((window.align_bottom_right, p.scores.softcap), (0, 0.0));
        assert_eq!(p.scores.scale, (1.0 / (qk as f64).sqrt()) as f32);
    }
}

#[test]
fn masks_become_windows() {
    let (kernel, tile) = attention_kernels().next().unwrap();
    let unbounded = BLOCKFLASH_WINDOW_UNBOUNDED;
    let window = |left, right| Mask::Window { left, right, align: Align::TopLeft };
    let planned = |mask| {
        let problem = problem(tile.types.q, 64).with_mask(mask);
        let problem = AttentionProblem {
            scores: ScoresProblem { softcap: Some(7.0), ..problem.scores },
            ..problem
        };
        let plan = plan(kernel, &problem, &gpu(9, 0)).unwrap();
        let p = &plan.plan.scalars;
        assert_eq!(p.scores.softcap, 7.0);
        let window = &p.scores.window;
        (window.left, window.right, window.align_bottom_right)
    };
    assert_eq!(planned(Mask::causal()), (unbounded, 0, 1));
    assert_eq!(planned(Mask::Causal { align: Align::TopLeft }), (unbounded, 0, 0));
    assert_eq!(planned(window(Some(100), Some(20))), (100, 20, 0));
    assert_eq!(planned(window(None, None)), (unbounded, unbounded, 0));
    assert_eq!(planned(window(Some(usize::MAX), Some(1 << 31))), (unbounded, unbounded, 0));
}

#[test]
fn misaligned_strides_are_refused() {
    let (kernel, tile) = attention_kernels().next().unwrap();
    let good = problem(tile.types.q, 64);
    let refused = |problem: &AttentionProblem| match plan(kernel, problem, &gpu(9, 0)) {
        Err(Error::Misaligned { what, problem }) => format!("{what}: {problem}"),
        other => panic!("{other:?}"),
    };
    let mut bad = good;
    bad.q.seq += 4;
    assert_eq!(refused(&bad), "q: the sequence stride is 516 elements, not a multiple of 8");
    let mut bad = good;
    bad.v.head = 65;
    assert!(refused(&bad).contains("v: the head stride"));
    let mut bad = good;
    bad.o.batch += 1;
    assert!(refused(&bad).contains("o: the batch stride"));
    let mut unused = AttentionProblem { batch: 1, ..good };
    unused.k.batch = 3;
    plan(kernel, &unused, &gpu(9, 0)).unwrap();
}

#[test]
fn grids_and_tiles_have_limits() {
    let (kernel, tile) = attention_kernels().next().unwrap();
    let huge =
        AttentionProblem { batch: 1 << 20, num_heads_q: 1 << 12, ..problem(tile.types.q, 64) };
    assert!(matches!(plan(kernel, &huge, &gpu(9, 0)), Err(Error::TooLarge { what: "grid", .. })));
    let wide = problem(tile.types.q, tile.head_dims.qk + 8);
    assert!(matches!(plan(kernel, &wide, &gpu(9, 0)), Err(Error::Unsupported { .. })));
    let other =
        manifest::kernels().iter().find(|kernel| kernel.attention_tile().is_none()).unwrap();
    let error = plan(other, &problem(DType::F16, 64), &gpu(9, 0)).unwrap_err().to_string();
    assert!(error.contains("computes something else"), "{error}");
    let refused = accepts(other, &problem(DType::F16, 64), &gpu(9, 0)).unwrap_err().to_string();
    assert!(refused.contains("computes something else"), "{refused}");
}

#[test]
fn what_is_added_to_scores_needs_a_kernel_for_it() {
    let plain = problem(DType::F16, 64);
    let bias = BiasProblem { dtype: DType::F32, broadcast: [false; 4], mapped: false };
    for (scores, term) in [
        (ScoresProblem { bias: Some(bias), ..plain.scores }, "bias"),
        (ScoresProblem { alibi: true, ..plain.scores }, "alibi"),
    ] {
        let added = AttentionProblem { scores, ..plain };
        assert_eq!(added.terms(), Some(term));
        for gpu in [gpu(8, 0), gpu(9, 0), gpu(12, 0)] {
            for kernel in manifest::kernels() {
                let Some(tile) = kernel.attention_tile() else { continue };
                for (problem, terms) in [(&plain, false), (&added, true)] {
                    let refused = accepts(kernel, problem, &gpu).is_err();
                    assert!(refused || tile.terms == terms, "{} {term}", kernel.symbol());
                }
            }
            let has_terms = |kernel: &Kernel| kernel.attention_tile().unwrap().terms;
            assert!(has_terms(select(&added, &gpu).unwrap()), "{} {term}", gpu.name);
            let without = select(&plain, &gpu).unwrap();
            assert!(!has_terms(without), "{} {term}", gpu.name);
            let error = accepts(without, &added, &gpu).unwrap_err().to_string();
            assert!(error.contains(&format!("{term} is given, and it takes none")), "{error}");
        }
    }
}
