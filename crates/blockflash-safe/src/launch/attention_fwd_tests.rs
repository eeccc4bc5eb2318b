use super::super::attention_fixtures::{NO_MASK, attention};
use super::*;
use crate::{BlockListArrays, Device, Tensor};
use blockflash_sys::params::blockflash_block_mask;
use blockflash_sys::{DType, ElementTypes, HeadDims};

/// 64 queries and keys of one head; they are one sequence, packed or not.
fn plan(packed: bool) -> blockflash_attention_fwd_params {
    let dense = attention(1, [64; 2], [1; 2]);
    let block_mask = blockflash_block_mask {
        rows: 1,
        block_q: 64,
        block_kv: 64,
        groups_per_batch: 1,
        heads_per_group: 1,
        ..NO_MASK
    };
    let total = if packed { 64 } else { 0 };
    blockflash_attention_fwd_params { total_q: total, total_kv: total, block_mask, ..dense }
}

/// What both kernels without tensor maps say: the portable one, and the one for small grids.
fn fits(packed: bool, lists: Option<&BlockLists>) -> [Fit<i128>; 2] {
    let stream = Device::cpu().stream().unwrap();
    let shape: &[usize] = if packed { &[64, 1, 8] } else { &[1, 64, 1, 8] };
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(&stream, dtype, shape).unwrap();
    let (q, offsets) = (zeros(DType::F16, shape), zeros(DType::I32, &[2]));
    let mut o = zeros(DType::F16, shape);
    let operands = AttentionFwdOperands {
        q: q.view(),
        k: q.view(),
        v: q.view(),
        o: o.view_mut(),
        lse: None,
        sink: None,
        cu_seqlens: packed.then(|| [offsets.view(); 2]),
        block_mask: lists,
    };
    let (types, head_dims) = (ElementTypes::all(DType::F16), HeadDims::all(64));
    let min_blocks = 2;
    let portable = AttentionFwd {
        types,
        head_dims,
        block_q: 64,
        block_kv: 64,
        warps: 4,
        split: 1,
        stages: 1,
        min_blocks,
    };
    let small = AttentionFwdSmall { types, head_dims, warpgroups: 2, stages: 3, min_blocks };
    let plan = plan(packed);
    [Launch::fit(&portable, &plan, &operands), Launch::fit(&small, &plan, &operands)]
}

#[test]
fn small_grids_refuse_what_their_kernels_do_not_read() {
    let arrays = BlockListArrays {
        groups: &[1, 1],
        rows: 1,
        cols: 1,
        row_ptr: &[0, 1],
        col_idx: &[0],
        row_order: &[0],
        cu_rows: None,
    };
    let lists = BlockLists::new(&arrays, &Device::cpu().stream().unwrap()).unwrap();
    assert_eq!(fits(false, None), [Ok(1), Ok(1)]);
    let [portable, small] = fits(true, None);
    assert_eq!(portable, Ok(1));
    assert!(small.unwrap_err().contains("packed sequences"));
    let [portable, small] = fits(false, Some(&lists));
    assert_eq!(portable, Ok(1));
    assert!(small.unwrap_err().contains("block masks"));
}
