//! Attention over a cache for Hopper, with the tiles of attention forward.

use super::attention_combine::fit_parts;
use super::attention_decode::{AttentionDecodeOperands, Queries};
use super::attention_fwd_tma::{BOX_COLUMNS, encode, encode_boxes, fit_sections};
use super::attention_sizes::with_sink;
use super::checked::Launch;
use super::fit::{Fit, absent, ceil_div, optional, pointer, pointer_mut, require};
use crate::{Kernel, Result};
use blockflash_sys::manifest::{AttentionCacheHopper, Variant};
use blockflash_sys::params::{blockflash_attention_cache_split_params, blockflash_scores};
use std::ptr::null_mut;

/// What a launch for sequences with many queries knows beside its tensors.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCachePlan {
    /// What happens to a score. Its pointer is ignored.
    pub scores: blockflash_scores,
    /// Queries of the longest sequence in a packed batch; ignored otherwise.
    pub longest: i32,
    /// Heads that are computed together, a multiple of those that share a head of k.
    pub heads_per_section: i32,
    /// Sequences with fewer queries are left to another kernel.
    pub fewest_queries: i32,
    /// Slots that one copy takes.
    pub box_rows: i32,
    /// Heads that share the rows of a tile with each query: at most 64, and at most those that
    /// share a head of k.
    pub pack: i32,
    /// Parts of the keys, at most: sequences with lengths on the device may have fewer. With more
    /// than one they are left in the workspace, and [`AttentionCombine`] is launched next.
    ///
    /// [`AttentionCombine`]: blockflash_sys::manifest::AttentionCombine
    pub splits: i32,
}

/// Rows of a warpgroup.
const WARPGROUP_ROWS: i32 = 64;

// SAFETY:
// 1. This is the parameter struct of these kernels.
// 2. Queries, keys and values are read through tensor maps, and so are inside the views that the
//    maps were encoded from, whatever pages and lengths the device holds. All other addresses
//    follow from the sizes and strides in the struct, which `fit` wrote from the views, and from
//    offsets, lengths and columns of the table, which the kernel clamps to these sizes.
//    The number of key tiles follows from a length that one lane has read for all warps, and that
//    of splits is clamped to the one that the workspace has room for.
// 3. `o` and `lse` are `ViewMut`, and only kernels use the workspace.
unsafe impl Launch for AttentionCacheHopper {
    type Operands<'a> = AttentionDecodeOperands<'a>;
    type Plan = AttentionCachePlan;
    type Params = blockflash_attention_cache_split_params;
    const FAMILY: &'static str = "attention over a cache for Hopper";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionCacheHopper(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let (tile, AttentionCachePlan { pack, splits, .. }) = (self.tile.tile(), *plan);
        let Queries { sizes, q, o, lse } = operands.fit_queries(
            tile.types,
            tile.head_dims,
            plan.longest,
            &mut params.cache.cache,
        )?;
        absent("pages", operands.pages.is_some(), "the kernel visits all pages")?;
        operands.refuse_terms_and_tail_mask()?;
        // Keys and values are read through tensor maps.
        let p = &mut params.cache.fwd.base;
        sizes.write(p)?;
        (p.q, p.o) = (pointer(&operands.queries()), pointer_mut(&operands.o));
        p.cu_seqlens_q = optional(operands.cu_seqlens_q.as_ref()).cast();
        p.lse = operands.lse.as_ref().map_or(null_mut(), pointer_mut).cast();
        [p.q_stride_batch, p.q_stride_seq, p.q_stride_head] = q;
        [p.o_stride_batch, p.o_stride_seq, p.o_stride_head] = o;
        [p.lse_stride_batch, p.lse_stride_head] = lse;
        p.scores = with_sink(&plan.scores, operands.sink.as_ref());
        fit_sections(plan.heads_per_section, 1, &mut params.cache.fwd)?;
        let cache = &params.cache.cache;
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
        (params.cache.fewest_queries, params.cache.box_rows) = (plan.fewest_queries, plan.box_rows);

        let group = (sizes.heads_q / sizes.heads_kv) as i32;
        let most = WARPGROUP_ROWS.min(group);
        require(
            (1..=most).contains(&pack),
            format_args!("pack is {pack}, expected from 1 to {most}"),
        )?;
        (params.pack, params.pack_queries) = (pack, WARPGROUP_ROWS / pack);
        params.packs = (group + pack - 1) / pack;
        params.cache.fwd.heads_per_section = plan.heads_per_section / group * params.packs;
        require(
            splits == 1 || !sizes.packed,
            format_args!("{splits} splits of packed sequences, expected 1"),
        )?;
        params.splits = splits;
        if splits != 1 {
            let memory = operands.workspace;
            let memory = memory.ok_or_else(|| format!("{splits} splits have no workspace"))?;
            let rows = i128::from(sizes.batch) * i128::from(sizes.rows_q);
            let outputs = [rows * i128::from(sizes.heads_q), sizes.head_dim_v.into()];
            [params.parts, params.parts_lse] = fit_parts(memory, splits, outputs)?;
        }
        let queries = tile.block_q / WARPGROUP_ROWS as u32 * params.pack_queries as u32;
        let packs = i128::from(sizes.heads_kv) * i128::from(params.packs);
        let tiles = ceil_div(sizes.lengths[0], queries) * packs * i128::from(splits);
        Ok(tiles * i128::from(sizes.batch))
    }

    fn encode(&self, operands: &Self::Operands<'_>, params: &mut Self::Params) -> Result<()> {
        let rows = params.cache.box_rows as u32;
        // As if heads were a sequence of rows of queries.
        let queries = operands.queries();
        let dims: &[usize] = if queries.shape().len() == 4 { &[0, 2, 1, 3] } else { &[1, 0, 2] };
        let boxes = [BOX_COLUMNS, params.pack as u32, params.pack_queries as u32];
        let fwd = &mut params.cache.fwd;
        fwd.q = encode_boxes(&queries.permute(dims)?, boxes)?;
        fwd.k = encode(&operands.cache.k, rows)?;
        fwd.v = encode(&operands.cache.v, rows)?;
        Ok(())
    }

    fn set_counter(params: &mut Self::Params, counter: *mut u32) {
        params.cache.fwd.tile_counter = counter;
    }
}
