//! Selection and planning of the rows that take any layout.

use super::super::plan;
use super::*;
use crate::fixtures::{gpu, gpus};
use crate::selection::select_among;
use blockflash_sys::manifest;

const BLOCK_SIZES: [usize; 4] = [16, 32, 64, 128];

/// Every layout of A, B and C.
fn layouts() -> impl Iterator<Item = (bool, Major, Major)> {
    let of_b_and_c = Major::ALL.into_iter().flat_map(|b| Major::ALL.map(|c| (b, c)));
    of_b_and_c.flat_map(|(b, c)| [false, true].map(|a| (a, b, c)))
}

fn rows(any_layout: bool) -> Vec<Kernel> {
    manifest::kernels().iter().filter(|row| row.takes_any_layout() == any_layout).cloned().collect()
}

fn problem(dtype: DType, block_size: usize) -> BsrProblem {
    BsrProblem::new(dtype, [1000, 520, 2000], block_size, 77)
}

#[test]
fn every_layout_has_a_row_and_others_come_first() {
    let others = rows(false);
    for gpu in gpus() {
        for (dtype, block_size) in
            [DType::F16, DType::BF16].into_iter().flat_map(|t| BLOCK_SIZES.map(|b| (t, b)))
        {
            for (a, b, c) in layouts() {
                let problem = problem(dtype, block_size).with_layouts(a, b, c);
                let row = select_among(manifest::kernels(), &problem, &gpu).unwrap();
                match select_among(&others, &problem, &gpu) {
                    Ok(other) => assert_eq!(row, other, "{}", gpu.name),
                    Err(_) => assert!(row.takes_any_layout(), "{}: {}", gpu.name, row.image_name()),
                }
            }
        }
    }
}

#[test]
fn hopper_takes_its_own_where_tensor_maps_exist() {
    let hopper = gpu(9, 0);
    let good = problem(DType::BF16, 64).with_layouts(true, Major::Column, Major::Column);
    let selected =
        |problem| select_among(manifest::kernels(), &problem, &hopper).unwrap().takes_any_layout();
    assert!(!selected(good));
    assert!(selected(BsrProblem { b_vectorized: false, ldb: 2001, ..good }));
    assert!(selected(BsrProblem { k: 1 << 31, ldb: 1 << 31, ..good }));
    assert!(selected(problem(DType::BF16, 32).with_layouts(false, Major::Row, Major::Column)));
    // Rows of B that are not aligned are for the plain portable kernel.
    assert!(!selected(BsrProblem { b_vectorized: false, ldb: 521, ..problem(DType::BF16, 64) }));
}

#[test]
fn a_row_takes_every_layout_and_alignment() {
    for row in rows(true) {
        let tile = row.bsr_matmul_tile().unwrap();
        let gpu =
            gpus().into_iter().find(|gpu| row.target.runs_on(gpu.compute_capability)).unwrap();
        for (a, b, c) in layouts() {
            let aligned = problem(tile.dtype, tile.block_size as usize).with_layouts(a, b, c);
            let [ldb, ldc] = [aligned.ldb + 3, aligned.ldc + 1];
            let unaligned =
                BsrProblem { b_vectorized: false, c_vectorized: false, ldb, ldc, ..aligned };
            for problem in [aligned, unaligned] {
                accepts(&row, &problem, &gpu).unwrap();
                let plan = plan(&row, &problem, &gpu).unwrap();
                let tiles = 520u32.div_ceil(tile.block_n) * 1000u32.div_ceil(tile.block_size);
                assert_eq!((plan.config.grid, plan.parts), ([tiles, 1, 1], 1));
                assert_eq!(
                    (plan.config.block, plan.config.smem_bytes),
                    (row.threads(), row.smem_bytes())
                );
                assert!(
                    !plan.config.programmatic_dependent_launch && plan.config.cluster.is_none()
                );
                let p = plan.any_params(&problem);
                assert_eq!(
                    [p.a_transposed, p.b_column_major],
                    [a.into(), i32::from(b == Major::Column)]
                );
                assert_eq!(p.base.c_column_major, i32::from(c == Major::Column));
                assert_eq!([p.base.ldb, p.base.ldc], [problem.ldb as i64, problem.ldc as i64]);
                assert!(p.block_idx.is_null() && p.base.b.is_null());
            }
        }
    }
}

#[test]
fn what_it_does_not_take_is_named() {
    let rows = rows(true);
    let row = rows.iter().find(|row| row.symbol().contains("_f16_b32_")).unwrap();
    let refused = |problem: &BsrProblem, gpu: &CudaProperties| {
        accepts(row, problem, gpu).unwrap_err().to_string()
    };
    let good = problem(DType::F16, 32).with_layouts(true, Major::Column, Major::Column);
    assert!(
        refused(&BsrProblem { block_size: 64, ..good }, &gpu(9, 0))
            .contains("blocks of 32, not 64")
    );
    assert!(refused(&BsrProblem { dtype: DType::BF16, ..good }, &gpu(9, 0)).contains("takes f16"));
    assert!(refused(&good, &gpu(7, 5)).contains("sm_"));
    let error = select_among(&rows, &BsrProblem { block_size: 48, ..good }, &gpu(9, 0))
        .unwrap_err()
        .to_string();
    assert!(error.contains("kernels take [16, 32, 64, 128]"), "{error}");
}
