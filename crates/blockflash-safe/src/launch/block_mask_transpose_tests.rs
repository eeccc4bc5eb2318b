use super::*;
use crate::launch::LaunchConfig;
use crate::launch::checked::fitted;
use crate::{BlockListArrays, Device, Stream};
use blockflash_sys::manifest;
use std::ptr::{null, null_mut};

/// 2 batch entries, 3 heads, 200 rows, 9000 columns.
fn params() -> blockflash_block_mask_transpose_params {
    blockflash_block_mask_transpose_params {
        row_ptr: null(),
        col_idx: null(),
        bits: null_mut(),
        counts: null_mut(),
        row_ptr_t: null_mut(),
        col_idx_t: null_mut(),
        step: BLOCKFLASH_BLOCK_MASK_GATHER,
        batch: 2,
        heads: 3,
        rows: 200,
        cols: 9000,
        capacity: 77,
    }
}

/// Tensors on the CPU: `fit` looks at sizes and strides only.
struct Tensors {
    lists: BlockLists,
    scratch: BlockTransposeScratch,
    transpose: BlockLists,
}

fn stream() -> Stream {
    Device::cpu().stream().unwrap()
}

fn lists(heads: usize, rows: usize, cols: usize, capacity: usize) -> BlockLists {
    BlockLists::with_capacity([2, heads], rows, cols, capacity, &stream()).unwrap()
}

impl Tensors {
    fn new() -> Self {
        Self {
            lists: lists(3, 200, 9000, 99),
            scratch: BlockTransposeScratch::new([2, 3], 200, 9000, 128, &stream()).unwrap(),
            transpose: lists(3, 9000, 200, 77),
        }
    }

    fn fit(&mut self, params: &blockflash_block_mask_transpose_params, blocks: u32) -> Fit {
        let transposes = |row: &&Kernel| {
            matches!(row.variant, Variant::BlockMask(BlockMaskKernel::Transpose { .. }))
        };
        let row = manifest::kernels().iter().find(transposes).ok_or("no row")?;
        let config = LaunchConfig::of(row, blocks, false);
        let Self { lists, scratch, transpose } = self;
        let operands = BlockMaskTransposeOperands { lists, scratch, transpose };
        fitted::<BlockMaskTranspose>(row, &config, params, &operands).map(drop)
    }
}

type Change = fn(&mut blockflash_block_mask_transpose_params);

#[test]
fn transpositions_that_fit() {
    // Two slabs and two chunks for each of six heads, then 282 strips.
    assert_eq!(Tensors::new().fit(&params(), 24), Ok(()));
    let second =
        blockflash_block_mask_transpose_params { step: BLOCKFLASH_BLOCK_MASK_LIST_T, ..params() };
    assert_eq!(Tensors::new().fit(&second, 6 * 282), Ok(()));
    assert!(Tensors::new().fit(&second, 24).unwrap_err().contains("24x1x1 blocks"));
}

#[test]
fn parameters_that_do_not_fit() {
    let cases: [(&str, Change); 9] = [
        ("not positive", |p| p.batch = 0),
        ("not positive", |p| p.rows = -200),
        ("not positive", |p| p.cols = 0),
        ("not positive", |p| p.capacity = -1),
        ("the limit is 2147483647", |p| (p.batch, p.heads) = (1 << 20, 1 << 10)),
        ("row_ptr is i32 [2, 3, 201]", |p| p.rows = 201),
        ("the mask is of 9024 block columns, beyond the 8900", |p| p.cols = 8900),
        ("col_idx of the transpose is i32 [77]", |p| p.capacity = 78),
        ("step is 2, expected one of", |p| p.step = 2),
    ];
    for (expected, change) in cases {
        let mut params = params();
        change(&mut params);
        let error = Tensors::new().fit(&params, 24).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    }
}

#[test]
fn tensors_that_do_not_fit() {
    let refused = |expected: &str, mut tensors: Tensors| {
        let error = tensors.fit(&params(), 24).unwrap_err();
        assert!(error.starts_with(expected), "{error} does not say {expected}");
    };
    let scratch = |expected, heads, rows, cols, slab_rows| {
        let scratch = BlockTransposeScratch::new([2, heads], rows, cols, slab_rows, &stream());
        refused(expected, Tensors { scratch: scratch.unwrap(), ..Tensors::new() });
    };
    scratch("bits is i32 [2, 4, 7, 9024]", 4, 200, 9000, 128);
    scratch("bits is i32 [2, 3, 6, 9024]", 3, 192, 9000, 128);
    scratch("bits is i32 [2, 3, 7, 9056]", 3, 200, 9025, 128);
    scratch("counts is i32 [2, 3, 282, 4]", 3, 200, 9000, 64);
    let transpose = |expected, heads, rows, cols, capacity| {
        let transpose = lists(heads, rows, cols, capacity);
        refused(expected, Tensors { transpose, ..Tensors::new() });
    };
    transpose("row_ptr of the transpose is i32 [2, 2, 9001]", 2, 9000, 200, 77);
    transpose("row_ptr of the transpose is i32 [2, 3, 9000]", 3, 8999, 200, 77);
    transpose("col_idx of the transpose is i32 [76]", 3, 9000, 200, 76);
    // The kernel could write rows that the lists do not promise.
    for (rows, found) in [(192, 192), (225, 256)] {
        let said = format!(
            "the transpose is for kernels to fill, with up to {found} columns; expected lists to \
             fill with 224"
        );
        let transpose = lists(3, 9000, rows, 77);
        refused(&said, Tensors { transpose, ..Tensors::new() });
    }

    let fixed = |groups: &[usize], rows: usize, cols, cu_rows| {
        let count = groups.iter().product::<usize>();
        let row_ptr = vec![0; count * (rows + 1)];
        let row_order: Vec<i32> = (0..count).flat_map(|_| 0..rows as i32).collect();
        let (row_ptr, row_order) = (&row_ptr[..], &row_order[..]);
        let arrays =
            BlockListArrays { groups, rows, cols, row_ptr, col_idx: &[], row_order, cu_rows };
        BlockLists::new(&arrays, &stream()).unwrap()
    };
    // Lists that were checked once and never change are not for a kernel to write.
    let transpose = fixed(&[2, 3], 9000, 200, None);
    refused("the transpose is not for kernels to fill", Tensors { transpose, ..Tensors::new() });
    let lists = fixed(&[1], 200, 9000, Some(&[0, 200]));
    refused("cu_rows of the mask is given, expected none", Tensors { lists, ..Tensors::new() });
    let lists = fixed(&[2, 3], 200, 9001, None);
    refused(
        "the mask is of 9001 block columns, beyond the 9000",
        Tensors { lists, ..Tensors::new() },
    );
    let lists = fixed(&[2, 3], 200, 9000, None);
    assert_eq!(Tensors { lists, ..Tensors::new() }.fit(&params(), 24), Ok(()));
}
