use super::AttentionDecodeProblem;
use super::division::Division;
use crate::Result;
use crate::attention::score_params;
use crate::check::{to_i32, to_i64};
use blockflash_sys::params::blockflash_attention_decode_params;
use std::ptr::{null, null_mut};

/// The sizes, strides and factors of a problem, with null pointers.
pub(super) fn params(
    problem: &AttentionDecodeProblem,
    division: &Division,
) -> Result<blockflash_attention_decode_params> {
    let attention = &problem.attention;
    let stride = |value| to_i64("stride", value);
    // The output holds the queries after they are turned.
    let q = if problem.rotary.is_some() { attention.o } else { attention.q };
    Ok(blockflash_attention_decode_params {
        q: null(),
        o: null_mut(),
        lse: null_mut(),
        cu_seqlens_q: null(),
        cache: problem.cache.params()?,
        page_list: null(),
        page_count: null(),
        partial_sums: null_mut(),
        partial_logs: null_mut(),
        arrivals: null_mut(),
        tile_counter: null_mut(),
        q_stride_batch: stride(q.batch)?,
        q_stride_seq: stride(q.seq)?,
        q_stride_head: stride(q.head)?,
        o_stride_batch: stride(attention.o.batch)?,
        o_stride_seq: stride(attention.o.seq)?,
        o_stride_head: stride(attention.o.head)?,
        lse_stride_batch: stride(attention.lse.map_or(0, |lse| lse.batch))?,
        lse_stride_head: stride(attention.lse.map_or(0, |lse| lse.head))?,
        batch: to_i32("batch", attention.batch)?,
        num_heads_q: to_i32("num_heads_q", attention.num_heads_q)?,
        num_heads_kv: to_i32("num_heads_kv", attention.num_heads_kv)?,
        group: to_i32("num_heads_q", attention.num_heads_q / attention.num_heads_kv.max(1))?,
        seqlen_q: to_i32("seqlen_q", attention.seqlen_q)?,
        total_q: to_i32("total_q", attention.packed.map_or(0, |packed| packed.total_q))?,
        head_dim_qk: to_i32("head_dim", attention.head_dims.qk)?,
        head_dim_v: to_i32("head_dim", attention.head_dims.v)?,
        most_queries: to_i32("seqlen_q", division.most_queries)?,
        page_list_capacity: to_i32("pages", problem.pages.map_or(0, |pages| pages.capacity))?,
        items: to_i32("items", division.items)?,
        partial_rows: to_i32("rows", division.partial_rows)?,
        splits: to_i32("splits", division.splits)?,
        chunk_min: to_i32("chunk", division.chunk_min)?,
        chunk_max: to_i32("chunk", division.chunk_max)?,
        run_log2: division.run_log2 as i32,
        scores: score_params(attention),
    })
}
