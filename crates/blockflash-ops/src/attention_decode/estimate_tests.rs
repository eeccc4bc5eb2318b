use super::super::plan::{plan, workspace_bytes};
use super::super::select::select;
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

/// Rows of the selected tile, splits of a sequence, and CTAs of a cluster.
fn chosen(problem: &AttentionDecodeProblem) -> (u32, i32, u32) {
    let kernel = select(problem, &h200()).unwrap();
    let plan = plan(kernel, problem, &h200()).unwrap();
    let rows = match super::super::tile(kernel).unwrap() {
        super::super::CacheTile::Few(tile) => tile.rows,
        _ => 64,
    };
    (rows, plan.scalars.splits, plan.config.cluster.map_or(1, |[size, ..]| size))
}

/// Each is within a few percent of the fastest division that was measured on an H200.
#[test]
fn divisions_that_were_measured_to_be_fast() {
    let (gqa, mqa) = ([32, 8], [16, 1]);
    // One sequence: a cluster combines the splits.
    assert_eq!(chosen(&problem([1, 4096, 1], mqa, 128)), (8, 16, 16));
    // All SMs in one round, whatever the batch.
    let (rows, splits, _) = chosen(&problem([3, 4096, 1], gqa, 128));
    assert!(rows <= 8 && 3 * 8 * splits <= 264, "{rows} rows, {splits} splits");
    let (rows, splits, _) = chosen(&problem([16, 30_000, 1], mqa, 128));
    assert!(rows >= 16 && (100..=264).contains(&(16 * splits)), "{rows} rows, {splits} splits");
    // Enough sequences need no splits.
    let (_, splits, _) = chosen(&problem([64, 8192, 1], gqa, 128));
    assert!(splits <= 2, "{splits}");
}

#[test]
fn a_workspace_serves_every_batch_and_length() {
    let limits = |heads, head_dim, queries| {
        let mut needs = Vec::new();
        for batch in [1, 2, 3, 7, 30, 200, 3000] {
            for keys in [1, 63, 500, 4097, 70_000, 3_000_000] {
                let problem = problem([batch, keys, queries], heads, head_dim);
                let kernel = select(&problem, &h200()).unwrap();
                needs.push(workspace_bytes(kernel, &problem, &h200()).unwrap());
                let plan = plan(kernel, &problem, &h200()).unwrap();
                let results = plan.items * plan.partial_rows;
                assert!(plan.scalars.splits == 1 || results * (head_dim + 2) * 4 <= needs[0]);
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
    // One long sequence, few rows, the bits of one sequence, lengths that only the device knows.
    let unknown = |mut problem: AttentionDecodeProblem| {
        problem.cache.seqused_kv = true;
        problem
    };
    assert!(many(&unknown(short)), "no other kernel has several rows of wide heads");
    for few in [
        problem([1, 14_400, 52], [12, 4], 256),
        problem([203, 144, 1], [12, 4], 256),
        AttentionDecodeProblem { batch_invariant: true, ..short },
        unknown(problem([203, 144, 52], [12, 4], 128)),
    ] {
        assert!(!many(&few), "{few:?}");
    }
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
            let tile = super::super::tile::split_tile(kernel, &tile, &problem, &h200()).unwrap();
            let time = fastest(&tile, &problem, &h200()).time;
            assert!(time > 0.9 * before, "{batch} x {keys}: {time} after {before}");
            before = time;
        }
    }
}
