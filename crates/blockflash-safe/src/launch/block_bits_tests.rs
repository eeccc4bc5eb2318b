use super::*;
use crate::launch::LaunchConfig;
use crate::launch::checked::fitted;
use crate::{Device, Stream, Tensor};
use blockflash_sys::manifest;
use blockflash_sys::params::blockflash_window;
use std::ptr::null;

/// 2 batch entries, 3 heads, 200 queries and 300 keys in blocks of 64 × 128.
fn params() -> blockflash_block_bits_params {
    blockflash_block_bits_params {
        source: null(),
        ids_kv: null(),
        jumps: null_mut(),
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
        within: blockflash_window { left: 0, right: i32::MAX, align_bottom_right: 0 },
        ranges: 0,
        stride: 1,
        diagonal: 0,
        axes: 2,
        grid: [10, 20, 0, 0],
        window: [3, 5, 0, 0],
        dilation: [1, 4, 0, 0],
        batch: 2,
        heads: 3,
        seqlen_q: 200,
        seqlen_kv: 300,
        block_q: 64,
        block_kv: 128,
        rows: 4,
        cols: 3,
        cols_of_cta: 1,
        capacity: 20,
    }
}

fn stream() -> Stream {
    Device::cpu().stream().unwrap()
}

/// Tensors on the CPU: `fit` looks at sizes and strides only.
struct Tensors {
    source: Option<Tensor>,
    ids_kv: Option<Tensor>,
    scratch: BlockBitsScratch,
    lists: BlockLists,
    transpose: Option<BlockLists>,
}

fn lists(heads: usize, [rows, cols]: [usize; 2], room: [usize; 2]) -> BlockLists {
    let lists = BlockLists::with_capacity([2, heads], rows, cols, 50, &stream()).unwrap();
    lists.with_bit_capacity(room[1], room[0], &stream()).unwrap()
}

fn scratch(heads: usize, [rows, cols]: [usize; 2], room: [usize; 2]) -> BlockBitsScratch {
    BlockBitsScratch::new([2, heads], [rows, cols], 200, room, &stream()).unwrap()
}

impl Tensors {
    fn new() -> Self {
        Self {
            source: Some(Tensor::zeros(&stream(), DType::U8, &[2, 3, 200, 300]).unwrap()),
            ids_kv: None,
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
        let Self { source, ids_kv, scratch, lists, transpose } = self;
        let [source, ids_kv] = [source, ids_kv].map(|tensor| tensor.as_ref().map(Tensor::view));
        let transpose = transpose.as_mut();
        let operands = BlockBitsOperands { source, ids_kv, scratch, lists, transpose };
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
        cols_of_cta: 2,
        ..params()
    };
    let source = Some(Tensor::zeros(&stream(), DType::I32, &[2, 3, 200, 4]).unwrap());
    // A CTA has two of the three blocks of a row.
    assert_eq!(Tensors { source, ..Tensors::new() }.fit(&ranges, 48), Ok(()));
    assert!(Tensors::new().fit(&ranges, 48).unwrap_err().contains("source is u8"));
}

/// Two tensors of numbers, `[2, 200]` and `[2, 300]`, which a source may have.
fn numbers(source: bool, ids_kv: bool) -> Tensors {
    let of = |is: bool, length: usize| {
        is.then(|| Tensor::zeros(&stream(), DType::I32, &[2, length]).unwrap())
    };
    Tensors { source: of(source, 200), ids_kv: of(ids_kv, 300), ..Tensors::new() }
}

#[test]
fn sources_of_numbers() {
    let of = |source_kind| blockflash_block_bits_params { source_kind, ..params() };
    let [documents, tree, strided, grid] = [
        BLOCKFLASH_PAIRS_DOCUMENTS,
        BLOCKFLASH_PAIRS_TREE,
        BLOCKFLASH_PAIRS_STRIDED,
        BLOCKFLASH_PAIRS_NEIGHBORHOOD,
    ]
    .map(of);
    assert_eq!(numbers(true, true).fit(&documents, 72), Ok(()));
    assert_eq!(numbers(true, false).fit(&tree, 72), Ok(()));
    let linked = blockflash_block_bits_params { step: BLOCKFLASH_BLOCK_BITS_JUMPS, ..tree };
    assert_eq!(numbers(true, false).fit(&linked, 2), Ok(()));
    assert_eq!(numbers(false, false).fit(&strided, 72), Ok(()));
    let refused = |expected: &str, mut tensors: Tensors, params| {
        let error = tensors.fit(&params, 72).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    };
    refused("documents have no ids_kv", numbers(true, false), documents);
    refused("documents have no source", numbers(false, true), documents);
    refused("the source is no documents", numbers(true, true), tree);
    refused("trees have no source", numbers(false, false), tree);
    let long = blockflash_block_bits_params { seqlen_kv: 199, block_kv: 128, cols: 2, ..tree };
    refused("199 keys, fewer than the 200 queries", numbers(true, false), long);
    refused("a pattern has no tensor", numbers(true, false), strided);
    for (stride, diagonal) in [(0, 0), (-1, 0), (i32::MAX, 0), (1, i32::MAX), (1, i32::MIN)] {
        let params = blockflash_block_bits_params { stride, diagonal, ..strided };
        refused("a stride of", numbers(false, false), params);
    }
    refused("a grid of 200 tokens", numbers(false, false), grid);
    for axes in [i32::MIN, 0, 5] {
        let params = blockflash_block_bits_params { axes, ..grid };
        refused("expected 1 to 4", numbers(false, false), params);
    }
    for [window, dilation] in [[0, 1], [1, 0], [-1, -1], [3, 7], [i32::MAX, 2]] {
        let (window, dilation) = ([3, window, 0, 0], [1, dilation, 0, 0]);
        let params = blockflash_block_bits_params { window, dilation, ..grid };
        refused("axis 1 has 20 positions", numbers(false, false), params);
    }
    let nodes = blockflash_block_bits_params { step: BLOCKFLASH_BLOCK_BITS_JUMPS, ..documents };
    refused("only trees have nodes", numbers(true, true), nodes);
}

#[test]
fn parameters_that_do_not_fit() {
    type Change = fn(&mut blockflash_block_bits_params);
    let cases: [(&str, Change); 17] = [
        ("not positive", |p| p.batch = 0),
        ("not positive", |p| p.rows = -4),
        ("not positive", |p| p.ranges = -1),
        ("blocks of 64 × 100", |p| p.block_kv = 100),
        ("blocks of 512 × 384", |p| (p.block_q, p.block_kv) = (512, 384)),
        ("5 block rows, expected 4", |p| p.rows = 5),
        ("3 block columns, expected 5", |p| p.block_kv = 64),
        ("the limit is 2147483647", |p| (p.batch, p.heads) = (1 << 20, 1 << 10)),
        ("source_kind is 6", |p| p.source_kind = 6),
        ("the scratch has no room for 22 tiles, 2 a block", |p| p.capacity = 22),
        ("step is 4", |p| p.step = 4),
        ("cols_of_cta is 0", |p| p.cols_of_cta = 0),
        ("cols_of_cta is 129", |p| p.cols_of_cta = 129),
        ("a window of -1", |p| p.within.left = -1),
        ("a window of 0 and 1073741825", |p| p.within.right = (1 << 30) + 1),
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
