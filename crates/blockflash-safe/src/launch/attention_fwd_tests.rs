use super::*;
use crate::{BlockListArrays, Device, Tensor};
use blockflash_sys::DType;
use blockflash_sys::params::blockflash_block_mask;
use std::ptr::{null, null_mut};

/// 64 queries and keys of one head of 8 elements; they are one sequence, packed or not.
fn plan(packed: bool) -> blockflash_attention_fwd_params {
    let (batch, total) = if packed { (0, 64) } else { (512, 0) };
    blockflash_attention_fwd_params {
        q: null(),
        k: null(),
        v: null(),
        o: null_mut(),
        lse: null_mut(),
        sink: null(),
        cu_seqlens_q: null(),
        cu_seqlens_kv: null(),
        q_stride_batch: batch,
        q_stride_seq: 8,
        q_stride_head: 8,
        k_stride_batch: batch,
        k_stride_seq: 8,
        k_stride_head: 8,
        v_stride_batch: batch,
        v_stride_seq: 8,
        v_stride_head: 8,
        o_stride_batch: batch,
        o_stride_seq: 8,
        o_stride_head: 8,
        lse_stride_batch: 0,
        lse_stride_head: 0,
        batch: 1,
        num_heads_q: 1,
        num_heads_kv: 1,
        seqlen_q: 64,
        seqlen_kv: 64,
        total_q: total,
        total_kv: total,
        head_dim: 8,
        window_left: i32::MAX,
        window_right: i32::MAX,
        align_bottom_right: 0,
        softmax_scale: 1.0,
        softcap: 0.0,
        block_mask: blockflash_block_mask {
            row_ptr: null(),
            col_idx: null(),
            row_order: null(),
            cu_rows: null(),
            rows: 1,
            block_q: 64,
            block_kv: 64,
            groups_per_batch: 1,
            heads_per_group: 1,
        },
    }
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
    let (head_dim, dtype, min_blocks) = (64, DType::F16, 2);
    let portable = AttentionFwd {
        dtype,
        head_dim,
        block_q: 64,
        block_kv: 64,
        warps: 4,
        stages: 1,
        min_blocks,
    };
    let small = AttentionFwdSmall { dtype, head_dim, warpgroups: 2, stages: 3, min_blocks };
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
