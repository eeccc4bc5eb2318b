use super::super::{AttentionDecodeProblem, CacheTile, PageListSizes, accepts, plan, select, tile};
use crate::attention::{Align, Mask, PackedRows};
use crate::fixtures::gpu;
use crate::kv_cache::CacheSizes;
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::kernels;
use blockflash_sys::{DType, Kernel, Target};

fn h200() -> CudaProperties {
    CudaProperties { multiprocessors: 132, ..gpu(9, 0) }
}

fn problem(
    batch: usize,
    keys: usize,
    heads: [usize; 2],
    head_dim: usize,
) -> AttentionDecodeProblem {
    let cache = CacheSizes::contiguous(DType::BF16, [batch, keys], heads[1], head_dim);
    let problem =
        AttentionDecodeProblem::of(CacheSizes { seqused_kv: false, ..cache }, 1, heads[0]);
    AttentionDecodeProblem { batch_invariant: true, ..problem }
}

/// Fewest keys of a split, and splits of an item, of the kernel for few queries with as many rows
/// as the problem has, up to 32.
fn division(problem: &AttentionDecodeProblem) -> (i32, i32) {
    let rows = problem.group_rows().next_power_of_two().clamp(8, 32) as u32;
    let is_wanted = |kernel: &&Kernel| match tile(kernel) {
        Some(CacheTile::Few(tile)) => tile.rows == rows,
        _ => false,
    };
    let selected = select(problem, &h200()).unwrap();
    let kernel = match rows {
        8 => selected,
        _ => kernels()
            .iter()
            .filter(is_wanted)
            .find(|kernel| {
                kernel.target == Target::Sm90 && accepts(kernel, problem, &h200()).is_ok()
            })
            .unwrap(),
    };
    let plan = plan(kernel, problem, &h200()).unwrap();
    (plan.scalars.chunk_min, 1 << plan.scalars.run_log2)
}

/// The best of what was measured, but for `B8_1k`, where splits of 256 keys are 3 % faster.
#[test]
fn what_was_measured_on_an_h200() {
    let (gqa, mqa) = ([32, 8], [32, 1]);
    for (batch, keys, heads, head_dim, expected) in [
        (1, 1024, gqa, 128, (128, 1)),
        (1, 4096, gqa, 128, (256, 1)),
        (1, 8192, gqa, 128, (256, 1)),
        (1, 32_768, gqa, 128, (256, 1)),
        (1, 131_072, gqa, 128, (256, 1)),
        (8, 1024, gqa, 128, (128, 2)),
        (8, 8192, gqa, 128, (256, 4)),
        (8, 32_768, gqa, 128, (256, 4)),
        (64, 1024, gqa, 128, (128, 8)),
        (64, 8192, gqa, 128, (256, 16)),
        (256, 1024, gqa, 128, (128, 8)),
        (256, 8192, gqa, 128, (256, 16)),
        (1, 8192, [32, 32], 128, (256, 1)),
        (8, 8192, [32, 32], 128, (256, 4)),
        (1, 1024, mqa, 128, (128, 1)),
        (1, 8192, mqa, 128, (256, 1)),
        (1, 32_768, mqa, 128, (256, 1)),
        (8, 8192, mqa, 128, (256, 1)),
        (64, 8192, mqa, 128, (256, 8)),
        (256, 8192, mqa, 128, (256, 4)),
        (256, 8192, [8, 1], 128, (256, 16)),
        (64, 32_768, [8, 1], 128, (256, 16)),
        (64, 8192, [8, 1], 128, (256, 8)),
        (1, 8192, gqa, 64, (256, 1)),
        (64, 8192, gqa, 64, (256, 16)),
        (1, 8192, gqa, 256, (256, 1)),
        (64, 8192, gqa, 256, (256, 16)),
    ] {
        let found = division(&problem(batch, keys, heads, head_dim));
        assert_eq!(found, expected, "{batch} x {keys}, {heads:?} heads of {head_dim}");
    }
}

#[test]
fn lengths_on_the_device_have_no_runs() {
    let known = problem(64, 1024, [32, 8], 128);
    let (mut used, mut listed, mut packed) = (known, known, known);
    used.cache.seqused_kv = true;
    listed.pages = Some(PageListSizes { capacity: 1024 });
    packed.attention.packed = Some(PackedRows { total_q: 64, total_kv: 0 });
    for problem in [used, listed, packed] {
        assert_eq!(division(&problem), (256, 1));
    }
}

#[test]
fn keys_that_no_query_sees_do_not_count() {
    let mut windowed = problem(8, 8192, [32, 8], 128);
    assert_eq!(windowed.keys_of_each(), Some(8192));
    windowed.attention.scores.mask =
        Mask::Window { left: Some(1023), right: Some(0), align: Align::BottomRight };
    assert_eq!(windowed.keys_of_each(), Some(1024));
    assert_eq!(division(&windowed), (128, 2));
}

#[test]
fn the_splits_of_a_sequence_do_not_depend_on_the_batch() {
    for keys in [1, 100, 2048, 2049, 5000, 70_000, 1 << 20] {
        let plans = [1, 3, 64, 300].map(|batch| {
            let problem = problem(batch, keys, [32, 8], 128);
            (batch, plan(select(&problem, &h200()).unwrap(), &problem, &h200()).unwrap())
        });
        let (_, first) = &plans[0];
        for (batch, of) in &plans {
            let (p, of_one) = (&of.scalars, &first.scalars);
            assert_eq!([p.splits, p.chunk_min], [of_one.splits, of_one.chunk_min]);
            let splits = of.items << p.run_log2;
            assert_eq!(splits, batch * (first.items << of_one.run_log2), "{keys} keys");
        }
    }
}
