//! Arguments of BSR matmul for tests.

use crate::DType;
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
