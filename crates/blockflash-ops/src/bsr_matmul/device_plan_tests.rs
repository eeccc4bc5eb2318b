use super::*;
use crate::fixtures::{gpu, gpus};
use blockflash_safe::Device;
use blockflash_sys::Target;

fn shape(rows: usize, cols: usize, block_size: usize) -> Shape {
    Shape::new(rows * block_size, cols * block_size, block_size).unwrap()
}

#[test]
fn machine_code_before_ptx() {
    let found = |gpu: &CudaProperties| select_among(manifest::all_rows(), gpu).map(|row| row.target);
    for ((major, minor), target) in [((8, 0), Target::Sm80), ((9, 0), Target::Sm90), ((10, 0), Target::Ptx80)]
    {
        assert_eq!(found(&gpu(major, minor)), Some(target));
    }
    assert!(gpus().iter().all(|gpu| found(gpu).is_some()));
    assert_eq!(found(&gpu(7, 5)), None);
}

#[test]
fn sizes_of_patterns() {
    let cases = [
        (shape(512, 512, 16), true),
        (shape(2048, 2048, 16), true),
        (shape(2049, 2048, 16), false),
        (shape(2049, 2048, 128), true),
        (shape(4096, 4096, 128), true),
        (shape(4097, 1, 128), false),
        (shape(1, 4097, 128), false),
        (shape(16, 4096, 32), true),
        (shape(0, 5, 16), false),
        (shape(5, 0, 16), false),
        (shape(40, 30, 7), true),
    ];
    for (shape, expected) in cases {
        assert_eq!(takes(&shape), expected, "{shape:?}");
    }
    let stream = Device::cpu().stream().unwrap();
    let refused = |row: &Row, shape: &Shape| accepts(row, shape, &stream).unwrap_err().to_string();
    for row in manifest::all_rows() {
        let what =
            if matches!(row.variant, Variant::BsrPlan(_)) { "runs on a GPU" } else { "something else" };
        let error = refused(row, &shape(5, 5, 16));
        assert!(error.contains(what), "{error}");
    }
    let row = select_among(manifest::all_rows(), &gpu(9, 0)).unwrap();
    assert!(refused(row, &shape(2049, 2048, 16)).contains("2049 x 2048 blocks"));
}

#[test]
fn what_the_kernel_is_told() {
    let of = |block_size| params(&shape(40, 300, block_size), 77).unwrap();
    let p = of(16);
    assert_eq!((p.rows, p.cols, p.nnz_blocks, p.row_words), (40, 300, 77, 16));
    assert_eq!((p.least_length, p.most_kept), (0.75, 0.95));
    let groups = [16, 32, 64, 128, 7].map(|block_size| {
        let p = of(block_size);
        (p.group_rows, p.stage_columns, p.stage_blocks)
    });
    assert_eq!(groups, [(16, 8, 32), (8, 4, 10), (2, 0, 0), (1, 0, 0), (1, 0, 0)]);
    let row = select_among(manifest::all_rows(), &gpu(9, 0)).unwrap();
    let blocks = |block_size, step| {
        let config = config(row, &Sizes::of(&shape(40, 300, block_size)), step).unwrap();
        assert_eq!((config.block, config.smem_bytes), (1024, 0));
        config.grid[0]
    };
    let steps = [
        BLOCKFLASH_BSR_PLAN_CHECK,
        BLOCKFLASH_BSR_PLAN_GROUP,
        BLOCKFLASH_BSR_PLAN_COUNT,
        BLOCKFLASH_BSR_PLAN_FILL,
    ];
    assert_eq!(steps.map(|step| blocks(16, step)), [2, 1, 3, 3]);
    assert_eq!(steps.map(|step| blocks(32, step)), [2, 1, 5, 5]);
}

#[test]
fn buffers_are_those_that_steps_need() {
    let stream = Device::cpu().stream().unwrap();
    let row_ptr = Tensor::zeros(&stream, DType::I32, &[41]).unwrap();
    for (block_size, has) in
        [(16, [true, true]), (32, [true, true]), (64, [true, false]), (128, [false; 2]), (7, [false; 2])]
    {
        let mut buffers = Buffers::new(&Sizes::of(&shape(40, 300, block_size)), &stream).unwrap();
        let operands = buffers.operands(&row_ptr, &row_ptr, None);
        assert_eq!([operands.groups.is_some(), operands.columns.is_some()], has, "blocks of {block_size}");
        assert_eq!(buffers.row_order().shape(), [40]);
    }
}

#[test]
fn reports_are_read() {
    // Two rows of 3 and 5 blocks: ranks 1 and 0.
    let [sizes, by_length] = [16, 128].map(|block_size| Sizes::of(&shape(2, 9, block_size)));
    let report = [-1, 7, 0, 0, 5, 3, 1, 0, 4];
    let found = Found::read(&report, &sizes).unwrap();
    assert_eq!((found.hash, found.lengths, found.stages), (7 << 32 | 0xFFFF_FFFF, vec![3, 5], vec![4]));
    let found = Found::read(&[&report[..], &[0]].concat(), &by_length).unwrap();
    assert_eq!(found.lengths, [5, 3]);
    let mut wrong = report;
    wrong[2] = 1;
    assert!(Found::read(&wrong, &sizes).is_none());
    assert!(Found::read(&report[..5], &sizes).is_none());
    wrong = report;
    wrong[6] = 2;
    assert!(Found::read(&wrong, &sizes).is_none(), "no such rank");
}
