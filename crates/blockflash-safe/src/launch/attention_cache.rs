//! Attention over a cache for Hopper, with the tiles of attention forward.

use super::attention_decode::{AttentionDecodeOperands, Queries};
use super::attention_fwd_tma::{BOX_ROWS_O, BOX_ROWS_Q, encode, fit_window};
use super::attention_sizes::with_sink;
use super::checked::Launch;
use super::fit::{Fit, absent, ceil_div, optional, pointer, pointer_mut, require};
use crate::{Kernel, Result, ViewMut};
use blockflash_sys::manifest::{AttentionCacheHopper, Variant};
use blockflash_sys::params::{
    blockflash_attention_cache_params, blockflash_attention_fwd_params,
    blockflash_attention_fwd_tma_params, blockflash_block_mask,
};
use std::ptr::null;

// SAFETY:
// 1. This is the parameter struct of these kernels.
// 2. Queries, keys and values are read through tensor maps, and so are inside the views that the
//    maps were encoded from, whatever pages and lengths the device holds. All other addresses
//    follow from the sizes and strides in the struct, which `fit` found to be those of the views,
//    and from offsets, lengths and columns of the table, which the kernel clamps to these sizes.
//    The number of key tiles follows from a length that one lane has read for all warps.
// 3. `o` and `lse` are `ViewMut`.
unsafe impl Launch for AttentionCacheHopper {
    type Operands<'a> = AttentionDecodeOperands<'a>;
    type Plan = blockflash_attention_cache_params;
    type Params = blockflash_attention_cache_params;
    const FAMILY: &'static str = "attention over a cache for Hopper";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionCacheHopper(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(&self, plan: &Self::Plan, operands: &Self::Operands<'_>) -> Fit<i128> {
        let (tile, p, cache) = (self.tile.tile(), &plan.fwd.base, &plan.cache);
        let queries = Queries {
            types: tile.types,
            widest: tile.head_dims,
            batch_and_heads: [p.batch, p.num_heads_q, p.num_heads_kv],
            head_dims: [p.head_dim_qk, p.head_dim_v],
            rows: [p.seqlen_q, p.total_q],
            q: [p.q_stride_batch, p.q_stride_seq, p.q_stride_head],
            o: [p.o_stride_batch, p.o_stride_seq, p.o_stride_head],
            lse: [p.lse_stride_batch, p.lse_stride_head],
        };
        operands.fit_queries(&queries, cache)?;
        let packed = operands.cu_seqlens_q.is_some();
        require(
            !packed || p.lse_stride_batch == 0,
            format_args!("a packed lse has the batch stride {}, expected 0", p.lse_stride_batch),
        )?;
        absent("pages", operands.pages.is_some(), "the kernel visits all pages")?;
        require(
            p.seqlen_kv == cache.capacity,
            format_args!(
                "seqlen_kv is {}, the cache has a capacity of {}",
                p.seqlen_kv, cache.capacity
            ),
        )?;
        fit_window(p)?;
        let section = plan.fwd.heads_per_section;
        let group = p.num_heads_q / p.num_heads_kv;
        require(
            section > 0 && section % group == 0 && section <= p.num_heads_q,
            format_args!(
                "heads_per_section is {section}, expected a multiple of {group} up to {}",
                p.num_heads_q
            ),
        )?;
        // The 32 lanes of a warp look up the pages of a key tile. Boxes begin where the swizzle
        // does.
        let (rows, block_kv) = (plan.box_rows, tile.block_kv as i32);
        require(
            rows >= 16 && rows % 16 == 0 && block_kv % rows == 0,
            format_args!("box_rows is {rows}, expected a multiple of 16 that divides {block_kv}"),
        )?;
        let one_page = cache.capacity <= cache.page_size;
        require(
            one_page || cache.page_size % rows == 0,
            format_args!("boxes of {rows} rows do not divide pages of {} slots", cache.page_size),
        )?;
        let tiles = ceil_div(p.seqlen_q.into(), tile.block_q);
        Ok(tiles * i128::from(p.num_heads_q) * i128::from(p.batch))
    }

    fn params(&self, plan: &Self::Plan, operands: &Self::Operands<'_>) -> Result<Self::Params> {
        let lse = operands.lse.as_ref().map(ViewMut::as_view);
        let rows = plan.box_rows as u32;
        let base = blockflash_attention_fwd_params {
            q: pointer(&operands.queries()),
            k: null(),
            v: null(),
            o: pointer_mut(&operands.o),
            lse: optional(lse.as_ref()).cast_mut().cast(),
            scores: with_sink(&plan.fwd.base.scores, operands.sink.as_ref()),
            cu_seqlens_q: optional(operands.cu_seqlens_q.as_ref()).cast(),
            cu_seqlens_kv: null(),
            block_mask: blockflash_block_mask {
                row_ptr: null(),
                col_idx: null(),
                row_order: null(),
                cu_rows: null(),
                ..plan.fwd.base.block_mask
            },
            ..plan.fwd.base
        };
        Ok(blockflash_attention_cache_params {
            fwd: blockflash_attention_fwd_tma_params {
                q: encode(&operands.queries(), BOX_ROWS_Q)?,
                k: encode(&operands.cache.k, rows)?,
                v: encode(&operands.cache.v, rows)?,
                o: encode(&operands.o.as_view(), BOX_ROWS_O)?,
                base,
                ..plan.fwd
            },
            cache: operands.cache.pointers(&plan.cache),
            ..*plan
        })
    }

    fn set_counter(params: &mut Self::Params, counter: *mut u32) {
        params.fwd.tile_counter = counter;
    }
}
