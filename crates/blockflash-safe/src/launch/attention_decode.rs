//! Attention over a cache.

use super::attention_decode_scalars::{AttentionDecodeScalars, fewest_in_cluster, most_splits};
use super::attention_sizes::{
    Sizes, fit_head_dims, lse_strides, row_sizes, row_strides, with_sink,
};
use super::bsr_parts::BsrPartsMemory;
use super::checked::{Launch, Operands};
use super::fit::{Fit, ceil_div, fits, narrow, pointer, require, rows_aligned};
use super::kv_cache::KvCacheViews;
use super::score_terms::ScoreTerms;
use crate::view::Used;
use crate::{DType, Kernel, View, ViewMut};
use blockflash_sys::manifest::{AttentionDecode, Variant};
use blockflash_sys::params::{
    blockflash_attention_decode_params, blockflash_attention_decode_terms_params,
    blockflash_kv_cache, blockflash_scores,
};
use blockflash_sys::{ElementTypes, HeadDims};
use std::ptr::null;

/// Tensors of attention over a cache. With `cu_seqlens_q` the queries are packed.
#[derive(Debug)]
pub struct AttentionDecodeOperands<'a> {
    /// `[batch, seqlen_q, num_heads_q, head_dim_qk]`, packed `[total_q, num_heads_q, head_dim_qk]`.
    /// `None` if `o` holds the queries, which takes equal head dimensions.
    pub q: Option<View<'a>>,
    /// The keys and values.
    pub cache: KvCacheViews<'a>,
    /// As `q`, with `head_dim_v`.
    pub o: ViewMut<'a>,
    /// f32 `[batch, num_heads_q, seqlen_q]`, packed `[num_heads_q, total_q]`.
    pub lse: Option<ViewMut<'a>>,
    /// f32 `[num_heads_q]`.
    pub sink: Option<View<'a>>,
    /// i32 `[batch + 1]`, with any values: kernels clamp them.
    pub cu_seqlens_q: Option<View<'a>>,
    /// i32 `[batch, num_heads_kv, capacity]` columns of the block table and i32 `[batch]` counts,
    /// both contiguous and with any values: kernels clamp them.
    pub pages: Option<[View<'a>; 2]>,
    /// What is added to scores; the keys of the bias are the capacity. Only kernels with score
    /// terms take that.
    pub terms: ScoreTerms<'a>,
    /// u8 `[batch, seqlen_q, tail]`, where the batch may be 1 instead, packed `[total_q, tail]`,
    /// with any values: 0 hides one of the last `tail` keys of a sequence from a query. Rows are
    /// contiguous.
    pub tail_mask: Option<View<'a>>,
    /// Partial sums, then references and denominators, and a counter of arrivals for each item.
    pub workspace: Option<&'a BsrPartsMemory>,
}

impl AttentionDecodeOperands<'_> {
    /// The queries. A row tile is read before its output is written.
    pub(super) fn queries(&self) -> View<'_> {
        self.q.unwrap_or_else(|| self.o.as_view())
    }
}

impl Operands for AttentionDecodeOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let [k, v, table, seqused, k_scale, v_scale] = self.cache.used();
        let [list, count] =
            self.pages.as_ref().map_or([None; 2], |[l, c]| [Some(l.used()), Some(c.used())]);
        let workspace = self.workspace.map(BsrPartsMemory::used);
        let (o, lse) = (Some(self.o.used()), self.lse.as_ref().map(ViewMut::used));
        let [q, sink, cu_q, tail] = [&self.q, &self.sink, &self.cu_seqlens_q, &self.tail_mask]
            .map(|view| view.as_ref().map(View::used));
        let [bias, alibi] = self.terms.used();
        [
            q, o, lse, sink, cu_q, k, v, table, seqused, k_scale, v_scale, list, count, bias,
            alibi, tail, workspace,
        ]
    }
}

/// Queries, outputs and cache of a launch, which have been found to fit each other. Sizes are
/// positive.
pub(super) struct Queries {
    pub sizes: Sizes,
    /// Strides of queries and outputs along sequences, rows and heads.
    pub q: [i64; 3],
    pub o: [i64; 3],
    /// Strides of the log-sum-exp along sequences and heads.
    pub lse: [i64; 2],
}

impl AttentionDecodeOperands<'_> {
    /// Checks queries, outputs and cache against each other and the largest head dimensions of a
    /// kernel. Writes the argument of the cache.
    pub(super) fn fit_queries(
        &self,
        types: ElementTypes,
        widest: HeadDims,
        longest: i32,
        cache: &mut blockflash_kv_cache,
    ) -> Fit<Queries> {
        self.fit_queries_beside(types, widest, longest, None, cache)
    }

    /// The same, where the cache may hold keys of this many sequences, in place of those of the
    /// queries.
    pub(super) fn fit_queries_beside(
        &self,
        types: ElementTypes,
        widest: HeadDims,
        longest: i32,
        sequences: Option<i64>,
        cache: &mut blockflash_kv_cache,
    ) -> Fit<Queries> {
        let (queries, outputs) = (self.queries(), self.o.as_view());
        let packed = self.cu_seqlens_q.is_some();
        let [entries, rows_q, heads_q, _] = row_sizes("q", &queries, packed)?;
        let batch = match &self.cu_seqlens_q {
            Some(offsets) => offsets.shape().first().map_or(0, |&count| count as i64) - 1,
            None => entries,
        };
        let seqlen_q = if packed { longest.into() } else { rows_q };
        let of_cache = sequences.unwrap_or(batch);
        let [heads_kv, mut head_dim_qk, mut head_dim_v] =
            self.cache.fit(types.kv, of_cache, cache)?;
        if types.kv == DType::U8 {
            // Rows of codes, which stand for as many columns as the kernel has.
            self.cache.fit_code_rows()?;
            [head_dim_qk, head_dim_v] = [widest.qk, widest.v].map(|columns| columns as i64);
        }
        let positive = [batch, heads_q, heads_kv, seqlen_q];
        require(
            positive.iter().all(|&size| size > 0),
            format_args!(
                "batch, heads of q and of k, and seqlen_q are {positive:?}: a size is not positive"
            ),
        )?;
        require(
            heads_q % heads_kv == 0,
            format_args!("q has {heads_q} heads, not a multiple of the {heads_kv} of k"),
        )?;
        fit_head_dims([head_dim_qk, head_dim_v], widest, types)?;
        if !types.kv.is_code() {
            self.cache.refuse_scales()?;
        }
        if let Some(cu_seqlens) = &self.cu_seqlens_q {
            fits("cu_seqlens_q", cu_seqlens, DType::I32, [(batch + 1, 1)])?;
        }
        let rows = |name, view: &View<'_>, dtype, columns| {
            let strides =
                row_strides(name, view, dtype, packed, [batch, rows_q, heads_q, columns])?;
            rows_aligned(name, view, 8, strides)?;
            Ok::<_, String>(strides)
        };
        let q = rows("q", &queries, types.q, head_dim_qk)?;
        let o = rows("o", &outputs, types.o, head_dim_v)?;
        let lse = match &self.lse {
            Some(lse) => lse_strides(&lse.as_view(), packed, [batch, heads_q, rows_q])?,
            None => [0; 2],
        };
        self.sink.as_ref().map_or(Ok(()), |x| fits("sink", x, DType::F32, [(heads_q, 1)]))?;
        let lengths = [seqlen_q, cache.capacity.into()];
        let sizes = Sizes {
            types,
            packed,
            batch,
            heads_q,
            heads_kv,
            lengths,
            rows_q,
            rows_kv: 0,
            head_dim_qk,
            head_dim_v,
        };
        Ok(Queries { sizes, q, o, lse })
    }

    /// Checks the tensors against each other, and that the workspace has room, writes the
    /// argument, and returns the number of items.
    pub(super) fn fit_items(
        &self,
        tile: &DecodeTile,
        p: &AttentionDecodeScalars,
        params: &mut blockflash_attention_decode_params,
    ) -> Fit<i128> {
        let queries = self.fit_queries(tile.types, tile.head_dims, p.longest, &mut params.cache)?;
        let (cache, sizes) = (&params.cache, &queries.sizes);
        let Sizes { packed, batch, heads_q, heads_kv, rows_q: total_q, .. } = *sizes;
        require(
            p.most_queries > 0,
            format_args!("most_queries is {}, expected at least 1", p.most_queries),
        )?;
        let seqlen_q = sizes.lengths[0].min(p.most_queries.into());
        let (mut listed, mut lists) = (0, [null(); 2]);
        if let Some([list, count]) = &self.pages {
            listed = list.shape().last().map_or(0, |&listed| listed as i64);
            require(
                listed > 0,
                format_args!("pages is {:?}: a size is not positive", list.shape()),
            )?;
            let of_head = [(batch, heads_kv * listed), (heads_kv, listed), (listed, 1)];
            fits("pages", list, DType::I32, of_head)?;
            fits("page_count", count, DType::I32, [(batch, 1)])?;
            require(
                cache.capacity >= cache.page_size,
                format_args!(
                    "the capacity is {}, less than a page of {}",
                    cache.capacity, cache.page_size
                ),
            )?;
            lists = [pointer(list), pointer(count)];
        }

        let chunks = p.splits > 0 && p.splits <= 256 && p.chunk_min > 0 && p.chunk_min % 64 == 0;
        require(
            chunks && p.chunk_max >= p.chunk_min && p.chunk_max % 64 == 0,
            format_args!(
                "{} splits of {} to {} keys, expected 1 to 256 of multiples of 64",
                p.splits, p.chunk_min, p.chunk_max
            ),
        )?;
        // The kernel multiplies them in 32 bits.
        require(
            p.chunk_max <= 1 << 20,
            format_args!("splits have up to {} keys, the limit is {}", p.chunk_max, 1 << 20),
        )?;
        require(
            (0..=4).contains(&p.run_log2),
            format_args!("run_log2 is {}, expected 0 to 4", p.run_log2),
        )?;
        let group = heads_q / heads_kv;
        // The kernel divides by reciprocals, which is exact for quotients of 20 bits.
        require(
            seqlen_q * group < 1 << 20,
            format_args!("{seqlen_q} queries of {group} heads, the limit of rows is {}", 1 << 20),
        )?;
        require(batch < 1 << 20, format_args!("{batch} sequences, the limit is {}", 1 << 20))?;
        let of_sequences = i128::from(batch) * ceil_div(seqlen_q * group, tile.rows);
        let row_tiles = match packed {
            true => of_sequences.min(ceil_div(total_q * group, tile.rows) + i128::from(batch)),
            false => of_sequences,
        };
        let keys = match &self.pages {
            None => i64::from(cache.capacity),
            Some(_) => listed.saturating_mul(cache.page_size.into()),
        };
        require(
            keys <= 1 << 30,
            format_args!("lists name up to {keys} keys, the limit is {}", 1 << 30),
        )?;
        let splits = most_splits(keys, [p.splits, p.chunk_min, p.chunk_max].map(i64::from));
        let heads = i128::from(heads_kv);
        let runs = ceil_div(splits, 1 << p.run_log2);
        // Lengths that do not ascend may ask for all of them.
        let most = (of_sequences * heads * runs) << p.run_log2;
        require(most <= i32::MAX.into(), format_args!("{most} splits, the limit is {}", i32::MAX))?;
        let mut items = row_tiles * heads * ceil_div(runs as i64, tile.run);
        if tile.is_even {
            // The kernel computes no more items than there is room for.
            let fewest = 1.min(items);
            require(
                (fewest..=items).contains(&p.even_items.into()),
                format_args!("{} items, expected {fewest} to {items}", p.even_items),
            )?;
            items = p.even_items.into();
        }
        let rows = (seqlen_q * group).min(tile.rows.into());
        self.write_queries(&queries, params)?;
        self.fit_workspace(splits, items << p.run_log2, rows, params)?;
        params.page_list = lists[0].cast();
        params.page_count = lists[1].cast();
        params.group = narrow("group", group)?;
        params.most_queries = p.most_queries;
        params.page_list_capacity = narrow("pages", listed)?;
        params.items = narrow("items", items as i64)?;
        params.splits = p.splits;
        params.chunk_min = p.chunk_min;
        params.chunk_max = p.chunk_max;
        params.run_log2 = p.run_log2;
        params.scores = self.scores(&p.scores);
        Ok(items)
    }
}

impl AttentionDecodeOperands<'_> {
    /// What happens to a score, for the argument.
    pub(super) fn scores(&self, scores: &blockflash_scores) -> blockflash_scores {
        with_sink(scores, self.sink.as_ref())
    }

    /// The logits that join the denominator.
    pub(super) fn used_logits(&self) -> Option<Used<'_>> {
        self.sink.as_ref().map(View::used)
    }

    /// Whether sequences have equally many queries, visit all pages, and have lengths on the
    /// device.
    pub(super) fn has_lengths_alone(&self) -> bool {
        self.cache.seqused.is_some() && self.cu_seqlens_q.is_none() && self.pages.is_none()
    }
}

/// What the checks know about a kernel.
pub(super) struct DecodeTile {
    pub types: ElementTypes,
    /// The largest head dimensions.
    pub head_dims: HeadDims,
    pub rows: u32,
    /// Splits of an item.
    pub run: u32,
    /// Whether the device divides the keys of all sequences, so that there are fewer items than
    /// each of them could have.
    pub is_even: bool,
}

// SAFETY:
// 1. This is the parameter struct of attention over a cache with score terms; kernels without take
//    its first member.
// 2. All pointers come from views. Addresses follow from the sizes and strides in the struct, which
//    `fit` wrote from the views, and from lengths, offsets and page numbers, each of which the
//    kernel clamps to these sizes. It computes no item beyond `items`, for which the
//    workspace has room, and one warp of a CTA decides for all how many items there are.
// 3. In a cluster a CTA reads the shared memory of others, of which there is one for each split of
//    a group.
// 4. `o` and `lse` are `ViewMut`. The workspace is used in turns, by kernels only. Whatever its
//    counters hold, they decide only which CTA combines parts and when: nobody waits for them, and
//    no address follows from them.
unsafe impl Launch for AttentionDecode {
    type Operands<'a> = AttentionDecodeOperands<'a>;
    type Plan = AttentionDecodeScalars;
    type Params = blockflash_attention_decode_terms_params;
    const FAMILY: &'static str = "attention over a cache";

    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel.variant {
            Variant::AttentionDecode(tile) if !tile.has_codes() => Some(tile),
            _ => None,
        }
    }

    fn param_bytes(&self) -> usize {
        match self.terms {
            true => size_of::<blockflash_attention_decode_terms_params>(),
            false => size_of::<blockflash_attention_decode_params>(),
        }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let Self { types, head_dims, rows, .. } = *self;
        let tile = DecodeTile { types, head_dims, rows, run: 1, is_even: false };
        let items = operands.fit_items(&tile, plan, &mut params.base)?;
        match self.terms {
            false => operands.refuse_terms_and_tail_mask()?,
            true => {
                operands.fit_terms(&params.base, &mut params.terms)?;
                operands.fit_tail_mask(&params.base, &mut params.tail_mask)?;
            }
        }
        Ok(items)
    }

    /// A CTA reads the shared memory of one for each split of a group.
    fn fewest_in_cluster(&self, _: &Self::Plan, params: &Self::Params) -> u32 {
        fewest_in_cluster(&params.base)
    }

    fn set_counter(params: &mut Self::Params, counter: *mut u32) {
        params.base.tile_counter = counter;
    }
}

#[cfg(test)]
#[path = "attention_decode_tests.rs"]
mod tests;
