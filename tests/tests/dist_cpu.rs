//! Attention over ranks in threads of the CPU, against the oracle.

use blockflash_ops::{DType, Device};
use blockflash_tests::dist::{dist_cases, run_backward, run_forward};
use blockflash_tests::property;

#[test]
fn forward() {
    let dtypes = vec![DType::F32, DType::BF16, DType::F16];
    property::check(150, dist_cases(8, dtypes, vec![4, 8, 24], 150), |case| {
        run_forward(&case, &Device::cpu()).map(drop)
    });
}

#[test]
fn backward() {
    let dtypes = vec![DType::F32, DType::BF16, DType::F16];
    property::check(100, dist_cases(8, dtypes, vec![4, 8, 24], 120), |case| {
        run_backward(&case, &Device::cpu()).map(drop)
    });
}
