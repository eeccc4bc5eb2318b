use super::*;
use crate::attention::{Mask, PackedRows};
use crate::fixtures::{gpu, gpus};
use crate::{BiasProblem, ElementTypes, Error, ScoresProblem};
use blockflash_sys::{Target, manifest};

fn h200() -> CudaProperties {
    CudaProperties { multiprocessors: 132, ..gpu(9, 0) }
}

fn dense(seqlen: usize, head_dim: usize) -> AttentionBackwardProblem {
    let sizes = [2, seqlen, seqlen];
    AttentionBackwardProblem::of(AttentionProblem::dense(DType::BF16, sizes, [8, 2], head_dim))
}

fn masked(block_q: u32, block_kv: u32, head_dim: usize) -> AttentionBackwardProblem {
    let mask =
        BlockMaskSizes { block_q, block_kv, batch: 1, heads: 2, packed_rows: None, bits: false };
    let forward = dense(4096, head_dim).forward;
    AttentionBackwardProblem::of(AttentionProblem { block_mask: Some(mask), ..forward })
}

fn why(problem: &AttentionBackwardProblem, gpu: &CudaProperties) -> String {
    match select(problem, gpu) {
        Err(Error::Unsupported { op: "attention_bwd", what, .. }) => what,
        other => panic!("{other:?}"),
    }
}

/// The step and the target of the kernel that decides about the scheme.
fn lead(problem: &AttentionBackwardProblem) -> (Step, Target) {
    let kernel = select(problem, &h200()).unwrap();
    (kernel.attention_bwd_tile().unwrap().step, kernel.target)
}

#[test]
fn every_gpu_has_kernels_for_every_step() {
    for (gpu, head_dim) in
        gpus().iter().flat_map(|gpu| [8, 64, 72, 128, 192, 256, 264, 512].map(|d| (gpu, d)))
    {
        for dtype in [DType::F16, DType::BF16] {
            let of = |problem: AttentionBackwardProblem| {
                let forward = AttentionProblem {
                    types: ElementTypes::all(dtype),
                    scores: ScoresProblem { sink: true, ..problem.forward.scores },
                    ..problem.forward
                };
                AttentionBackwardProblem::of(forward)
            };
            for problem in [dense(200, head_dim), masked(64, 64, head_dim)].map(of) {
                let packed = Some(PackedRows { total_q: 9, total_kv: 9 });
                for step in [Step::Statistics, Step::Sinks, Step::Keys, Step::Queries] {
                    selection::select(&problem.at(step), gpu).unwrap();
                }
                let forward = AttentionProblem { packed, ..problem.forward };
                let packed = AttentionBackwardProblem::of(forward);
                selection::select(&packed.at(Step::Zeros), gpu).unwrap();
                selection::select(&packed, gpu).unwrap();
            }
        }
    }
}

#[test]
fn dq_is_summed_where_that_pays() {
    let (sums, keys) = ((Step::KeysAndSums, Target::Sm90a), (Step::Keys, Target::Sm90a));
    for head_dim in [8, 64, 72, 96, 104, 128, 136, 192] {
        assert_eq!(lead(&dense(4096, head_dim)), sums, "{head_dim}");
        let of_short = if head_dim <= 128 { sums } else { keys };
        assert_eq!(lead(&dense(512, head_dim)), of_short, "{head_dim}");
        assert_eq!(lead(&dense(511, head_dim)), keys, "{head_dim}");
        let forward = dense(512, head_dim).forward.with_mask(Mask::causal());
        assert_eq!(lead(&AttentionBackwardProblem::of(forward)), of_short, "{head_dim}");
    }
    assert_eq!(lead(&dense(4096, 256)), keys);
    // Two blocks of keys of each of 64 heads: 4 · 132 SMs take five entries of the batch.
    let many = |batch, seqlen, head_dim| {
        let sizes = [batch, seqlen, seqlen];
        let forward = AttentionProblem::dense(DType::BF16, sizes, [64; 2], head_dim);
        lead(&AttentionBackwardProblem::of(forward))
    };
    assert_eq!([5, 4].map(|batch| many(batch, 192, 96)), [sums, keys]);
    assert_eq!([many(50, 191, 128), many(50, 511, 192)], [keys; 2]);
    let mut capped = dense(4096, 192).forward;
    capped.scores.softcap = Some(30.0);
    assert_eq!(lead(&AttentionBackwardProblem::of(capped)), keys);
    assert_eq!(lead(&masked(128, 128, 64)), keys);
    let room = workspace(select(&dense(4096, 64), &h200()).unwrap(), &dense(4096, 64), None);
    let room = room.unwrap();
    assert_eq!(lead(&dense(4096, 64).with_workspace(room)), sums);
    assert_eq!(lead(&dense(4096, 64).with_workspace(room - 1)), keys);
    let queries = |softcap| {
        let mut forward = dense(4096, 64).forward;
        forward.scores.softcap = softcap;
        let kernel = select(&AttentionBackwardProblem::of(forward), &h200()).unwrap();
        kernel.attention_bwd_tile().unwrap().block_q
    };
    assert_eq!([queries(None), queries(Some(30.0))], [128, 64]);
    let other = select(&dense(4096, 64), &gpu(8, 0)).unwrap();
    assert_eq!(other.attention_bwd_tile().unwrap().step, Step::Keys);
}

#[test]
fn packed_sequences_and_small_blocks_take_hopper_kernels() {
    let packed = Some(PackedRows { total_q: 5000, total_kv: 5000 });
    let forward = AttentionProblem { packed, ..dense(4096, 128).forward };
    let packed = AttentionBackwardProblem::of(forward);
    assert_eq!(lead(&packed), (Step::KeysAndSums, Target::Sm90a));
    assert_eq!(lead(&packed.with_workspace(0)), (Step::Keys, Target::Sm90a));
    let kernel = |[block_q, block_kv]: [u32; 2], head_dim, step| {
        let problem = masked(block_q, block_kv, head_dim).at(step);
        let kernel = selection::select(&problem, &h200()).unwrap();
        let tile = kernel.attention_bwd_tile().unwrap();
        (kernel.target, tile.head_dims.qk, [tile.block_q, tile.block_kv])
    };
    for (blocks, head_dim, keys, queries) in [
        ([64, 64], 64, (64, [64, 64]), (64, [64, 64])),
        ([64, 64], 96, (128, [64, 64]), (128, [64, 64])),
        ([64, 64], 128, (128, [64, 64]), (128, [64, 64])),
        ([64, 128], 128, (128, [64, 128]), (128, [64, 64])),
        ([128, 64], 128, (128, [64, 64]), (128, [64, 64])),
        ([128, 128], 96, (96, [64, 128]), (96, [128, 128])),
        ([128, 128], 128, (128, [64, 128]), (128, [128, 128])),
        ([64, 64], 256, (256, [64, 64]), (256, [64, 32])),
    ] {
        // 128 queries of a CTA that computes dq beyond a head_dim of 128.
        let target = if head_dim > 128 { Target::Sm90 } else { Target::Sm90a };
        let [keys, queries] = [(Target::Sm90a, keys), (target, queries)]
            .map(|(target, (head_dim, tile))| (target, head_dim, tile));
        assert_eq!(kernel(blocks, head_dim, Step::Keys), keys, "{blocks:?} {head_dim}");
        assert_eq!(kernel(blocks, head_dim, Step::Queries), queries, "{blocks:?} {head_dim}");
    }
    // Entries that are repeated have no tensor map.
    let mut repeated = dense(4096, 128);
    repeated.forward.k.batch = 0;
    assert_eq!(lead(&repeated), (Step::Keys, Target::Sm90));
    let mut repeated = dense(4096, 128);
    repeated.d_o.batch = 0;
    assert_eq!(lead(&repeated), (Step::Keys, Target::Sm90));
    // Under narrow blocks only a tile for more columns is left for dq.
    for (head_dim, wider) in [(64, 96), (128, 192)] {
        let mut repeated = masked(64, 64, head_dim);
        repeated.forward.k.batch = 0;
        assert_eq!(lead(&repeated), (Step::Keys, Target::Sm90));
        let queries = selection::select(&repeated.at(Step::Queries), &h200()).unwrap();
        let tile = queries.attention_bwd_tile().unwrap();
        assert_eq!((queries.target, tile.head_dims.qk), (Target::Sm90, wider));
    }
}

/// ALiBi and partial blocks have kernels of Hopper up to a head_dim of 128, one of its own for dq;
/// a bias and larger head dimensions have portable ones.
#[test]
fn score_terms() {
    let with = |problem: AttentionBackwardProblem, alibi, bias: Option<BiasProblem>| {
        let scores = ScoresProblem { alibi, bias, ..problem.forward.scores };
        AttentionBackwardProblem::of(AttentionProblem { scores, ..problem.forward })
    };
    let partial = |blocks: u32, head_dim| {
        let forward = masked(blocks, blocks, head_dim).forward;
        let mask = forward.block_mask.map(|mask| BlockMaskSizes { bits: true, ..mask });
        AttentionBackwardProblem::of(AttentionProblem { block_mask: mask, ..forward })
    };
    let tile = |problem: &AttentionBackwardProblem, step| {
        let kernel = selection::select(&problem.at(step), &h200()).unwrap();
        let tile = kernel.attention_bwd_tile().unwrap();
        assert!(tile.terms, "{}", kernel.symbol());
        (kernel.target, tile.head_dims.qk, [tile.block_q, tile.block_kv])
    };
    let bias =
        BiasProblem { dtype: DType::BF16, broadcast: [true, false, false, false], mapped: false };
    for (head_dim, width) in [(8, 64), (64, 64), (72, 128), (96, 128), (128, 128)] {
        for problem in [with(dense(4096, head_dim), true, None), partial(128, head_dim)] {
            assert_eq!(lead(&problem), (Step::Keys, Target::Sm90a));
            let expected = |tile| (Target::Sm90a, width, tile);
            assert_eq!(tile(&problem, Step::Keys), expected([64, 128]));
            assert_eq!(tile(&problem, Step::Queries), expected([128, 128]));
            let narrow = partial(64, head_dim);
            assert_eq!(lead(&narrow), (Step::Keys, Target::Sm90a));
            for step in [Step::Keys, Step::Queries] {
                assert_eq!(tile(&narrow, step), expected([64, 64]));
            }
            let capped = |softcap| {
                let mut capped = problem;
                capped.forward.scores.softcap = softcap;
                lead(&capped)
            };
            assert_eq!(capped(Some(30.0)), (Step::Keys, Target::Sm90a));
        }
        let biased = with(dense(4096, head_dim), true, Some(bias));
        assert!(lead(&biased).1.is_portable());
    }
    for problem in [with(dense(4096, 192), true, None), partial(64, 256)] {
        assert!(lead(&problem).1.is_portable());
    }
}

#[test]
fn reasons() {
    let f32 = AttentionProblem { types: ElementTypes::all(DType::F32), ..dense(100, 64).forward };
    assert!(why(&AttentionBackwardProblem::of(f32), &h200()).contains("f16 and bf16"));
    let mask = masked(64, 64, 64).forward.block_mask.unwrap();
    let partial = AttentionProblem {
        block_mask: Some(BlockMaskSizes { bits: true, ..mask }),
        ..masked(64, 64, 64).forward
    };
    let partial = AttentionBackwardProblem::of(partial);
    let terms = |problem: &AttentionBackwardProblem| {
        select(problem, &h200()).unwrap().attention_bwd_tile().unwrap().terms
    };
    assert!(terms(&partial) && !terms(&masked(64, 64, 64)));
    let plain = select(&masked(64, 64, 64), &h200()).unwrap();
    let said = accepts(plain, &partial, &h200()).unwrap_err().to_string();
    assert!(said.contains("a block mask with partial blocks is given"), "{said}");
    assert!(why(&dense(100, 59), &h200()).contains("multiples of 8 up to 512"));
    assert!(why(&dense(100, 520), &h200()).contains("multiples of 8 up to 512"));
    assert!(why(&dense(100, 64), &gpu(7, 5)).contains("compute capability 8.0"));
    let without = AttentionBackwardProblem { transpose: None, ..masked(128, 128, 64) };
    assert!(why(&without, &h200()).contains("with_transpose"));
    assert!(why(&masked(8, 64, 64), &h200()).contains("divide blocks of 8 × 64"));
    let refusal = |step, problem: &AttentionBackwardProblem| {
        let tile = |kernel: &&Kernel| {
            kernel.attention_bwd_tile().is_some_and(|tile| {
                let found = (tile.step, tile.types.q, tile.head_dims.qk >= 64);
                found == (step, DType::BF16, true) && !tile.terms
            }) && kernel.target.runs_on(h200().compute_capability)
        };
        let kernel = manifest::kernels().iter().find(tile).unwrap();
        accepts(kernel, problem, &h200()).map_err(|error| error.to_string())
    };
    refusal(Step::Keys, &dense(100, 64)).unwrap();
    let error = refusal(Step::Zeros, &dense(100, 64)).unwrap_err();
    assert!(error.contains("every row belongs to a sequence"), "{error}");
    let error = refusal(Step::Sinks, &dense(100, 64)).unwrap_err();
    assert!(error.contains("no gradient of a sink"), "{error}");
    let error = refusal(Step::Sums, &masked(128, 128, 64)).unwrap_err();
    assert!(error.contains("not summed under a block mask"), "{error}");
    let error = refusal(Step::Sums, &dense(4096, 64).with_workspace(0)).unwrap_err();
    assert!(error.contains("0 bytes has no room for dq"), "{error}");
    let causal = dense(4096, 64).forward.with_mask(Mask::causal());
    refusal(Step::Sums, &AttentionBackwardProblem::of(causal)).unwrap();
}
