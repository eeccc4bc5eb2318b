//! Attention in which lists name the keys of each query.

use super::attention_decode::AttentionDecodeOperands;
use super::attention_sizes::Sizes;
use super::bsr_parts::BsrPartsMemory;
use super::checked::{Launch, Operands};
use super::fit::{Fit, absent, ceil_div, fits, narrow, optional, pointer, require, strides};
use crate::view::Used;
use crate::{DType, Kernel, View, ViewMut};
use blockflash_sys::manifest::{AttentionDecode, AttentionIndex, Variant};
use blockflash_sys::params::{
    blockflash_attention_index_params, blockflash_index_lists, blockflash_scores,
};
use blockflash_sys::{ElementTypes, HeadDims};

/// Granularities that kernels take, as powers of two.
const GRANULARITIES_LOG2: [i32; 5] = [0, 2, 4, 6, 7];

/// Tensors of attention by an index.
#[derive(Debug)]
pub struct AttentionIndexOperands<'a> {
    /// Queries, cache, outputs and workspace, without lists of pages, score terms and masks of the
    /// last keys. Kernels that take codes read their scales.
    pub attention: AttentionDecodeOperands<'a>,
    /// i32 `[groups, queries, capacity]` with contiguous lists and any values: kernels skip what
    /// names no key. `groups` is 1, the heads of k or those of q.
    pub entries: View<'a>,
    /// i32 `[batch + 1]`, with any values: kernels clamp them. With it the cache is one page of all
    /// keys, without a table and lengths.
    pub cu_seqlens_kv: Option<View<'a>>,
}

impl Operands for AttentionIndexOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let AttentionDecodeOperands { q, cache, o, lse, cu_seqlens_q, workspace, .. } =
            &self.attention;
        let [k, v, table, seqused, k_scale, v_scale] = cache.used();
        let workspace = workspace.map(BsrPartsMemory::used);
        let (o, lse) = (Some(o.used()), lse.as_ref().map(ViewMut::used));
        let [q, cu_q, cu_kv] =
            [q, cu_seqlens_q, &self.cu_seqlens_kv].map(|view| view.as_ref().map(View::used));
        let (entries, logits) = (Some(self.entries.used()), self.attention.used_logits());
        [q, o, lse, logits, cu_q, cu_kv, k, v, table, seqused, k_scale, v_scale, entries, workspace]
    }
}

/// What a launch of attention by an index knows beside its tensors.
#[derive(Clone, Copy, Debug)]
pub struct AttentionIndexPlan {
    /// What happens to a score. Its pointer is ignored.
    pub scores: blockflash_scores,
    /// Queries of the longest sequence in a packed batch; ignored otherwise.
    pub longest: i32,
    /// Keys of the longest sequence where keys are packed; ignored otherwise.
    pub longest_kv: i32,
    /// Log2 of the tokens of a block.
    pub granularity_log2: i32,
    /// Positions of a split of a list, a multiple of 64.
    pub chunk: i32,
    /// Log2 of the splits of an item.
    pub run_log2: i32,
}

/// What the checks know about a kernel.
pub(super) struct IndexTile {
    pub types: ElementTypes,
    /// The largest head dimensions.
    pub head_dims: HeadDims,
    pub rows: u32,
    /// Whether splits are combined through the workspace.
    pub has_workspace: bool,
}

/// Most positions of a split: kernels add them to the positions of a list in 32 bits.
const LONGEST_SPLIT: i32 = 1 << 30;
/// Most splits of a list, and most units: kernels divide by reciprocals, which is exact for
/// quotients of 20 bits.
const MOST: i64 = 1 << 20;

impl AttentionIndexOperands<'_> {
    /// Checks the tensors against each other, and that the workspace has room, writes the argument,
    /// and returns the number of items.
    pub(super) fn fit_index(
        &self,
        tile: &IndexTile,
        p: &AttentionIndexPlan,
        params: &mut blockflash_attention_index_params,
    ) -> Fit<i128> {
        let (operands, decode) = (&self.attention, &mut params.scaled.decode);
        absent("pages", operands.pages.is_some(), "lists name keys")?;
        operands.refuse_terms_and_tail_mask()?;
        let sequences = self.cu_seqlens_kv.map(|_| 1);
        let queries = operands.fit_queries_beside(
            tile.types,
            tile.head_dims,
            p.longest,
            sequences,
            &mut decode.cache,
        )?;
        let Sizes { packed, batch, heads_q, heads_kv, rows_q, .. } = queries.sizes;
        if let Some(offsets) = &self.cu_seqlens_kv {
            self.fit_packed_keys(offsets, batch)?;
            let (longest, total) = (p.longest_kv, decode.cache.page_size);
            require(
                (1..=total).contains(&longest),
                format_args!("a sequence has up to {longest} keys of {total}"),
            )?;
            decode.cache.capacity = longest;
            params.cu_seqlens_kv = pointer(offsets).cast();
        }

        let count = if packed { rows_q } else { batch.saturating_mul(rows_q) };
        let lists = self.fit_lists(p, count, [heads_q, heads_kv])?;
        let positions = i64::from(lists.capacity) << lists.granularity_log2;
        require(
            p.chunk > 0 && p.chunk % 64 == 0 && p.chunk <= LONGEST_SPLIT,
            format_args!(
                "splits have {} positions, expected a multiple of 64 up to {LONGEST_SPLIT}",
                p.chunk
            ),
        )?;
        require(
            (0..=4).contains(&p.run_log2),
            format_args!("run_log2 is {}, expected 0 to 4", p.run_log2),
        )?;
        let units = i64::from(lists.groups).max(heads_kv);
        let group = heads_q / units;
        let splits = (ceil_div(positions, p.chunk as u32) as i64).max(1);
        require(
            splits.max(units) < MOST,
            format_args!("{splits} splits of lists of {units} units, the limit is {MOST}"),
        )?;
        let runs = ceil_div(splits, 1 << p.run_log2);
        let row_tiles = i128::from(count) * i128::from(units) * ceil_div(group, tile.rows);
        let (items, rows) = (row_tiles * runs, group.min(tile.rows.into()));
        let slots = items << p.run_log2;
        require(
            slots <= i32::MAX.into(),
            format_args!("{slots} splits, the limit is {}", i32::MAX),
        )?;
        let decode = &mut params.scaled.decode;
        operands.write_queries(&queries, decode)?;
        if tile.has_workspace {
            operands.fit_workspace(splits, slots, rows, decode)?;
        }
        decode.group = narrow("group", group)?;
        decode.items = narrow("items", items as i64)?;
        decode.run_log2 = p.run_log2;
        decode.scores = operands.scores(&p.scores);
        params.lists = lists;
        params.units = narrow("units", units)?;
        params.chunk = p.chunk;
        Ok(items)
    }

    /// Checks offsets of keys that are one after another in the only page of the cache.
    fn fit_packed_keys(&self, offsets: &View<'_>, batch: i64) -> Fit {
        let cache = &self.attention.cache;
        let others = cache.block_table.is_some() || cache.seqused.is_some();
        absent("block_table or seqused", others, "keys are packed")?;
        let pages = cache.k.shape()[0];
        require(pages == 1, format_args!("packed keys have {pages} pages, expected 1"))?;
        fits("cu_seqlens_kv", offsets, DType::I32, [(batch + 1, 1)])
    }

    /// Checks the lists of this many queries, and makes their argument.
    fn fit_lists(
        &self,
        p: &AttentionIndexPlan,
        queries: i64,
        [heads_q, heads_kv]: [i64; 2],
    ) -> Fit<blockflash_index_lists> {
        let entries = &self.entries;
        let &[groups, _, capacity] = entries.shape() else {
            return Err(format!("lists are {:?}, expected 3 dimensions", entries.shape()));
        };
        let (groups, capacity) = (groups as i64, capacity as i64);
        require(
            [1, heads_kv, heads_q].contains(&groups),
            format_args!("{groups} groups of lists, expected 1, {heads_kv} or {heads_q}"),
        )?;
        let [stride_group, stride_query, _] =
            strides("lists", entries, DType::I32, [groups, queries, capacity])?;
        let log2 = p.granularity_log2;
        require(
            GRANULARITIES_LOG2.contains(&log2),
            format_args!("blocks of 2^{log2} keys, expected one of 2^{GRANULARITIES_LOG2:?}"),
        )?;
        require(
            capacity < 1 << (30 - log2),
            format_args!("lists of {capacity} blocks of 2^{log2} keys, the limit is 2^30 keys"),
        )?;
        Ok(blockflash_index_lists {
            entries: optional(Some(entries)).cast(),
            stride_group,
            stride_query,
            groups: narrow("groups", groups)?,
            queries: narrow("queries", queries)?,
            capacity: narrow("capacity", capacity)?,
            granularity_log2: log2,
        })
    }
}

// SAFETY:
// 1. This is the parameter struct of these kernels.
// 2. All pointers come from views. Addresses follow from the sizes and strides in the struct, which
//    `fit_index` wrote from the views, and from lengths, offsets, page numbers and entries of
//    lists, each of which the kernel clamps to these sizes or passes over. Which items there are,
//    and for how many the workspace has room, follows from the argument alone.
// 3. In a cluster a CTA reads the shared memory of others, of which there is one for each split of
//    a group.
// 4. `o` and `lse` are `ViewMut`. The workspace is used in turns, by kernels only. Whatever its
//    counters hold, they decide only which CTA combines parts and when: nobody waits for them, and
//    no address follows from them.
unsafe impl Launch for AttentionIndex {
    type Operands<'a> = AttentionIndexOperands<'a>;
    type Plan = AttentionIndexPlan;
    type Params = blockflash_attention_index_params;
    const FAMILY: &'static str = "attention by an index";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionIndex(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let AttentionDecode { mut types, head_dims, rows, .. } = self.tile;
        if self.tile.has_codes() {
            let dtype = operands.attention.queries().dtype();
            require(
                matches!(dtype, DType::F16 | DType::BF16),
                format_args!("q is {dtype}, expected f16 or bf16"),
            )?;
            types = ElementTypes { q: dtype, o: dtype, ..types };
            params.scaled.q_dtype = dtype as i32;
        }
        let tile = IndexTile { types, head_dims, rows, has_workspace: true };
        let items = operands.fit_index(&tile, plan, params)?;
        if self.tile.has_codes() {
            let (decode, scales) = (&params.scaled.decode, &mut params.scaled.scales);
            let cache = &operands.attention.cache;
            cache.fit_scales(decode.batch.into(), &decode.cache, scales)?;
        }
        Ok(items)
    }

    /// A CTA reads the shared memory of one for each split of a group.
    fn fewest_in_cluster(&self, _: &Self::Plan, params: &Self::Params) -> u32 {
        splits(params).min(16)
    }

    fn set_counter(params: &mut Self::Params, counter: *mut u32) {
        params.scaled.decode.tile_counter = counter;
    }
}

/// Splits of a list, of an argument that was found to fit.
fn splits(params: &blockflash_attention_index_params) -> u32 {
    let positions = i64::from(params.lists.capacity) << params.lists.granularity_log2;
    let chunk = i64::from(params.chunk.max(1));
    ((positions + chunk - 1) / chunk).max(1).try_into().unwrap_or(u32::MAX)
}

#[cfg(test)]
#[path = "attention_index_tests.rs"]
mod tests;
