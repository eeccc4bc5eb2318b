use super::*;
use crate::{Device, Tensor};
use blockflash_sys::manifest;
use std::ptr::null;

/// 40 block rows and 300 block columns in groups of 16, 77 blocks.
fn params() -> blockflash_bsr_plan_params {
    blockflash_bsr_plan_params {
        row_ptr: null(),
        col_idx: null(),
        bits: null_mut(),
        by_length: null_mut(),
        row_order: null_mut(),
        formed: null_mut(),
        group_columns: null_mut(),
        report: null_mut(),
        columns: null_mut(),
        starts: null_mut(),
        group_stages: null_mut(),
        stages: null_mut(),
        least_length: 0.75,
        most_kept: 0.95,
        step: BLOCKFLASH_BSR_PLAN_FILL,
        rows: 40,
        cols: 300,
        nnz_blocks: 77,
        row_words: 16,
        group_rows: 16,
        stage_columns: 8,
        stage_blocks: 32,
    }
}

/// In the order of the fields.
const SHAPES: [&[usize]; 12] = [
    &[41],
    &[77],
    &[40],
    &[4 + 80 + 3],
    &[40, 16],
    &[40],
    &[40],
    &[3],
    &[3, 300],
    &[3, 301],
    &[4],
    &[9, 32, 2],
];
const NAMES: [&str; 12] = [
    "row_ptr",
    "col_idx",
    "by_length",
    "report",
    "bits",
    "row_order",
    "formed",
    "group_columns",
    "columns",
    "starts",
    "group_stages",
    "stages",
];

/// Tensors on the CPU: `fit` looks at sizes and strides only.
fn tensors() -> [Tensor; 12] {
    SHAPES.map(|shape| zeros(DType::I32, shape))
}

fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(&Device::cpu().stream().unwrap(), dtype, shape).unwrap()
}

/// With so many of the groups of tensors that steps need: none, those for groups, for columns, for stages.
fn fit(tensors: &mut [Tensor; 12], given: usize, p: &blockflash_bsr_plan_params, blocks: u32) -> Fit {
    let kernel_of = |row: &'static Row| match &row.variant {
        Variant::BsrPlan(kernel) => Some((row, kernel)),
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
    let [row_ptr, col_idx, by_length, report, rest @ ..] = tensors;
    let [bits, row_order, formed, group_columns, columns, starts, group_stages, stages] =
        rest.each_mut().map(Tensor::view_mut);
    BsrPlanOperands {
        row_ptr: row_ptr.view(),
        col_idx: col_idx.view(),
        by_length: by_length.view_mut(),
        report: report.view_mut(),
        groups: (given > 0).then_some(BsrPlanGroups { bits, row_order, formed, group_columns }),
        columns: (given > 1).then_some([columns, starts]),
        stages: (given > 2).then_some([group_stages, stages]),
    }
    .fit(row, kernel, &config, p)
}

#[test]
fn steps_that_fit() {
    let steps = [
        (BLOCKFLASH_BSR_PLAN_CHECK, 0, 2),
        (BLOCKFLASH_BSR_PLAN_GROUP, 1, 1),
        (BLOCKFLASH_BSR_PLAN_COUNT, 2, 3),
        (BLOCKFLASH_BSR_PLAN_FILL, 3, 3),
    ];
    for (step, needed, blocks) in steps {
        let params = blockflash_bsr_plan_params { step, ..params() };
        for given in 0..=3 {
            let expected =
                if given < needed { Err("the step has not all of its tensors".to_owned()) } else { Ok(()) };
            assert_eq!(fit(&mut tensors(), given, &params, blocks), expected, "step {step} with {given}");
        }
        let error = fit(&mut tensors(), 3, &params, blocks + 1).unwrap_err();
        assert!(error.contains("x1x1 blocks"), "{error}");
    }
    // Groups of rows that share no stage may be of any size.
    let by_length = blockflash_bsr_plan_params {
        group_rows: 100,
        stage_columns: 0,
        stage_blocks: 0,
        step: BLOCKFLASH_BSR_PLAN_CHECK,
        ..params()
    };
    let mut others = tensors();
    others[3] = zeros(DType::I32, &[4 + 80 + 1]);
    assert_eq!(fit(&mut others, 0, &by_length, 2), Ok(()));
}

#[test]
fn parameters_that_do_not_fit() {
    type Change = fn(&mut blockflash_bsr_plan_params);
    let cases: [(&str, Change); 13] = [
        ("none or too many", |p| p.rows = 0),
        ("none or too many", |p| p.rows = BLOCKFLASH_BSR_PLAN_LIMIT + 1),
        ("none or too many", |p| p.cols = -1),
        ("none or too many", |p| p.cols = BLOCKFLASH_BSR_PLAN_LIMIT + 1),
        ("out of range", |p| p.group_rows = 0),
        ("out of range", |p| p.nnz_blocks = -1),
        ("row_words", |p| p.row_words = 10),
        ("row_words", |p| p.cols = 513),
        ("report is i32", |p| p.group_rows = 8),
        ("does not fit into a stage", |p| p.stage_columns = 9),
        ("does not fit into a stage", |p| p.stage_columns = 0),
        ("does not fit into a stage", |p| p.stage_blocks = 15),
        ("unknown step", |p| p.step = 4),
    ];
    for (expected, change) in cases {
        let mut params = params();
        change(&mut params);
        let error = fit(&mut tensors(), 3, &params, 3).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    }
}

#[test]
fn tensors_that_do_not_fit() {
    for (at, name) in NAMES.into_iter().enumerate() {
        let mut others = tensors();
        let mut shape = SHAPES[at].to_vec();
        *shape.last_mut().unwrap() += 1;
        others[at] = zeros(DType::I32, &shape);
        let error = fit(&mut others, 3, &params(), 3).unwrap_err();
        assert!(error.starts_with(&format!("{name} is i32")), "{error}");
        let mut others = tensors();
        others[at] = zeros(DType::F32, SHAPES[at]);
        let error = fit(&mut others, 3, &params(), 3).unwrap_err();
        assert!(error.starts_with(&format!("{name} is f32")), "{error}");
    }
}
