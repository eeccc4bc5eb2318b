use super::*;
use crate::attention::{AttentionProblem, BlockMaskSizes, Mask, PackedRows};
use crate::attention_bwd::{plan, select, workspace_bytes};
use crate::fixtures::gpu;
use blockflash_sys::DType;

fn h200() -> CudaProperties {
    CudaProperties { multiprocessors: 132, ..gpu(9, 0) }
}

fn problem(sizes: [usize; 3], heads: [usize; 2], head_dim: usize) -> AttentionBackwardProblem {
    AttentionBackwardProblem::of(AttentionProblem::dense(DType::BF16, sizes, heads, head_dim))
}

fn causal(problem: AttentionBackwardProblem) -> AttentionBackwardProblem {
    AttentionBackwardProblem { forward: problem.forward.with_mask(Mask::causal()), ..problem }
}

fn count(problem: AttentionBackwardProblem) -> i32 {
    let kernel = select(&problem, &h200()).unwrap();
    parts(kernel, &problem, &h200()).map_or(1, |parts| parts.count)
}

#[test]
fn heads_are_split_where_blocks_of_keys_are_few_or_long() {
    // 8 blocks of keys for 132 SMs, of 32 heads; as many parts as there are SMs for.
    assert_eq!(count(problem([1, 117, 117], [64, 2], 128)), 32);
    assert_eq!(count(problem([1, 192, 192], [64, 8], 128)), 8);
    assert_eq!(count(causal(problem([3, 2672, 2672], [16, 2], 128))), 2);
    // 174 blocks would take two rounds.
    assert!(count(problem([1, 11136, 11136], [32, 2], 128)) >= 3);
    assert!(count(causal(problem([1, 1287, 1287], [8, 1], 256))) >= 4);
    // Seven rounds of 8 heads each, and a group of one head.
    assert_eq!(count(causal(problem([9, 1717, 1717], [64, 8], 128))), 1);
    assert_eq!(count(problem([1, 117, 117], [8, 8], 128)), 1);
}

#[test]
fn only_dense_batches_with_room_are_split() {
    let few = problem([1, 900, 900], [16, 1], 128);
    assert!(count(few) > 1);
    let packed = Some(PackedRows { total_q: 900, total_kv: 900 });
    let forward = AttentionProblem { packed, ..few.forward };
    assert_eq!(count(AttentionBackwardProblem { forward, ..few }), 1);
    let mask = BlockMaskSizes {
        block_q: 128,
        block_kv: 128,
        batch: 1,
        heads: 1,
        packed_rows: None,
        bits: false,
    };
    let forward = AttentionProblem { block_mask: Some(mask), ..few.forward };
    assert_eq!(count(AttentionBackwardProblem::of(forward)), 1);
    // Warpgroups that share keys beside sums of dq leave no parts.
    assert_eq!(count(problem([1, 2000, 2000], [16, 1], 160)), 1);
    let kernel = select(&few, &h200()).unwrap();
    let room = workspace_bytes(kernel, &few, &h200()).unwrap();
    let least = workspace(kernel, &few, None).unwrap();
    assert_eq!(room - least, count(few) as usize * 2 * 1024 * 128 * 4);
    assert!(count(few.with_workspace(room)) > 1);
    assert_eq!(count(few.with_workspace(room - 1)), 1);
    let bytes = workspace_bytes(kernel, &few.with_workspace(room - 1), &h200()).unwrap();
    assert_eq!(bytes, least);
}

/// Whatever the count is, every query head of a group is in one part, as the kernels divide them.
#[test]
fn parts_have_every_head_once() {
    for group in 2..=71 {
        for count in 2..=group {
            let first = |part: usize| part * group / count;
            let heads: Vec<_> = (0..count).flat_map(|part| first(part)..first(part + 1)).collect();
            assert_eq!(heads, (0..group).collect::<Vec<_>>());
            let longest = (0..count).map(|part| first(part + 1) - first(part)).max();
            assert_eq!(longest, Some(group.div_ceil(count)));
        }
    }
}

/// Every plan of a split has a CTA for each block of keys and part, and one for each 64 keys of dk
/// and of dv behind it.
#[test]
fn plans_cover_every_block_and_part() {
    let gpu = h200();
    for (sizes, heads, head_dim) in [
        ([1, 1, 1], [4, 2], 64),
        ([2, 65, 129], [14, 2], 64),
        ([1, 777, 777], [71, 1], 64),
        ([1, 777, 900], [32, 4], 80),
        ([3, 217, 217], [56, 8], 128),
        ([1, 300, 5000], [12, 2], 128),
        ([2, 700, 700], [32, 8], 160),
        ([1, 1287, 1287], [8, 1], 256),
        ([1, 333, 65], [12, 4], 256),
    ] {
        for problem in [problem(sizes, heads, head_dim), causal(problem(sizes, heads, head_dim))] {
            let kernel = select(&problem, &gpu).unwrap();
            let plan = plan(kernel, &problem, &gpu).unwrap();
            let grid = |step| {
                let of = |kernel: &Kernel| kernel.attention_bwd_tile().unwrap();
                let launch = plan.launches.iter().find(|(kernel, _)| of(kernel).step == step);
                launch.map(|(kernel, config)| (of(kernel), config.grid[0] as usize))
            };
            let sums = grid(Step::KeysAndSums);
            let (tile, ctas) = sums.or(grid(Step::Keys)).unwrap();
            let count = plan.plan.parts.map_or(1, |parts| parts.count as usize);
            let blocks = sizes[2].div_ceil(tile.block_kv as usize) * sizes[0] * heads[1] * count;
            let persistent = kernel.family().is_persistent();
            let expected = if persistent { blocks.min(132) } else { blocks };
            assert_eq!(ctas, expected, "{problem:?}");
            let of_queries =
                if sums.is_some() { sizes[1].div_ceil(64) * sizes[0] * heads[0] } else { 0 };
            let of_keys = match plan.plan.parts {
                Some(parts) => {
                    assert_eq!(parts.head_dim, tile.head_dims.qk);
                    assert!((2..=heads[0] / heads[1]).contains(&count));
                    2 * sizes[2].div_ceil(128) * 2 * sizes[0] * heads[1]
                }
                None => 0,
            };
            let rounds = grid(Step::Sums).map_or(0, |(rounds, ctas)| {
                assert_eq!(rounds.head_dims, tile.head_dims);
                ctas
            });
            assert_eq!(rounds, of_queries + of_keys, "{problem:?}");
        }
    }
}
