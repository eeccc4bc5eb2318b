use super::super::launches::plan_all;
use super::super::many;
use super::super::plan::{plan, workspace_bytes};
use super::super::prefill::PrefillPlan;
use super::super::select::select;
use super::super::tile::{CacheTile, split_tile};
use super::*;
use crate::fixtures;
use crate::kv_cache::CacheSizes;
use blockflash_sys::DType;

fn h200() -> CudaProperties {
    CudaProperties { multiprocessors: 132, ..fixtures::gpu(9, 0) }
}

/// Sequences whose lengths the host knows: `[batch, keys, queries]`, `[heads of q, of k]`.
fn problem(
    [batch, keys, queries]: [usize; 3],
    heads: [usize; 2],
    head_dim: usize,
) -> AttentionDecodeProblem {
    let cache = CacheSizes::contiguous(DType::BF16, [batch, keys], heads[1], head_dim);
    let cache = CacheSizes { seqused_kv: false, ..cache };
    AttentionDecodeProblem::of(cache, queries, heads[0])
}

/// Rows of the selected tile and splits of a sequence.
fn chosen(problem: &AttentionDecodeProblem) -> (usize, usize) {
    let kernel = select(problem, &h200()).unwrap();
    let tile = super::super::tile(kernel).unwrap();
    if let CacheTile::Many(tile) = tile {
        return (tile.tile.block_q() as usize, many::splits(&tile, problem, &h200()));
    }
    let plan = plan(kernel, problem, &h200()).unwrap();
    let tile = split_tile(kernel, &tile, problem, &h200()).unwrap();
    (tile.rows, plan.scalars.splits as usize)
}

/// Each is within a few percent of the fastest division that was measured on an H200.
#[test]
fn divisions_that_were_measured_to_be_fast() {
    let (gqa, mqa) = ([32, 8], [16, 1]);
    let (_, splits) = chosen(&problem([1, 4096, 1], mqa, 128));
    assert!((8..=32).contains(&splits), "{splits}");
    // All SMs in one round or two, whatever the batch.
    for (batch, keys, heads) in [(3, 4096, gqa), (5, 4096, gqa), (16, 30_000, mqa)] {
        let (rows, splits) = chosen(&problem([batch, keys, 1], heads, 128));
        let items = batch * heads[1] * splits;
        assert!((66..=528).contains(&items), "{rows} rows, {splits} splits of {batch}");
    }
    // Enough sequences need no splits.
    let (_, splits) = chosen(&problem([64, 8192, 1], gqa, 128));
    assert!(splits <= 2, "{splits}");
}

#[test]
fn a_workspace_serves_every_batch_and_length() {
    let limits = |heads: [usize; 2], head_dim: usize, queries: usize| {
        let mut needs = Vec::new();
        for batch in [1, 2, 3, 7, 30, 200, 3000] {
            for keys in [1, 63, 500, 4097, 70_000, 3_000_000] {
                let problem = problem([batch, keys, queries], heads, head_dim);
                let kernel = select(&problem, &h200()).unwrap();
                needs.push(workspace_bytes(kernel, &problem, &h200()).unwrap());
                let planned = plan_all(kernel, &problem, &h200()).unwrap();
                let sums = match (planned.many, planned.few) {
                    (Some((_, PrefillPlan { plan, .. })), _) if plan.splits > 1 => {
                        plan.splits as usize * batch * queries * heads[0] * (head_dim + 1)
                    }
                    (_, Some((_, plan))) if plan.scalars.splits > 1 => {
                        plan.items * plan.partial_rows * (head_dim + 2)
                    }
                    _ => 0,
                };
                assert!(4 * sums <= needs[0], "{batch} x {keys}: {sums}");
            }
        }
        assert!(needs.iter().all(|&bytes| bytes == needs[0]), "{needs:?}");
    };
    limits([32, 8], 128, 1);
    limits([71, 1], 64, 1);
    limits([16, 8], 256, 1);
    limits([32, 4], 128, 4);
    limits([12, 12], 80, 2);
}

/// Where sequences are many and their keys few, the kernel for many queries needs no splits.
#[test]
fn many_short_sequences_have_the_kernel_for_many_queries() {
    let many = |problem: &AttentionDecodeProblem| {
        super::super::select::is_many(select(problem, &h200()).unwrap())
    };
    let short = problem([203, 144, 52], [12, 4], 256);
    assert!(many(&short));
    let unknown = |mut problem: AttentionDecodeProblem| {
        problem.cache.seqused_kv = true;
        problem
    };
    assert!(many(&unknown(short)));
    assert!(
        !many(&AttentionDecodeProblem { batch_invariant: true, ..short }),
        "bits of one sequence"
    );
    // Its workspace has room for the other kernel of fewer sequences.
    let bytes = [1, 203].map(|batch| {
        let problem = problem([batch, 14_400, 52], [12, 4], 256);
        workspace_bytes(select(&problem, &h200()).unwrap(), &problem, &h200()).unwrap()
    });
    assert_eq!(bytes[0], bytes[1]);
}

/// No shape is estimated to take longer than one with more keys by more than a round of splits.
#[test]
fn more_keys_take_longer() {
    for batch in [1, 2, 3, 5, 8, 24] {
        let mut before = 0.0;
        for keys in (64..20_000).step_by(448) {
            let problem = problem([batch, keys, 1], [32, 8], 128);
            let kernel = select(&problem, &h200()).unwrap();
            let tile = super::super::tile(kernel).unwrap();
            let time = match &tile {
                CacheTile::Many(tile) => many::fastest(tile, &problem, &h200()).time,
                tile => {
                    let tile = split_tile(kernel, tile, &problem, &h200()).unwrap();
                    fastest(&tile, &problem, &h200()).time
                }
            };
            assert!(time > 0.9 * before, "{batch} x {keys}: {time} after {before}");
            before = time;
        }
    }
}
