use super::*;
use crate::fixtures::{gpu, gpus, values};
use blockflash_sys::{BsrReblockKernel, Target};

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

/// 100 × 90, about a third of the blocks of this size, all with the same pattern whatever the numbers.
fn matrix(dtype: DType, block_size: usize, seed: u64) -> BsrMatrix {
    let (noise, chosen) = (values(100 * 90, seed), values(100 * 90, 4));
    let triplets: Vec<(usize, usize, f32)> = (0..100)
        .flat_map(|row| (0..90).map(move |col| (row, col)))
        .filter(|(row, col)| chosen[row / block_size * 90 + col / block_size] > 0.3)
        .map(|(row, col)| (row, col, noise[row * 90 + col]))
        .collect();
    BsrMatrix::from_coo(100, 90, block_size, dtype, &triplets).unwrap()
}

#[test]
fn updates_are_what_the_host_makes() {
    let stream = cpu();
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        for (block_size, large) in [(8, 8), (8, 24), (5, 10), (16, 64), (32, 128)] {
            let mut reblock = BsrReblock::new(&matrix(dtype, block_size, 1), large, &stream).unwrap();
            let address = reblock.matrix().values().view().is_aligned(16);
            assert!(address && reblock.device().is_cpu());
            for seed in [1, 2, 3] {
                let small = matrix(dtype, block_size, seed);
                if seed > 1 {
                    reblock.update(&small, &stream).unwrap();
                }
                let expected = small.with_block_size(large).unwrap();
                assert_eq!(reblock.matrix().to_dense().unwrap(), small.to_dense().unwrap());
                assert_eq!(reblock.matrix().to_dense().unwrap(), expected.to_dense().unwrap());
                reblock.matrix().has_pattern_of(&expected).unwrap();
            }
        }
    }
}

#[test]
fn the_index_says_what_lies_where() {
    let triplets = [(0, 2, 1.0), (1, 3, 1.0), (3, 2, 1.0), (4, 4, 1.0)];
    let small = BsrMatrix::from_coo(5, 5, 1, DType::F32, &triplets).unwrap();
    let reblock = BsrReblock::new(&small, 2, &cpu()).unwrap();
    assert_eq!(reblock.block_idx().shape(), [3, 2, 2]);
    let index = reblock.block_idx().to_vec::<i32>(&cpu()).unwrap();
    assert_eq!(index, [0, -1, -1, 1, -1, -1, 2, -1, 3, -1, -1, -1]);
    let nothing = BsrMatrix::from_coo(40, 0, 8, DType::F32, &[]).unwrap();
    let mut reblock = BsrReblock::new(&nothing, 16, &cpu()).unwrap();
    reblock.update(&nothing, &cpu()).unwrap();
    assert_eq!(reblock.matrix().nnz_blocks(), 0);
}

#[test]
fn other_matrices_are_refused() {
    let (small, stream) = (matrix(DType::F32, 8, 1), cpu());
    for size in [0, 4, 12, 2048] {
        assert!(matches!(BsrReblock::new(&small, size, &stream), Err(Error::InvalidBsr(_))), "{size}");
    }
    let mut reblock = BsrReblock::new(&small, 16, &stream).unwrap();
    let before = reblock.matrix().to_dense().unwrap();
    let other = BsrMatrix::from_coo(100, 90, 8, DType::F32, &[(0, 0, 1.0)]).unwrap();
    let error = reblock.update(&other, &stream).unwrap_err();
    assert!(error.to_string().contains("another pattern, 100 x 90 with"), "{error}");
    let error = reblock.update(&matrix(DType::BF16, 8, 1), &stream).unwrap_err();
    assert!(matches!(error, Error::DType { what: "from", found: DType::BF16, .. }), "{error}");
    let row = manifest::all_rows().iter().find(|row| matches!(row.variant, Variant::BsrReblock(_))).unwrap();
    let error = reblock.update_with(row, &small, &stream).unwrap_err();
    assert!(error.to_string().contains("it runs on a GPU"), "{error}");
    assert_eq!(reblock.matrix().to_dense().unwrap(), before);
}

#[test]
fn every_gpu_has_a_kernel_for_whole_chunks() {
    let rows = manifest::all_rows();
    for gpu in gpus() {
        for (dtype, block_size) in [(DType::F16, 8), (DType::BF16, 24), (DType::F32, 4), (DType::F32, 16)] {
            let row = select_among(rows, &matrix(dtype, block_size, 1), &gpu).unwrap();
            assert_eq!(row.source(), "bsr_reblock_sm80");
        }
        let error = select_among(rows, &matrix(DType::F16, 4, 1), &gpu).unwrap_err();
        assert!(error.to_string().contains("rows of blocks of 4 in f16 are no multiples"), "{error}");
    }
    let found = |major, minor| select_among(rows, &matrix(DType::F16, 8, 1), &gpu(major, minor));
    assert_eq!(found(9, 0).unwrap().target, Target::Sm90);
    assert_eq!(found(10, 0).unwrap().target, Target::Ptx80);
    assert!(matches!(found(7, 5), Err(Error::Unsupported { op: OP, .. })));
}

#[test]
fn launches_cover_every_chunk() {
    let row = manifest::all_rows().iter().find(|row| row.source() == "bsr_reblock_sm80").unwrap();
    let Variant::BsrReblock(BsrReblockKernel { warps, chunks }) = row.variant else { panic!("{row:?}") };
    for (dtype, large) in [(DType::F16, 64), (DType::F16, 128), (DType::F32, 128), (DType::BF16, 1024)] {
        let small = matrix(dtype, 16, 1);
        let to = small.with_block_size(large).unwrap();
        let (params, config) = plan(row, &small, &to).unwrap();
        assert_eq!((params.factor, params.block), (large as i32 / 16, 16));
        assert_eq!(params.row_chunks, dtype.size() as i32);
        let bytes = to.nnz_blocks() * large * large * dtype.size();
        let copied = (config.grid[0] * 32 * warps * chunks * 16) as usize;
        assert!(copied >= bytes && copied < bytes + to.nnz_blocks() * (32 * warps * chunks * 16) as usize);
        assert!(config.block == 32 * warps && !config.programmatic_dependent_launch);
    }
    let other = manifest::all_rows().iter().find(|row| row.bsr_tile().is_some()).unwrap();
    let small = matrix(DType::F16, 16, 1);
    assert!(matches!(plan(other, &small, &small), Err(Error::Unsupported { .. })));
}
