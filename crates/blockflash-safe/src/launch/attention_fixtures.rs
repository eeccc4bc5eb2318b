//! Parameters of attention for the tests of launches.

use blockflash_sys::params::{
    blockflash_attention_fwd_params, blockflash_block_mask, blockflash_scores, blockflash_window,
};
use std::f32::consts::{LN_2, LOG2_E};
use std::ptr::{null, null_mut};

pub(super) const NO_MASK: blockflash_block_mask = blockflash_block_mask {
    row_ptr: null(),
    col_idx: null(),
    row_order: null(),
    cu_rows: null(),
    rows: 0,
    block_q: 0,
    block_kv: 0,
    groups_per_batch: 0,
    heads_per_group: 0,
};

/// Scores with a scale of 1 and nothing else.
pub(super) const PLAIN_SCORES: blockflash_scores = blockflash_scores {
    sink: null(),
    scale: 1.0,
    softcap: 0.0,
    scale_log2: LOG2_E,
    inverse_scale_log2: LN_2,
    scale_over_cap: 0.0,
    window: blockflash_window { left: i32::MAX, right: i32::MAX, align_bottom_right: 0 },
};

/// Contiguous tensors of `[queries, keys]` and `[query heads, key heads]` of 8 elements, without
/// pointers, a mask and a log-sum-exp.
pub(super) fn attention(
    batch: i32,
    [seqlen_q, seqlen_kv]: [i32; 2],
    [num_heads_q, num_heads_kv]: [i32; 2],
) -> blockflash_attention_fwd_params {
    let head = 8;
    let [q_seq, kv_seq] = [num_heads_q, num_heads_kv].map(|heads| i64::from(heads) * head);
    let [q_batch, kv_batch] = [i64::from(seqlen_q) * q_seq, i64::from(seqlen_kv) * kv_seq];
    blockflash_attention_fwd_params {
        q: null(),
        k: null(),
        v: null(),
        o: null_mut(),
        lse: null_mut(),
        cu_seqlens_q: null(),
        cu_seqlens_kv: null(),
        q_stride_batch: q_batch,
        q_stride_seq: q_seq,
        q_stride_head: head,
        k_stride_batch: kv_batch,
        k_stride_seq: kv_seq,
        k_stride_head: head,
        v_stride_batch: kv_batch,
        v_stride_seq: kv_seq,
        v_stride_head: head,
        o_stride_batch: q_batch,
        o_stride_seq: q_seq,
        o_stride_head: head,
        lse_stride_batch: 0,
        lse_stride_head: 0,
        batch,
        num_heads_q,
        num_heads_kv,
        seqlen_q,
        seqlen_kv,
        total_q: 0,
        total_kv: 0,
        head_dim_qk: 8,
        head_dim_v: 8,
        scores: PLAIN_SCORES,
        block_mask: NO_MASK,
    }
}
