use super::*;
use crate::launch::LaunchConfig;
use crate::launch::checked::fitted;
use crate::{Device, Stream, Tensor};
use blockflash_sys::manifest;
use std::ptr::null;

/// 2 batch entries, 3 heads, 200 queries and 300 keys in blocks of 64 × 128.
fn params() -> blockflash_block_bits_params {
    blockflash_block_bits_params {
        source: null(),
        visited: null_mut(),
        first: null_mut(),
        counter: null_mut(),
        bits: null_mut(),
        bits_t: null_mut(),
        row_ptr: null(),
        col_idx: null(),
        block_bits: null_mut(),
        step: BLOCKFLASH_BLOCK_BITS_CLASSIFY,
        source_kind: BLOCKFLASH_PAIRS_BOOL,
        ranges: 0,
        batch: 2,
        heads: 3,
        seqlen_q: 200,
        seqlen_kv: 300,
        block_q: 64,
        block_kv: 128,
        rows: 4,
        cols: 3,
        capacity: 20,
    }
}

fn stream() -> Stream {
    Device::cpu().stream().unwrap()
}

/// Tensors on the CPU: `fit` looks at sizes and strides only.
struct Tensors {
    source: Tensor,
    scratch: BlockBitsScratch,
    lists: BlockLists,
    transpose: Option<BlockLists>,
}

fn lists(heads: usize, [rows, cols]: [usize; 2], room: [usize; 2]) -> BlockLists {
    let lists = BlockLists::with_capacity([2, heads], rows, cols, 50, &stream()).unwrap();
    lists.with_bit_capacity(room[1], room[0], &stream()).unwrap()
}

fn scratch(heads: usize, [rows, cols]: [usize; 2], room: [usize; 2]) -> BlockBitsScratch {
    BlockBitsScratch::new([2, heads], rows, cols, room, &stream()).unwrap()
}

impl Tensors {
    fn new() -> Self {
        Self {
            source: Tensor::zeros(&stream(), DType::U8, &[2, 3, 200, 300]).unwrap(),
            scratch: scratch(3, [4, 3], [20, 2]),
            lists: lists(3, [4, 3], [20, 2]),
            transpose: Some(lists(3, [3, 4], [20, 2])),
        }
    }

    fn fit(&mut self, params: &blockflash_block_bits_params, blocks: u32) -> Fit {
        let makes =
            |row: &&Kernel| matches!(row.variant, Variant::BlockMask(BlockMaskKernel::Bits { .. }));
        let row = manifest::kernels().iter().find(makes).ok_or("no row")?;
        let config = LaunchConfig::of(row, blocks, false);
        let Self { source, scratch, lists, transpose } = self;
        let (source, transpose) = (source.view(), transpose.as_mut());
        let operands = BlockBitsOperands { source, scratch, lists, transpose };
        fitted::<BlockBitsBuild>(row, &config, params, &operands).map(drop)
    }
}

#[test]
fn launches_that_fit() {
    let of = |step, blocks| {
        Tensors::new().fit(&blockflash_block_bits_params { step, ..params() }, blocks)
    };
    assert_eq!(of(BLOCKFLASH_BLOCK_BITS_CLASSIFY, 6 * 12), Ok(()));
    assert_eq!(of(BLOCKFLASH_BLOCK_BITS_GATHER, 6), Ok(()));
    assert_eq!(of(BLOCKFLASH_BLOCK_BITS_GATHER_T, 5), Ok(()));
    let ranges = blockflash_block_bits_params {
        source_kind: BLOCKFLASH_PAIRS_RANGES,
        ranges: 2,
        ..params()
    };
    let source = Tensor::zeros(&stream(), DType::I32, &[2, 3, 200, 4]).unwrap();
    // A CTA has all three blocks of a row.
    assert_eq!(Tensors { source, ..Tensors::new() }.fit(&ranges, 24), Ok(()));
    assert!(Tensors::new().fit(&ranges, 24).unwrap_err().contains("source is u8"));
}

#[test]
fn parameters_that_do_not_fit() {
    type Change = fn(&mut blockflash_block_bits_params);
    let cases: [(&str, Change); 13] = [
        ("not positive", |p| p.batch = 0),
        ("not positive", |p| p.rows = -4),
        ("not positive", |p| p.ranges = -1),
        ("blocks of 64 × 100", |p| p.block_kv = 100),
        ("blocks of 512 × 384", |p| (p.block_q, p.block_kv) = (512, 384)),
        ("5 block rows, expected 4", |p| p.rows = 5),
        ("3 block columns, expected 5", |p| p.block_kv = 64),
        ("the limit is 2147483647", |p| (p.batch, p.heads) = (1 << 20, 1 << 10)),
        ("source_kind is 2", |p| p.source_kind = 2),
        ("the scratch has no room for 22 tiles, 2 a block", |p| p.capacity = 22),
        ("step is 3", |p| p.step = 3),
        ("source is u8 [2, 3, 200, 300]", |p| p.heads = 2),
        ("source is u8 [2, 3, 200, 300]", |p| {
            // Strides beyond 64 bits.
            (p.source_kind, p.ranges) = (BLOCKFLASH_PAIRS_RANGES, i32::MAX);
            (p.heads, p.rows, p.cols, p.block_q) = (1 << 26, 1, 1, 1024);
            (p.seqlen_q, p.seqlen_kv, p.block_kv, p.batch) = (1024, 64, 64, 1);
        }),
    ];
    for (expected, change) in cases {
        let mut params = params();
        change(&mut params);
        let error = Tensors::new().fit(&params, 72).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    }
}

#[test]
fn tensors_that_do_not_fit() {
    let refused = |expected: &str, mut tensors: Tensors| {
        let error = tensors.fit(&params(), 72).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    };
    let of = |scratch| Tensors { scratch, ..Tensors::new() };
    refused("visited is u8 [2, 2, 4, 3]", of(scratch(2, [4, 3], [20, 2])));
    refused("visited is u8 [2, 3, 4, 4]", of(scratch(3, [4, 4], [20, 2])));
    refused("the scratch has no room", of(scratch(3, [4, 3], [22, 2])));
    refused("the scratch has no room", of(scratch(3, [4, 3], [20, 1])));
    let of = |lists| Tensors { lists, ..Tensors::new() };
    refused("the lists have no room for 20", of(lists(3, [4, 3], [18, 2])));
    refused("the lists have no room for 20", of(lists(3, [4, 3], [20, 4])));
    refused("row_ptr is i32 [2, 3, 6]", of(lists(3, [5, 3], [20, 2])));
    refused("the lists are for kernels to fill", of(lists(3, [4, 33], [20, 2])));
    let transpose = Some(lists(3, [3, 4], [18, 2]));
    refused("the lists have no room", Tensors { transpose, ..Tensors::new() });
    let params = blockflash_block_bits_params { step: BLOCKFLASH_BLOCK_BITS_GATHER_T, ..params() };
    let error = Tensors { transpose: None, ..Tensors::new() }.fit(&params, 5).unwrap_err();
    assert!(error.contains("there is no transpose"), "{error}");
}
