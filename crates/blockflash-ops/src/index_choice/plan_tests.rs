use super::super::select::{support_of_scores, support_of_top_k};
use super::*;
use crate::Error;
use crate::attention::Mask;
use crate::fixtures::gpu;
use crate::selection::{Problem, select};
use blockflash_sys::DType;
use blockflash_sys::manifest::IndexColumns;

/// Queries of one sequence with 128 columns in heads that share a head of keys.
fn scores(seqlen_q: usize, heads: usize, groups: usize, capacity: usize) -> IndexScoresProblem {
    let (_, mut problem) = support_of_scores(DType::BF16).swap_remove(0);
    let cache = &mut problem.cache;
    (cache.capacity, cache.page_size, cache.head_dims.qk) = (capacity, capacity, 128);
    (problem.rows.seqlen_q, problem.rows.capacity) = (seqlen_q, capacity);
    (problem.num_heads, problem.groups) = (heads, groups);
    problem
}

fn choice(rows: usize, blocks: usize) -> TopKProblem {
    let (_, mut problem) = support_of_top_k().swap_remove(0);
    problem.rows.seqlen_q = rows;
    problem.rows.capacity = blocks;
    problem
}

#[test]
fn items_have_enough_columns_and_fill_the_gpu() {
    let gpu = gpu(9, 0);
    for (problem, columns, queries, blocks) in [
        (scores(64, 4, 4, 65_536), IndexColumns::Queries, 64, 216),
        (scores(8192, 4, 4, 8192), IndexColumns::Queries, 128, 216),
        (scores(4096, 32, 1, 4096), IndexColumns::Queries, 32, 216),
        (scores(1, 64, 1, 300), IndexColumns::Heads, 4, 2),
    ] {
        let kernel = select(&problem, &gpu).unwrap();
        let Variant::Index(IndexKernel::Scores { columns: found, head_dim: 128, .. }) =
            kernel.variant
        else {
            panic!("{}", kernel.symbol())
        };
        let launch = plan_scores(kernel, &problem, &gpu).unwrap();
        assert_eq!(found, columns, "{problem:?}");
        assert_eq!((launch.plan.item_queries, launch.config.grid[0]), (queries, blocks));
    }
}

#[test]
fn more_items_than_32_bits_count_have_more_queries_or_are_refused() {
    let gpu = gpu(9, 0);
    let mut problem = scores(1 << 20, 4, 4, 1 << 20);
    problem.rows.batch = 1024;
    let kernel = select(&problem, &gpu).unwrap();
    let launch = plan_scores(kernel, &problem, &gpu).unwrap();
    assert_eq!(launch.plan.item_queries, 4096);
}

#[test]
fn few_long_rows_are_shared_among_ctas() {
    let gpu = gpu(9, 0);
    for (rows, blocks, parts, grid) in
        [(1, 1 << 20, 64, 64), (8, 131_072, 13, 104), (64, 32_768, 1, 64), (2, 300, 1, 2)]
    {
        let problem = choice(rows, blocks);
        let launch = plan_top_k(select(&problem, &gpu).unwrap(), &problem, &gpu).unwrap();
        assert_eq!((launch.plan.parts, launch.config.grid[0]), (parts, grid), "{rows} {blocks}");
        let room = problem.room(&gpu).unwrap();
        assert_eq!(room[1] > 0, parts > 1);
    }
    // Many short rows have a warp each.
    let problem = choice(8192, 512);
    let kernel = select(&problem, &gpu).unwrap();
    assert!(kernel.symbol().contains("warps"), "{}", kernel.symbol());
    assert_eq!(plan_top_k(kernel, &problem, &gpu).unwrap().config.grid[0], 2048);
}

#[test]
fn what_no_kernel_takes_is_named() {
    fn reason<P: Problem>(problem: &P) -> String {
        select(problem, &gpu(9, 0)).unwrap_err().to_string()
    }
    assert!(reason(&support_of_scores(DType::F32)[0].1).contains("f32"));
    let narrow = reason(&support_of_scores(DType::F16)[1].1);
    assert!(narrow.contains("head_dim 59 is not a multiple of 8 up to 256"), "{narrow}");
    let mut other = choice(1, 64);
    other.rows.granularity = 2;
    assert!(reason(&other).contains("blocks of 2 tokens"));
    other.rows.granularity = 1;
    other.rows.seqlen_q = 4;
    other.rows.mask = Mask::Causal { align: Align::TopLeft };
    assert!(reason(&other).contains("top-left"));
    let most = reason(&choice(1, (1 << 20) + 1));
    assert!(most.contains("1048577 blocks, the limit is 1048576"), "{most}");
    assert!(reason(&support_of_top_k()[1].1).contains("lists of 2049 blocks"));
}

#[test]
fn strides_that_16_bytes_do_not_divide_are_refused() {
    let mut problem = scores(4, 4, 4, 64);
    problem.q.seq = 260;
    let gpu = gpu(9, 0);
    let error = plan_scores(select(&problem, &gpu).unwrap(), &problem, &gpu).unwrap_err();
    assert!(matches!(error, Error::Misaligned { what: "q", .. }), "{error}");
}
