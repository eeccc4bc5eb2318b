use super::*;
use crate::attention::{Align, AttentionProblem, BlockMaskSizes, Mask, PackedRows};
use crate::fixtures::{gpu, gpus};
use crate::{BiasProblem, ScoresProblem};
use blockflash_sys::{DType, ElementTypes, HeadDims, Target, manifest};

fn planned<'k>(
    problem: &AttentionBackwardProblem,
    gpu: &CudaProperties,
) -> AttentionBackwardPlan<'k> {
    let problem = problem.led(gpu);
    plan(select(&problem, gpu).unwrap(), &problem, gpu).unwrap()
}

/// The steps of a plan and their grids.
fn steps(plan: &AttentionBackwardPlan<'_>) -> Vec<(Step, u32)> {
    let step = |kernel: &Kernel| kernel.attention_bwd_tile().unwrap().step;
    plan.launches.iter().map(|(kernel, config)| (step(kernel), config.grid[0])).collect()
}

fn bytes(forward: AttentionProblem) -> Result<usize> {
    let problem = AttentionBackwardProblem::of(forward);
    let gpu = gpu(8, 0);
    workspace_bytes(select(&problem.at(Step::Keys), &gpu).unwrap(), &problem, &gpu)
}

#[test]
fn statistics_of_whole_tiles() {
    let dense = AttentionProblem::dense(DType::F16, [2, 65, 7], [6, 3], 64);
    assert_eq!(bytes(dense).unwrap(), 2 * 6 * 128 * 8);
    let packed = Some(PackedRows { total_q: 130, total_kv: 7 });
    assert_eq!(bytes(AttentionProblem { packed, ..dense }).unwrap(), 6 * (2 + 2) * 64 * 8);
    assert_eq!(bytes(AttentionProblem { seqlen_q: 0, ..dense }).unwrap(), 0);
    let huge = AttentionProblem { batch: 1 << 31, seqlen_q: 1 << 30, ..dense };
    assert!(matches!(bytes(huge), Err(Error::TooLarge { what: "workspace", .. })));
}

/// Whatever the lengths are, no sequence reaches into the next one or beyond the end.
#[test]
fn packed_sequences_have_room() {
    let rows = STATISTICS_ROWS;
    for lengths in [&[1usize, 64, 0, 63, 2][..], &[64; 3], &[0, 0], &[200]] {
        let mut end = 0;
        let mut first = 0;
        for (i, &length) in lengths.iter().enumerate() {
            let start = (first / rows + i) * rows;
            assert!(start >= end, "{lengths:?}");
            end = start + length.next_multiple_of(rows);
            first += length;
        }
        assert!(end <= (first / rows + lengths.len()) * rows, "{lengths:?}");
    }
}

#[test]
fn launches_of_a_dense_problem() {
    let forward = AttentionProblem::dense(DType::BF16, [2, 200, 300], [8, 2], 128);
    let problem = AttentionBackwardProblem::of(forward);
    let plan = planned(&problem, &gpu(8, 0));
    let tiles =
        [(Step::Statistics, 4 * 8 * 2), (Step::Keys, 5 * 2 * 2), (Step::Queries, 2 * 8 * 2)];
    assert_eq!(steps(&plan), tiles);
    assert_eq!(plan.plan.sums_head_dim, None);
    assert_eq!(statistics(&problem), Some([8 * 2, 256]));
    let sink = AttentionBackwardProblem::of(AttentionProblem {
        scores: ScoresProblem { sink: true, ..forward.scores },
        ..forward
    });
    let last = steps(&planned(&sink, &gpu(8, 0))).pop();
    assert_eq!(last, Some((Step::Sinks, 8)));
    let unwanted = AttentionBackwardProblem { d_sink: false, ..sink };
    assert_eq!(steps(&planned(&unwanted, &gpu(8, 0))).len(), 3);
}

#[test]
fn launches_with_sums() {
    let forward = AttentionProblem::dense(DType::BF16, [3, 2048, 2048], [8, 4], 64);
    let plan = planned(&AttentionBackwardProblem::of(forward), &gpu(9, 0));
    // 16 · 12 blocks of keys for 108 multiprocessors.
    let tiles = [(Step::Statistics, 32 * 24), (Step::KeysAndSums, 108), (Step::Sums, 32 * 24)];
    assert_eq!(steps(&plan), tiles);
    assert_eq!((plan.plan.sums_head_dim, plan.plan.heads_per_section), (Some(64), 8));
    let ascending_of = |heads, sizes, mask| {
        let forward = AttentionProblem::dense(DType::BF16, sizes, heads, 64).with_mask(mask);
        planned(&AttentionBackwardProblem::of(forward), &gpu(9, 0)).plan.heads_per_section
    };
    let ascending = |sizes, mask| ascending_of([16; 2], sizes, mask);
    let window = Mask::Window { left: Some(100), right: Some(0), align: Align::BottomRight };
    // Three rounds of 108 CTAs, and no more than half of the heads.
    assert_eq!(ascending([1, 4096, 4096], Mask::causal()), 8);
    assert_eq!(ascending([2, 4096, 4096], Mask::causal()), 10);
    assert_eq!(ascending([2, 32768, 32768], Mask::causal()), 1);
    assert_eq!(ascending([2, 4096, 4096], window), 1);
    // Heads of keys count; with 6 · 16 blocks, all start at once, with 7 · 16 they do not.
    assert_eq!(ascending_of([64, 16], [2, 4096, 4096], Mask::causal()), 10);
    assert_eq!(ascending_of([6, 6], [1, 2048, 2048], Mask::causal()), 1);
    assert_eq!(ascending_of([7, 7], [1, 2048, 2048], Mask::causal()), 3);
    // Three parts of each head's 8 blocks count as heads, too.
    assert_eq!(ascending_of([56, 7], [1, 1024, 1024], Mask::causal()), 3 * 7 / 2);
    let few = AttentionProblem::dense(DType::BF16, [1, 2048, 2048], [8, 4], 64);
    let plan = planned(&AttentionBackwardProblem::of(few), &gpu(9, 0));
    assert_eq!(plan.plan.heads_per_section, 4);
    // Sums of 128 KB each in a quarter of 40 MB; in less, two steps apart on 108 multiprocessors.
    let short = AttentionProblem::dense(DType::BF16, [32, 512, 512], [32, 32], 64);
    let sections = |l2_bytes| {
        let gpu = CudaProperties { l2_bytes, ..gpu(9, 0) };
        planned(&AttentionBackwardProblem::of(short), &gpu).plan.heads_per_section
    };
    assert_eq!([40 << 20, 8 << 20].map(sections), [80, 54]);
}

/// Every row is written: without queries by the kernel of the keys, and the other way round.
#[test]
fn launches_where_a_side_is_missing() {
    let of = |sizes, heads| {
        let forward = AttentionProblem::dense(DType::BF16, sizes, heads, 64);
        steps(&planned(&AttentionBackwardProblem::of(forward), &gpu(9, 0)))
    };
    assert_eq!(of([2, 0, 300], [8, 2]), [(Step::Keys, 3 * 2 * 2)]);
    assert_eq!(of([2, 5, 300], [0, 2]), [(Step::Keys, 3 * 2 * 2)]);
    assert_eq!(of([2, 100, 0], [8, 2]), [(Step::Statistics, 32), (Step::Queries, 16)]);
    let packed = Some(PackedRows { total_q: 100, total_kv: 30 });
    let forward = AttentionProblem::dense(DType::BF16, [2, 0, 10], [2, 2], 64);
    let problem = AttentionBackwardProblem::of(AttentionProblem { packed, ..forward });
    let found = steps(&planned(&problem, &gpu(9, 0)));
    assert_eq!(found, [(Step::Zeros, 3), (Step::Keys, 4)]);
}

#[test]
fn launches_under_a_block_mask() {
    let mask = BlockMaskSizes {
        block_q: 128,
        block_kv: 256,
        batch: 1,
        heads: 2,
        packed_rows: None,
        bits: false,
    };
    let forward = AttentionProblem::dense(DType::BF16, [2, 300, 500], [8, 2], 64);
    let problem =
        AttentionBackwardProblem::of(AttentionProblem { block_mask: Some(mask), ..forward });
    let plan = planned(&problem, &gpu(9, 0));
    let tiles = [(Step::Statistics, 5 * 16), (Step::Keys, 4 * 4), (Step::Queries, 3 * 16)];
    assert_eq!(steps(&plan), tiles);
    assert!(plan.launches[1..].iter().all(|(kernel, _)| kernel.target == Target::Sm90a));
    assert_eq!(plan.plan.scalars.blocks, [128, 256]);
}

/// A kernel that is asked for runs in the scheme to which it belongs.
#[test]
fn every_kernel_has_its_scheme() {
    let packed = Some(PackedRows { total_q: 2000, total_kv: 2000 });
    for gpu in gpus() {
        for kernel in manifest::kernels() {
            let Some(tile) = kernel.attention_bwd_tile() else { continue };
            let fits = kernel.target.runs_on(gpu.compute_capability)
                && kernel.smem_bytes() <= gpu.smem_per_block;
            if !fits {
                continue;
            }
            let forward =
                AttentionProblem::dense(tile.types.q, [1, 900, 900], [2, 1], tile.head_dims.min());
            let packed = packed.filter(|_| tile.step == Step::Zeros);
            // Kernels with score terms are for problems that have some.
            let bias = BiasProblem {
                dtype: DType::F32,
                broadcast: [true, false, false, false],
                mapped: false,
            };
            let (alibi, bias) = (tile.terms, tile.takes_bias().then_some(bias));
            let forward = AttentionProblem {
                packed,
                scores: ScoresProblem { sink: true, alibi, bias, ..forward.scores },
                ..forward
            };
            let problem = AttentionBackwardProblem::of(forward);
            let plan = plan(kernel, &problem, &gpu).unwrap();
            let place = plan.launches.iter().position(|(other, _)| *other == kernel);
            assert!(place.is_some(), "{}", kernel.image_name());
            let has = |step| steps(&plan).iter().any(|&(other, _)| other == step);
            let sums = has(Step::KeysAndSums);
            assert_eq!(plan.plan.sums_head_dim.is_some(), sums);
            match tile.step {
                Step::KeysAndSums => assert!(has(Step::Sums)),
                Step::Sums => assert!(sums || plan.plan.parts.is_some()),
                Step::Keys | Step::Queries => assert!(!sums),
                _ => {}
            }
        }
    }
}

#[test]
fn strides_and_grids_are_checked() {
    let forward = AttentionProblem::dense(DType::BF16, [2, 100, 100], [2, 2], 64);
    let problem = AttentionBackwardProblem::of(forward);
    let kernel = select(&problem, &gpu(8, 0)).unwrap();
    let mut bad = problem;
    bad.dv.head = 60;
    let error = plan(kernel, &bad, &gpu(8, 0)).unwrap_err();
    assert!(matches!(error, Error::Misaligned { what: "dv", .. }), "{error}");
    let huge = AttentionProblem { batch: 1 << 30, ..forward };
    let error = plan(kernel, &AttentionBackwardProblem::of(huge), &gpu(8, 0)).unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
}

/// All steps of a problem whose head dimensions differ, with a tile that covers both, and sums of
/// dq as wide as that tile.
#[test]
fn unequal_head_dims() {
    for (qk, v) in [(192, 128), (128, 192), (64, 128), (72, 40), (96, 56)] {
        let (types, head_dims) = (ElementTypes::all(DType::BF16), HeadDims { qk, v });
        let forward = AttentionProblem::contiguous(types, [2, 700, 900], [4, 2], head_dims);
        let problem = AttentionBackwardProblem::of(forward.with_lse());
        for gpu in gpus() {
            let plan = planned(&problem, &gpu);
            for (kernel, _) in &plan.launches {
                let tile = kernel.attention_bwd_tile().unwrap();
                assert!(tile.head_dims.qk >= qk.max(v), "{}", kernel.image_name());
                let sums = matches!(tile.step, Step::KeysAndSums | Step::Sums);
                assert!(!sums || plan.plan.sums_head_dim == Some(tile.head_dims.qk));
            }
        }
    }
}

/// The gradient of a bias has a launch of its own behind the others, with a CTA for each tile.
#[test]
fn gradients_of_biases() {
    for (broadcast, tiles) in [([false; 4], 2 * 4 * 15 * 12), ([true, false, true, false], 4 * 12)]
    {
        let forward = AttentionProblem::dense(DType::F16, [2, 900, 768], [4, 2], 64);
        let bias = Some(BiasProblem { dtype: DType::F16, broadcast, mapped: false });
        let scores = ScoresProblem { bias, ..forward.scores };
        let problem = AttentionBackwardProblem::of(AttentionProblem { scores, ..forward });
        let without = AttentionBackwardProblem { dbias: None, ..problem };
        for gpu in gpus() {
            let asked = steps(&planned(&problem, &gpu));
            assert_eq!(asked.last(), Some(&(Step::Bias, tiles)), "{}", gpu.name);
            assert_eq!(steps(&planned(&without, &gpu)), asked[..asked.len() - 1]);
        }
    }
}
