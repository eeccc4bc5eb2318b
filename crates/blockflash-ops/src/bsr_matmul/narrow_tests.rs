use super::super::{accepts, plan, select};
use super::*;
use crate::rates::tests::{a100, h200};
use blockflash_sys::manifest::{self, Variant};
use blockflash_sys::{DType, Kernel, Major};

fn problem([m, n, k]: [usize; 3], block: usize, nnz_blocks: usize) -> BsrProblem {
    BsrProblem {
        longest_row: Some(k / block),
        ..BsrProblem::new(DType::BF16, [m, n, k], block, nnz_blocks)
    }
}

fn narrow_kernels() -> impl Iterator<Item = (&'static Kernel, BsrMatmulNarrow)> {
    manifest::kernels().iter().filter_map(|kernel| match kernel.variant {
        Variant::BsrMatmulNarrow(tile) => Some((kernel, tile)),
        _ => None,
    })
}

#[test]
fn few_columns_take_the_narrowest_tile_that_reads_a_once() {
    for block in [16, 32, 64, 128] {
        let chosen = |n: usize, ldb: usize| {
            let problem = problem([4096, n, 4096], block, 1000);
            let b_vectorized = ldb.is_multiple_of(8);
            let kernel = select(&BsrProblem { ldb, b_vectorized, ..problem }, &h200()).unwrap();
            match kernel.variant {
                Variant::BsrMatmulNarrow(tile) => Some(tile.block_n),
                _ => None,
            }
        };
        for ldb in [1, 40, 41] {
            assert_eq!([1, 7, 8].map(|n| chosen(n, ldb.max(n))), [Some(8); 3], "{block} {ldb}");
            assert_eq!([9, 16, 32].map(|n| chosen(n, ldb.max(n))), [Some(32); 3], "{block} {ldb}");
            assert_eq!(chosen(33, ldb.max(33)), None);
        }
    }
    // Other layouts have other kernels, other GPUs the portable ones.
    let columns = problem([4096, 8, 4096], 64, 1000).with_layouts(false, Major::Column, Major::Row);
    let is_narrow = |problem: &BsrProblem, gpu: &CudaProperties| {
        matches!(select(problem, gpu).unwrap().variant, Variant::BsrMatmulNarrow(_))
    };
    assert!(!is_narrow(&columns, &h200()));
    assert!(!is_narrow(&problem([4096, 8, 4096], 64, 1000), &a100()));
}

/// Any number of columns can be asked for by name.
#[test]
fn plans_cover_all_strips_and_columns() {
    for (kernel, tile) in narrow_kernels() {
        let block = tile.block_size as usize;
        for (n, rows) in [(1, 3), (8, 5), (100, 7)] {
            let problem = BsrProblem {
                dtype: tile.dtype,
                c_dtype: tile.dtype,
                ..problem([rows * block - 3, n, 10 * block], block, 20)
            };
            accepts(kernel, &problem, &h200()).unwrap();
            let plan = plan(kernel, &problem, &h200()).unwrap();
            let blocks = n.div_ceil(tile.block_n as usize) * rows * tile.strips() as usize;
            assert_eq!(plan.config.grid, [blocks as u32, 1, 1]);
            assert_eq!((plan.config.cluster, plan.parts), (None, 1));
            assert!(plan.config.programmatic_dependent_launch);
        }
    }
}

/// 3 rows of 448 blocks among 253 empty ones, and block rows of one length.
#[test]
fn clusters_share_long_rows() {
    for (kernel, tile) in narrow_kernels() {
        let block = tile.block_size as usize;
        let launch_of = |lengths: Vec<i32>, n: usize| {
            let (rows, nnz) = (lengths.len(), lengths.iter().sum::<i32>() as usize);
            let problem = BsrProblem {
                dtype: tile.dtype,
                c_dtype: tile.dtype,
                ..problem([rows * block, n, 448 * block], block, nnz)
            };
            let plan = plan(kernel, &problem, &h200()).unwrap();
            let lengths = Lengths::new(lengths);
            launch(&tile, &plan.params, &plan.config, plan.share, &lengths).unwrap()
        };
        let mut lengths = vec![448; 3];
        lengths.resize(256, 0);
        let strips = tile.strips();
        let (plan, config) = launch_of(lengths.clone(), 8);
        assert_eq!((plan.ctas, plan.long_strips), (8, 3 * strips as i32));
        assert_eq!(config.cluster, Some([8, 1, 1]));
        // A cluster for each of the long strips, and one for eight others.
        assert_eq!(config.grid, [8 * (3 * strips + (253 * strips).div_ceil(8)), 1, 1]);
        // Twice with two tiles of columns.
        let (_, twice) = launch_of(lengths, 2 * tile.block_n as usize);
        assert_eq!(twice.grid[0], 2 * config.grid[0]);
        // More strips of one length than CTAs that run at a time stay whole. A few are shared by as
        // many CTAs as run at a time, if they are long enough.
        let (plan, config) = launch_of(vec![60; 1000], 8);
        assert_eq!((plan.ctas, plan.long_strips, config.cluster), (1, 0, None));
        assert_eq!(config.grid[0], 1000 * strips);
        let running = 132 * tile.min_blocks;
        for rows in [8, 16, 32] {
            let (plan, config) = launch_of(vec![400; rows], 8);
            assert_eq!(plan.long_strips, rows as i32 * strips as i32);
            let at_most = running.max(2 * rows as u32 * strips);
            assert!((at_most / 4..=at_most).contains(&config.grid[0]) || plan.ctas == 8);
            assert_eq!(config.grid[0], plan.ctas * rows as u32 * strips);
        }
        // Short rows are not worth it.
        assert_eq!(launch_of(vec![3; 16], 8).0.ctas, 1);
    }
}
