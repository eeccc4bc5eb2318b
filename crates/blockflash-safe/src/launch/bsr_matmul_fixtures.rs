//! Arguments of BSR matmul for tests.

use crate::{BsrIndexArrays, BsrIndices, DType, Device};
use blockflash_sys::manifest::BsrMatmulHopper;
use blockflash_sys::params::blockflash_bsr_matmul_params;
use std::ptr::{null, null_mut};

/// A row of which others differ little.
pub(super) const TILE: BsrMatmulHopper = BsrMatmulHopper {
    dtype: DType::F16,
    block_size: 64,
    block_rows: 1,
    block_n: 256,
    stages: 5,
    filled: false,
    cluster: 1,
    blocks_per_multiprocessor: 1,
    a_transposed: false,
    b_column_major: false,
};

/// `C = A·B` in f32, row-major: all numbers, no pointers.
pub(super) fn params([m, n, k]: [usize; 3], ldb: usize) -> blockflash_bsr_matmul_params {
    blockflash_bsr_matmul_params {
        row_ptr: null(),
        col_idx: null(),
        values: null(),
        row_order: null(),
        b: null(),
        c: null_mut(),
        bias: null(),
        ldb: ldb as i64,
        ldc: n as i64,
        m: m as i64,
        n: n as i64,
        k: k as i64,
        c_dtype: DType::F32 as i32,
        bias_per_row: 0,
        activation: 0,
        b_vectorized: 1,
        c_vectorized: 1,
        alpha: 1.0,
        beta: 0.0,
        c_column_major: 0,
    }
}

/// A pattern with this many blocks in each block row, in the first block columns.
pub(super) fn pattern(lengths: &[i32], transposed: bool) -> BsrIndices {
    let (mut row_ptr, mut col_idx) = (vec![0], Vec::new());
    for &length in lengths {
        col_idx.extend(0..length);
        row_ptr.push(col_idx.len() as i32);
    }
    let row_order: Vec<i32> = (0..lengths.len() as i32).collect();
    let block_idx: Vec<i32> = (0..col_idx.len() as i32).collect();
    let arrays = BsrIndexArrays {
        block_cols: lengths.iter().max().map_or(0, |&most| most as usize),
        row_ptr: &row_ptr,
        col_idx: &col_idx,
        row_order: &row_order,
        block_idx: transposed.then_some(&block_idx),
        stages: None,
    };
    BsrIndices::new(&arrays, &Device::cpu().stream().unwrap()).unwrap()
}
