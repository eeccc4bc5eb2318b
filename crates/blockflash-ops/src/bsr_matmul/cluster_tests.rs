//! When neighbouring tiles share A, two halves of one share B, or two CTAs an SM.

use super::*;

#[test]
fn neighbouring_tiles_share_a() {
    let cluster = |n, block_size: usize| {
        let nnz_blocks = 8192 * 8192 / (block_size * block_size) / 10;
        let problem = BsrProblem { nnz_blocks, ..problem([8192, n, 8192], block_size) };
        select(&problem, &h200()).unwrap().bsr_matmul_tile().unwrap().cluster
    };
    for block_size in [16, 32, 64] {
        assert_eq!([1024, 8192].map(|n| cluster(n, block_size)), [2; 2], "blocks of {block_size}");
    }
    // Large blocks where the tiles have few columns, so that A is most of what comes; no pair where
    // one of it would have no columns.
    assert_eq!([64, 128, 256, 1024, 8192].map(|n| cluster(n, 128)), [1, 2, 1, 1, 1]);
    // Nearly nothing stored: starting together costs more than sharing saves.
    let sparse = BsrProblem { nnz_blocks: 128, ..problem([8192, 1024, 8192], 64) };
    assert_eq!(select(&sparse, &h200()).unwrap().bsr_matmul_tile().unwrap().cluster, 1);
    // An odd number of SMs leaves one idle.
    let row = hopper_rows().find(|(_, tile)| tile.cluster == 2).unwrap().0;
    let block_size = row.bsr_matmul_tile().unwrap().block_size as usize;
    let gpu = CudaProperties { multiprocessors: 131, ..h200() };
    let plan = plan(row, &problem([1 << 20, 4096, 4096], block_size), &gpu).unwrap();
    assert_eq!((plan.config.grid, plan.config.cluster), ([130, 1, 1], Some([2, 1, 1])));
}

#[test]
fn sparse_products_of_few_columns_share_multiprocessors() {
    // CTAs per SM and of a cluster.
    let chosen = |n, block_size: usize, density: f64| {
        let blocks = 8192.0 * 8192.0 / (block_size * block_size) as f64;
        let nnz_blocks = (blocks * density) as usize;
        let problem = BsrProblem { nnz_blocks, ..problem([8192, n, 8192], block_size) };
        match select(&problem, &h200()).unwrap().variant {
            Variant::BsrMatmulHopper(tile) => (tile.blocks_per_multiprocessor, tile.cluster),
            _ => panic!("a portable kernel"),
        }
    };
    let densities = [0.05, 0.1, 0.2, 0.5];
    assert_eq!(densities.map(|d| chosen(128, 64, d)), [(2, 1), (2, 1), (1, 1), (1, 1)]);
    assert_eq!(densities.map(|d| chosen(128, 128, d)), [(2, 2), (2, 2), (1, 2), (1, 2)]);
    // More tiles than SMs would share them among themselves.
    for n in [512, 1024, 8192] {
        assert!([64, 128].iter().all(|&block_size| chosen(n, block_size, 0.05).0 == 1));
    }
}

#[test]
fn dense_patterns_of_small_blocks_are_filled_with_zeros() {
    let filled = |n, density: f64| {
        let nnz_blocks = (256.0 * 256.0 * density) as usize;
        let problem = BsrProblem { nnz_blocks, ..problem([8192, n, 8192], 32) };
        let variant = select(&problem, &h200()).unwrap().variant;
        matches!(variant, Variant::BsrMatmulHopper(tile) if tile.filled)
    };
    assert_eq!(
        [0.05, 0.1, 0.2, 0.35, 0.5, 1.0].map(|density| filled(1024, density)),
        [false, false, false, true, true, true]
    );
    assert_eq!(
        [0.1, 0.2, 0.35, 0.5].map(|density| filled(8192, density)),
        [false, false, true, true]
    );
    // Half of its columns would be computed for nothing.
    assert_eq!([0.1, 0.5].map(|density| filled(128, density)), [false; 2]);
}
