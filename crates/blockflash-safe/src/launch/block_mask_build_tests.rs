use super::*;
use crate::launch::checked::fitted;
use crate::launch::{LaunchConfig, NO_MASK};
use crate::{BlockListArrays, Device, Tensor};
use blockflash_sys::manifest;
use blockflash_sys::params::{BLOCKFLASH_WINDOW_UNBOUNDED, blockflash_window};
use std::ptr::{null, null_mut};

/// 2 batch entries, 3 heads, 20 rows of 64 queries, 40 columns of 128 keys; lists of 5.
fn params() -> blockflash_block_mask_build_params {
    blockflash_block_mask_build_params {
        source: null(),
        always: NO_MASK,
        bits: null_mut(),
        lengths: null_mut(),
        slab_lengths: null_mut(),
        row_ptr: null_mut(),
        col_idx: null_mut(),
        row_order: null_mut(),
        problems: null_mut(),
        step: BLOCKFLASH_BLOCK_MASK_CHOOSE,
        source_kind: BLOCKFLASH_BLOCK_SOURCE_SCORES,
        k: 5,
        batch: 2,
        heads: 3,
        rows: 20,
        cols: 40,
        capacity: 77,
        seqlen_q: 1279,
        seqlen_kv: 5001,
        block_q: 64,
        block_kv: 128,
        window: blockflash_window {
            left: BLOCKFLASH_WINDOW_UNBOUNDED,
            right: 0,
            align_bottom_right: 1,
        },
    }
}

/// Tensors on the CPU: `fit` looks at sizes and strides only.
struct Tensors {
    source: Tensor,
    always: BlockLists,
    scratch: BlockListScratch,
    lists: BlockLists,
    problems: Tensor,
}

impl Tensors {
    fn new() -> Self {
        let stream = &Device::cpu().stream().unwrap();
        Self {
            source: zeros(DType::F32, &[2, 3, 20, 40]),
            always: BlockLists::with_capacity([1, 1], 20, 40, 9, stream).unwrap(),
            scratch: BlockListScratch::new([2, 3], 20, 40, 16, stream).unwrap(),
            lists: BlockLists::with_capacity([2, 3], 20, 40, 77, stream).unwrap(),
            problems: zeros(DType::I32, &[4]),
        }
    }

    fn fit(&mut self, params: &blockflash_block_mask_build_params, blocks: u32) -> Fit {
        self.fitted(params, blocks).map(drop)
    }

    fn fitted(
        &mut self,
        params: &blockflash_block_mask_build_params,
        blocks: u32,
    ) -> Fit<blockflash_block_mask_build_params> {
        let is_build = |row: &&Kernel| {
            matches!(row.variant, Variant::BlockMask(BlockMaskKernel::Build { .. }))
        };
        let row = manifest::kernels().iter().find(is_build).ok_or("no row")?;
        let config = LaunchConfig::of(row, blocks, false);
        let (scratch, lists) = (&mut self.scratch, &mut self.lists);
        let (source, always) = (self.source.view(), Some(&self.always));
        let problems = self.problems.view_mut();
        let operands = BlockMaskBuildOperands { source, always, scratch, lists, problems };
        fitted::<BlockMaskBuild>(row, &config, params, &operands)
    }
}

fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(&Device::cpu().stream().unwrap(), dtype, shape).unwrap()
}

type Change = fn(&mut blockflash_block_mask_build_params);

#[test]
fn builds_that_fit() {
    let mut tensors = Tensors::new();
    // Two slabs for each of six heads.
    assert_eq!(tensors.fit(&params(), 12), Ok(()));
    let last = blockflash_block_mask_build_params { step: BLOCKFLASH_BLOCK_MASK_LIST, ..params() };
    assert_eq!(tensors.fit(&last, 12), Ok(()));
    tensors.source = zeros(DType::I32, &[2, 3, 20, 5]);
    let lists = blockflash_block_mask_build_params {
        source_kind: BLOCKFLASH_BLOCK_SOURCE_LISTS,
        ..params()
    };
    assert_eq!(tensors.fit(&lists, 12), Ok(()));
    // Lists without positions have no strides.
    tensors.source = zeros(DType::I32, &[2, 3, 20, 0]);
    assert_eq!(tensors.fit(&blockflash_block_mask_build_params { k: 0, ..lists }, 12), Ok(()));
    tensors.source = zeros(DType::U8, &[2, 3, 20, 40]);
    let booleans = blockflash_block_mask_build_params {
        source_kind: BLOCKFLASH_BLOCK_SOURCE_BOOL,
        ..params()
    };
    assert_eq!(tensors.fit(&booleans, 12), Ok(()));
}

/// How kernels find the lists of blocks that are always visited.
#[test]
fn blocks_that_are_always_visited() {
    let stream = &Device::cpu().stream().unwrap();
    for (groups, expected) in
        [([1, 1], [0, 3]), ([1, 3], [0, 1]), ([2, 1], [1, 3]), ([2, 3], [3, 1])]
    {
        let always = BlockLists::with_capacity(groups, 20, 40, 9, stream).unwrap();
        let m = Tensors { always, ..Tensors::new() }.fitted(&params(), 12).unwrap().always;
        assert_eq!([m.groups_per_batch, m.heads_per_group], expected);
        assert_eq!([m.rows, m.block_q, m.block_kv], [20, 64, 128]);
    }
}

#[test]
fn parameters_that_do_not_fit() {
    let cases: [(&str, Change); 18] = [
        ("not positive", |p| p.batch = 0),
        ("not positive", |p| p.heads = -3),
        ("not positive", |p| p.block_q = 0),
        ("not positive", |p| p.capacity = -1),
        ("not positive", |p| p.k = -1),
        ("not positive", |p| p.window.left = -1),
        ("block rows, expected", |p| p.rows = 21),
        ("block rows, expected", |p| p.seqlen_q = 1281),
        ("block columns, expected", |p| p.cols = 39),
        ("block columns, expected", |p| p.block_kv = 64),
        ("the limit is 2147483647", |p| (p.batch, p.heads) = (1 << 20, 1 << 10)),
        ("in whole blocks, the limit is", |p| (p.rows, p.seqlen_q) = (1 << 25, i32::MAX)),
        ("in whole blocks, the limit is", |p| (p.cols, p.seqlen_kv, p.block_kv) = (1, 1, 1 << 26)),
        ("k is 1073741825, the limit is", |p| p.k = (1 << 30) + 1),
        ("source_kind is 3, expected one of [0, 1, 2]", |p| p.source_kind = 3),
        ("source is f32", |p| p.source_kind = BLOCKFLASH_BLOCK_SOURCE_LISTS),
        ("col_idx is i32 [77]", |p| p.capacity = 78),
        ("step is 2, expected one of [0, 1]", |p| p.step = 2),
    ];
    for (expected, change) in cases {
        let mut params = params();
        change(&mut params);
        let error = Tensors::new().fit(&params, 12).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    }
    assert!(Tensors::new().fit(&params(), 11).unwrap_err().contains("11x1x1 blocks"));
}

#[test]
fn tensors_that_do_not_fit() {
    let stream = &Device::cpu().stream().unwrap();
    let refused = |expected: &str, tensors: &mut Tensors| {
        let error = tensors.fit(&params(), 12).unwrap_err();
        assert!(error.starts_with(expected), "{error} does not say {expected}");
    };
    let scratch = |expected, heads, rows, cols, slab_rows| {
        let scratch = BlockListScratch::new([2, heads], rows, cols, slab_rows, stream).unwrap();
        refused(expected, &mut Tensors { scratch, ..Tensors::new() });
    };
    scratch("bits is i32 [2, 4, 20, 2]", 4, 20, 40, 16);
    scratch("bits is i32 [2, 3, 21, 2]", 3, 21, 40, 16);
    scratch("bits is i32 [2, 3, 20, 3]", 3, 20, 65, 16);
    scratch("slab_lengths is i32 [2, 3, 3]", 3, 20, 40, 8);
    let lists = |expected, heads, rows, cols, capacity| {
        let lists = BlockLists::with_capacity([2, heads], rows, cols, capacity, stream).unwrap();
        refused(expected, &mut Tensors { lists, ..Tensors::new() });
    };
    lists("row_ptr is i32 [2, 2, 21]", 2, 20, 40, 77);
    lists("row_ptr is i32 [2, 3, 20]", 3, 19, 40, 77);
    lists("col_idx is i32 [76]", 3, 20, 40, 76);
    // The kernel could write columns that the lists do not promise.
    lists("the lists are for kernels to fill, with up to", 3, 20, 32, 77);
    lists("the lists are for kernels to fill, with up to", 3, 20, 65, 77);
    refused(
        "source is f32 [2, 3, 40, 20]",
        &mut Tensors { source: zeros(DType::F32, &[2, 3, 40, 20]), ..Tensors::new() },
    );
    refused(
        "problems is i32 [5]",
        &mut Tensors { problems: zeros(DType::I32, &[5]), ..Tensors::new() },
    );
    let fixed = |groups: &[usize], cu_rows, cols| {
        let count = groups.iter().product::<usize>();
        let (row_ptr, row_order): (Vec<i32>, Vec<i32>) =
            (vec![0; count * 21], (0..count).flat_map(|_| 0..20).collect());
        let (row_ptr, row_order) = (&row_ptr[..], &row_order[..]);
        let arrays =
            BlockListArrays { groups, rows: 20, cols, row_ptr, col_idx: &[], row_order, cu_rows };
        BlockLists::new(&arrays, stream).unwrap()
    };
    // Lists that were checked once and never change are not for a kernel to write.
    let lists = fixed(&[2, 3], None, 40);
    refused("the lists are not for kernels to fill", &mut Tensors { lists, ..Tensors::new() });
    let always = fixed(&[1], Some(&[0, 20]), 40);
    refused(
        "cu_rows of `always` is given, expected none",
        &mut Tensors { always, ..Tensors::new() },
    );
    let always = fixed(&[1, 1], None, 40);
    let always = always.with_bits(1, &[], &[0; 128], stream).unwrap();
    refused("bits of `always` is given", &mut Tensors { always, ..Tensors::new() });
    let always = fixed(&[1, 1], None, 41);
    refused("`always` is of ", &mut Tensors { always, ..Tensors::new() });
    for (expected, groups, rows) in [
        ("`always` has 19 block rows, expected 20", [1, 1], 19),
        ("q has 3 heads, not a multiple of the 2 of the mask", [1, 2], 20),
        ("q has 3 heads, not a multiple of the 0 of the mask", [1, 0], 20),
        ("the mask has 3 batch entries, expected 2", [3, 1], 20),
    ] {
        let always = BlockLists::with_capacity(groups, rows, 40, 9, stream).unwrap();
        refused(expected, &mut Tensors { always, ..Tensors::new() });
    }
}
