use super::super::AttentionFwdOperands;
use super::super::attention_fixtures::{NO_MASK, attention};
use super::*;
use crate::{BlockListArrays, DType, Device, Result, Tensor};
use blockflash_sys::manifest::{AttentionTile, Lse};
use blockflash_sys::params::{
    blockflash_attention_fwd_params, blockflash_scores, blockflash_window,
};
use blockflash_sys::{ElementTypes, HeadDims};

const TILE: AttentionTile = AttentionTile {
    types: ElementTypes::all(DType::F16),
    head_dims: HeadDims::all(64),
    block_q: 64,
    block_rows: 1,
    block_kv: 32,
    heads: 1,
    lse: Lse::AsAsked,
    dense_only: false,
    tensor_maps: false,
};

/// Batch 3, 150 queries, 100 keys, 4 and 2 heads of 8 elements, with a mask of 128 × 64 blocks: 2
/// rows, one for all batch entries, one per head of keys.
fn params() -> blockflash_attention_fwd_params {
    let block_mask = blockflash_block_mask {
        rows: 2,
        block_q: 128,
        block_kv: 64,
        groups_per_batch: 0,
        heads_per_group: 2,
        ..NO_MASK
    };
    let dense = attention(3, [150, 100], [4, 2]);
    let window = blockflash_window { left: 0, right: 0, ..dense.scores.window };
    let scores = blockflash_scores { window, ..dense.scores };
    blockflash_attention_fwd_params { scores, block_mask, ..dense }
}

/// The same as a packed batch of 3 sequences: 170 queries, none of more than 150, and 250 keys. The
/// mask has 5 rows.
fn packed_params() -> blockflash_attention_fwd_params {
    let mut p = params();
    (p.q_stride_batch, p.k_stride_batch, p.v_stride_batch, p.o_stride_batch) = (0, 0, 0, 0);
    (p.total_q, p.total_kv) = (170, 250);
    p.block_mask.rows = 5;
    p
}

/// Tensors on the CPU: `fit` looks at sizes and strides only. The mask is `[batch, heads, rows]`.
struct Tensors {
    q: Tensor,
    k: Tensor,
    o: Tensor,
    lists: BlockLists,
    /// Offsets of the queries and keys of a packed batch.
    cu_seqlens: Option<Tensor>,
}

impl Tensors {
    fn new([batch, heads, rows]: [usize; 3]) -> Result<Self> {
        let stream = Device::cpu().stream()?;
        Ok(Self {
            q: Tensor::zeros(&stream, DType::F16, &[3, 150, 4, 8])?,
            k: Tensor::zeros(&stream, DType::F16, &[3, 100, 2, 8])?,
            o: Tensor::zeros(&stream, DType::F16, &[3, 150, 4, 8])?,
            lists: lists(&[batch, heads], rows, None),
            cu_seqlens: None,
        })
    }

    /// Of [`packed_params`].
    fn packed() -> Self {
        let stream = Device::cpu().stream().unwrap();
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(&stream, dtype, shape).unwrap();
        Self {
            q: zeros(DType::F16, &[170, 4, 8]),
            k: zeros(DType::F16, &[250, 2, 8]),
            o: zeros(DType::F16, &[170, 4, 8]),
            lists: lists(&[2], 5, Some(&[0, 2, 3, 5])),
            cu_seqlens: Some(zeros(DType::I32, &[4])),
        }
    }

    fn operands(&mut self) -> AttentionFwdOperands<'_> {
        let (q, k) = (self.q.view(), self.k.view());
        let o = self.o.view_mut();
        let cu_seqlens = self.cu_seqlens.as_ref().map(|offsets| [offsets.view(), offsets.view()]);
        let block_mask = Some(&self.lists);
        AttentionFwdOperands { q, k, v: k, o, lse: None, sink: None, cu_seqlens, block_mask }
    }
}

/// Lists with the second of two columns, in the first row.
fn lists(groups: &[usize], rows: usize, cu_rows: Option<&[i32]>) -> BlockLists {
    let count = groups.iter().product::<usize>();
    let mut row_ptr = vec![1; count * (rows + 1)];
    row_ptr[0] = 0;
    let sequences = cu_rows.map_or(vec![0, rows as i32], <[i32]>::to_vec);
    let order = || sequences.windows(2).flat_map(|pair| (0..pair[1] - pair[0]).rev());
    let row_order: Vec<i32> = (0..count).flat_map(|_| order()).collect();
    let (row_ptr, row_order) = (&row_ptr, &row_order);
    let arrays =
        BlockListArrays { groups, rows, cols: 2, row_ptr, col_idx: &[1], row_order, cu_rows };
    BlockLists::new(&arrays, &Device::cpu().stream().unwrap()).unwrap()
}

type Change = fn(&mut blockflash_attention_fwd_params);

fn fit(mask: [usize; 3], change: Change) -> std::result::Result<i128, String> {
    let mut params = params();
    change(&mut params);
    Tensors::new(mask).unwrap().operands().fit(&TILE, &params)
}

#[test]
fn masks_that_fit() {
    // Two tiles per row, also in the last one, for 4 heads of 3 entries.
    assert_eq!(fit([1, 2, 2], |_| {}), Ok(2 * 2 * 4 * 3));
    assert_eq!(fit([3, 2, 2], |p| p.block_mask.groups_per_batch = 2), Ok(48));
    assert_eq!(fit([1, 1, 2], |p| p.block_mask.heads_per_group = 4), Ok(48));
    assert_eq!(fit([1, 4, 2], |p| p.block_mask.heads_per_group = 1), Ok(48));
    assert_eq!(fit([1, 2, 3], |p| (p.block_mask.rows, p.block_mask.block_q) = (3, 64)), Ok(36));
    assert_eq!(fit([1, 2, 1], |p| (p.block_mask.rows, p.block_mask.block_q) = (1, 192)), Ok(36));
    assert_eq!(fit([1, 2, 1], |p| (p.block_mask.rows, p.block_mask.block_q) = (1, 1024)), Ok(192));
}

#[test]
fn masks_that_do_not_fit() {
    let cases: [(&str, [usize; 3], Change); 18] = [
        ("do not divide blocks of", [1, 2, 2], |p| p.block_mask.block_q = 96),
        ("do not divide blocks of", [1, 2, 2], |p| p.block_mask.block_q = 0),
        ("do not divide blocks of", [1, 2, 2], |p| p.block_mask.block_q = -128),
        ("do not divide blocks of", [1, 2, 2], |p| p.block_mask.block_kv = 48),
        ("do not divide blocks of", [1, 2, 2], |p| p.block_mask.block_kv = 0),
        ("block rows, expected", [1, 2, 2], |p| p.block_mask.rows = 3),
        ("block rows, expected", [1, 2, 2], |p| p.block_mask.rows = -2),
        ("block rows, expected", [1, 2, 2], |p| p.block_mask.block_q = 256),
        ("not divisible into groups", [1, 2, 2], |p| p.block_mask.heads_per_group = 0),
        ("not divisible into groups", [1, 2, 2], |p| p.block_mask.heads_per_group = -1),
        ("not divisible into groups", [1, 2, 2], |p| p.block_mask.heads_per_group = 3),
        ("heads, expected 2", [3, 2, 2], |p| p.block_mask.groups_per_batch = 1),
        ("heads, expected 2", [3, 2, 2], |p| p.block_mask.groups_per_batch = -2),
        ("row_ptr is i32 [1, 2, 3]", [1, 2, 2], |p| p.block_mask.groups_per_batch = 2),
        ("row_ptr is i32 [3, 2, 3]", [3, 2, 2], |_| {}),
        ("row_ptr is i32 [1, 4, 3]", [1, 4, 2], |_| {}),
        ("block columns, beyond the", [1, 2, 2], |p| p.block_mask.block_kv = 128),
        ("row_ptr is i32 [1, 2, 2]", [1, 2, 1], |_| {}),
    ];
    for (expected, mask, change) in cases {
        let error = fit(mask, change).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    }
}

/// Positions in a row are counted in 32 bits, whatever a kernel may write to it.
#[test]
fn rows_of_a_mask_are_not_too_long() {
    let lists = BlockLists::with_capacity([1, 2], 2, 2, 1 << 10, &Device::cpu().stream().unwrap());
    let mut tensors = Tensors { lists: lists.unwrap(), ..Tensors::new([1, 2, 2]).unwrap() };
    // Room for 2^10 columns of 2^27 keys, 2^22 tiles each.
    let mut params = params();
    (params.block_mask.block_kv, params.seqlen_kv) = (1 << 27, 100);
    let error = tensors.operands().fit(&TILE, &params).unwrap_err();
    assert_eq!(error, "a row of the mask has 4294967296 tiles of keys, the limit is 2147483647");
}

#[test]
fn packed_masks_that_fit() {
    let fit = |change: Change| {
        let mut params = packed_params();
        change(&mut params);
        Tensors::packed().operands().fit(&TILE, &params)
    };
    // As many tiles as for the longest sequence, which has 2 rows, for 4 heads of 3 sequences.
    assert_eq!(fit(|_| {}), Ok(2 * 2 * 4 * 3));
    assert_eq!(fit(|p| p.seqlen_q = 128), Ok(24));
    assert_eq!(fit(|p| (p.block_mask.block_q, p.seqlen_kv) = (64, 250)), Ok(36));
    for (expected, change) in [
        ("lists for a batch entry", (|p| p.block_mask.groups_per_batch = 2) as Change),
        ("not divisible into groups", |p| p.block_mask.heads_per_group = 3),
        ("row_ptr is i32 [2, 6]", |p| p.block_mask.heads_per_group = 4),
        ("row_ptr is i32 [2, 6]", |p| p.block_mask.rows = 4),
        ("row_ptr is i32 [2, 6]", |p| p.block_mask.rows = -1),
        ("the limit of queries is 2147483647", |p| p.seqlen_q = i32::MAX),
        // Offsets are clamped to these, so they must be the rows that there are.
        ("total_q and total_kv are", |p| p.total_q = 171),
        ("total_q and total_kv are", |p| p.total_kv = i32::MAX),
    ] {
        let error = fit(change).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    }
}

#[test]
fn a_log_sum_exp_where_the_kernel_computes_one() {
    let mut tensors = Tensors::packed();
    let mut fit = |lse| {
        let operands = tensors.operands();
        assert!(operands.lse.is_none());
        operands.fit(&AttentionTile { lse, ..TILE }, &packed_params())
    };
    assert_eq!((fit(Lse::AsAsked), fit(Lse::Never)), (Ok(48), Ok(48)));
    assert!(
        fit(Lse::Always)
            .unwrap_err()
            .contains("lse is not given, and the kernel computes it in each launch")
    );
}

#[test]
fn packed_arrays_that_do_not_fit() {
    let refused = |expected: &str, lists: BlockLists| {
        let mut tensors = Tensors { lists, ..Tensors::packed() };
        let error = tensors.operands().fit(&TILE, &packed_params()).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    };
    refused("row_ptr", lists(&[1], 5, Some(&[0, 2, 3, 5])));
    refused("row_ptr", lists(&[2], 6, Some(&[0, 2, 3, 6])));
    refused("cu_rows", lists(&[2], 5, Some(&[0, 2, 5])));
    // Either the batch or the mask.
    let mut tensors = Tensors::packed();
    let operands = AttentionFwdOperands { cu_seqlens: None, ..tensors.operands() };
    assert!(operands.fit(&TILE, &packed_params()).is_err());
    let offsets = Tensor::zeros(&Device::cpu().stream().unwrap(), DType::I32, &[4]).unwrap();
    let mut dense = Tensors::new([1, 2, 2]).unwrap();
    let cu_seqlens = Some([offsets.view(), offsets.view()]);
    let (q, k, o) = (tensors.q.view(), tensors.k.view(), tensors.o.view_mut());
    let operands = AttentionFwdOperands { q, k, v: k, o, cu_seqlens, ..dense.operands() };
    let error = operands.fit(&TILE, &packed_params()).unwrap_err();
    assert!(error.contains("the block mask is not packed, and the batch is packed"), "{error}");
}

/// Whatever sizes the parameters have, a call without a mask is dense.
#[test]
fn without_a_mask_its_sizes_are_ignored() {
    let mut tensors = Tensors::new([1, 2, 2]).unwrap();
    let operands = AttentionFwdOperands { block_mask: None, ..tensors.operands() };
    let mut params = params();
    (params.block_mask.rows, params.block_mask.row_ptr) = (77, std::ptr::dangling());
    params.block_mask.cu_rows = std::ptr::dangling();
    assert_eq!(operands.fit(&TILE, &params), Ok(3 * 4 * 3));
    let mask = operands.pointers(&params).block_mask;
    assert!(mask.row_ptr.is_null() && mask.cu_rows.is_null());
}
