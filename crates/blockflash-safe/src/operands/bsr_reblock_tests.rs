use super::*;
use crate::{Device, Tensor};
use blockflash_sys::manifest;
use std::ptr::{null, null_mut};

/// Blocks of 16 f16 into three of 64: each 512 chunks, half of what a block of threads copies.
fn params() -> blockflash_bsr_reblock_params {
    blockflash_bsr_reblock_params {
        block_idx: null(),
        from: null(),
        to: null_mut(),
        large_blocks: 3,
        factor: 4,
        block: 16,
        row_chunks: 2,
    }
}

/// Tensors on the CPU (`fit` looks at sizes and strides only): the index, 7 blocks, and the large ones.
fn tensors() -> [Tensor; 3] {
    [zeros(DType::I32, &[3, 4, 4]), zeros(DType::F16, &[7, 16, 16]), zeros(DType::F16, &[3, 64, 64])]
}

fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(&Device::cpu().stream().unwrap(), dtype, shape).unwrap()
}

fn fit(tensors: &mut [Tensor; 3], params: &blockflash_bsr_reblock_params, blocks: u32) -> Fit {
    let kernel_of = |row: &'static Row| match &row.variant {
        Variant::BsrReblock(kernel) => Some((row, kernel)),
        _ => None,
    };
    let (row, kernel) = manifest::all_rows().iter().find_map(kernel_of).ok_or("no row")?;
    let config = LaunchConfig {
        grid: [blocks, 1, 1],
        block: row.threads(),
        smem_bytes: row.smem_bytes(),
        cluster: None,
        programmatic_dependent_launch: false,
    };
    let [block_idx, from, to] = tensors;
    BsrReblockOperands { block_idx: block_idx.view(), from: from.view(), to: to.view_mut() }
        .fit(row, kernel, &config, params)
}

#[test]
fn blocks_that_fit() {
    assert_eq!(fit(&mut tensors(), &params(), 3), Ok(()));
    // f32 has twice the chunks, and no block to copy is fine.
    let mut wide =
        [zeros(DType::I32, &[3, 8, 8]), zeros(DType::F32, &[0, 16, 16]), zeros(DType::F32, &[3, 128, 128])];
    let wide_params = blockflash_bsr_reblock_params { factor: 8, row_chunks: 4, ..params() };
    assert_eq!(fit(&mut wide, &wide_params, 12), Ok(()));
}

#[test]
fn blocks_that_do_not_fit() {
    type Change = fn(&mut blockflash_bsr_reblock_params);
    let cases: [(&str, Change); 8] = [
        ("not positive", |p| p.large_blocks = 0),
        ("not positive", |p| p.row_chunks = -2),
        ("row_chunks", |p| p.row_chunks = 4),
        ("row_chunks", |p| p.block = 32),
        ("block_idx is i32", |p| p.factor = 3),
        ("block_idx is i32", |p| p.large_blocks = 4),
        ("too large", |p| p.factor = i32::MAX),
        ("too large", |p| p.factor = 1 << 14),
    ];
    for (expected, change) in cases {
        let mut params = params();
        change(&mut params);
        let error = fit(&mut tensors(), &params, 3).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    }
    let mut others = tensors();
    others[0] = zeros(DType::F32, &[3, 4, 4]);
    assert!(fit(&mut others, &params(), 3).unwrap_err().starts_with("block_idx is f32"));
    let mut others = tensors();
    others[1] = zeros(DType::F16, &[7, 32, 16]);
    assert!(fit(&mut others, &params(), 3).unwrap_err().starts_with("from is f16"));
    let mut others = tensors();
    others[2] = zeros(DType::BF16, &[3, 64, 64]);
    assert!(fit(&mut others, &params(), 3).unwrap_err().starts_with("to is bf16"));
    assert!(fit(&mut tensors(), &params(), 2).unwrap_err().starts_with("a grid of 2x1x1 blocks"));
}
