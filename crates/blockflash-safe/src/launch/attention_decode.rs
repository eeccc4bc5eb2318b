//! Attention over a cache.

use super::attention_sizes::{fit_head_dims, with_sink};
use super::bsr_parts::BsrPartsMemory;
use super::checked::{Launch, Operands};
use super::fit::{
    Fit, ceil_div, fits, given, optional, pointer, pointer_mut, require, rows_aligned,
};
use super::kv_cache::KvCacheViews;
use crate::view::Used;
use crate::{DType, Kernel, Result, View, ViewMut};
use blockflash_sys::manifest::{AttentionDecode, Variant};
use blockflash_sys::params::{blockflash_attention_decode_params, blockflash_kv_cache};
use blockflash_sys::{ElementTypes, HeadDims};
use std::ptr::null_mut;

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
        let [k, v, table, seqused] = self.cache.used();
        let [list, count] =
            self.pages.as_ref().map_or([None; 2], |[l, c]| [Some(l.used()), Some(c.used())]);
        let workspace = self.workspace.map(BsrPartsMemory::used);
        let (o, lse) = (Some(self.o.used()), self.lse.as_ref().map(ViewMut::used));
        let [q, sink, cu_q] =
            [&self.q, &self.sink, &self.cu_seqlens_q].map(|view| view.as_ref().map(View::used));
        [q, o, lse, sink, cu_q, k, v, table, seqused, list, count, workspace]
    }
}

/// The most splits that a sequence with up to `keys` keys may have, as the kernel divides it: the
/// number of splits of a sequence of medium length, and the limits of a split.
fn most_splits(keys: i64, [splits, shortest, longest]: [i64; 3]) -> i64 {
    let up = |a: i64, b: i64| (a + b - 1) / b;
    // A window may begin anywhere in a step of 16 keys.
    let keys = up(keys, 16) * 16;
    let most = if keys <= longest * splits {
        splits.min(up(keys, shortest))
    } else {
        splits.max(up(keys, longest).min(256))
    };
    most.max(1)
}

/// Sizes and strides of queries and outputs, which all kernels of attention over a cache check.
#[derive(Clone, Copy)]
pub(super) struct Queries {
    pub types: ElementTypes,
    /// The largest head dimensions of the kernel.
    pub widest: HeadDims,
    /// Sequences, heads of queries, heads of keys.
    pub batch_and_heads: [i32; 3],
    /// Of q and k, and of v and o.
    pub head_dims: [i32; 2],
    /// The longest sequence, rows when packed.
    pub rows: [i32; 2],
    /// Strides of q and o along sequences, rows and heads.
    pub q: [i64; 3],
    pub o: [i64; 3],
    /// Strides of the log-sum-exp along sequences and heads.
    pub lse: [i64; 2],
}

impl AttentionDecodeOperands<'_> {
    /// Checks sizes and strides against the tensors of queries and outputs, and against the cache.
    pub(super) fn fit_queries(&self, s: &Queries, cache: &blockflash_kv_cache) -> Fit {
        let [batch, heads_q, heads_kv] = s.batch_and_heads.map(i64::from);
        let [seqlen_q, total_q] = s.rows.map(i64::from);
        let [head_dim_qk, head_dim_v] = s.head_dims.map(i64::from);
        let sizes = [batch, heads_q, heads_kv, seqlen_q];
        require(
            sizes.iter().all(|&size| size > 0),
            format_args!(
                "batch, heads of q and of k, and seqlen_q are {sizes:?}: a size is not positive"
            ),
        )?;
        require(
            heads_q % heads_kv == 0,
            format_args!("q has {heads_q} heads, not a multiple of the {heads_kv} of k"),
        )?;
        fit_head_dims([head_dim_qk, head_dim_v], s.widest)?;
        self.cache.fit(cache, s.types.kv, [batch, heads_kv], [head_dim_qk, head_dim_v])?;

        let packed = self.cu_seqlens_q.is_some();
        if let Some(cu_seqlens) = &self.cu_seqlens_q {
            fits("cu_seqlens_q", cu_seqlens, DType::I32, [(batch + 1, 1)])?;
        }
        let rows = |name, view: &View<'_>, dtype, columns, [of_batch, seq, head]: [i64; 3]| {
            // Packed tensors have no stride of sequences.
            rows_aligned(name, view, 8, [seq, head, if packed { 0 } else { of_batch }])?;
            let [heads, inner] = [(heads_q, head), (columns, 1)];
            match packed {
                true => fits(name, view, dtype, [(total_q, seq), heads, inner]),
                false => {
                    let rows = [(batch, of_batch), (seqlen_q, seq), heads, inner];
                    fits(name, view, dtype, rows)
                }
            }
        };
        rows("q", &self.queries(), s.types.q, head_dim_qk, s.q)?;
        rows("o", &self.o.as_view(), s.types.o, head_dim_v, s.o)?;
        if let Some(lse) = &self.lse {
            let (lse, head) = (lse.as_view(), (heads_q, s.lse[1]));
            match packed {
                true => fits("lse", &lse, DType::F32, [head, (total_q, 1)])?,
                false => {
                    let batch = (batch, s.lse[0]);
                    fits("lse", &lse, DType::F32, [batch, head, (seqlen_q, 1)])?;
                }
            }
        }
        self.sink.as_ref().map_or(Ok(()), |x| fits("sink", x, DType::F32, [(heads_q, 1)]))
    }

    /// Checks sizes and strides against the tensors, and that the workspace has room, and returns
    /// the number of items.
    pub(super) fn fit_items(
        &self,
        tile: &DecodeTile,
        p: &blockflash_attention_decode_params,
    ) -> Fit<i128> {
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
        self.fit_queries(&queries, &p.cache)?;
        let [batch, heads_q, heads_kv] = [p.batch, p.num_heads_q, p.num_heads_kv].map(i64::from);
        let [total_q, head_dim_v] = [p.total_q, p.head_dim_v].map(i64::from);
        let packed = self.cu_seqlens_q.is_some();
        require(
            p.most_queries > 0,
            format_args!("most_queries is {}, expected at least 1", p.most_queries),
        )?;
        let seqlen_q = i64::from(p.seqlen_q.min(p.most_queries));
        let listed = i64::from(p.page_list_capacity);
        require(
            listed >= 0 && (listed > 0) == self.pages.is_some(),
            format_args!(
                "page_list_capacity is {listed}, with page lists {}",
                given(self.pages.is_some())
            ),
        )?;
        if let Some([list, count]) = &self.pages {
            let of_head = [(batch, heads_kv * listed), (heads_kv, listed), (listed, 1)];
            fits("pages", list, DType::I32, of_head)?;
            fits("page_count", count, DType::I32, [(batch, 1)])?;
            require(
                p.cache.capacity >= p.cache.page_size,
                format_args!(
                    "the capacity is {}, less than a page of {}",
                    p.cache.capacity, p.cache.page_size
                ),
            )?;
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
            None => i64::from(p.cache.capacity),
            Some(_) => listed * i64::from(p.cache.page_size),
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
        let items = row_tiles * heads * ceil_div(runs as i64, tile.run);
        // The kernel computes no more items than there is room for.
        let fewest = if tile.is_even { 1.min(items) } else { items };
        require(
            (fewest..=items).contains(&p.items.into()),
            format_args!("{} items, expected {fewest} to {items}", p.items),
        )?;
        let items = i128::from(p.items);
        let rows = (seqlen_q * group).min(tile.rows.into());
        require(
            i64::from(p.partial_rows) == rows,
            format_args!("partial_rows is {}, expected {rows}", p.partial_rows),
        )?;
        match &self.workspace {
            None => require(splits == 1, format_args!("{splits} splits have no workspace"))?,
            Some(memory) => {
                let slots = items << p.run_log2;
                let sums = slots * i128::from(rows * (head_dim_v + 2));
                let room = sums <= memory.sums() as i128 && slots <= memory.counters() as i128;
                require(
                    splits == 1 || room,
                    format_args!(
                        "the workspace has {} sums and {} counters, {sums} and {slots} are needed",
                        memory.sums(),
                        memory.counters()
                    ),
                )?;
            }
        }
        Ok(items)
    }
}

impl AttentionDecodeOperands<'_> {
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

impl AttentionDecodeOperands<'_> {
    /// The parameters of a launch that fits.
    pub(super) fn params(
        &self,
        p: &blockflash_attention_decode_params,
    ) -> blockflash_attention_decode_params {
        let lse = self.lse.as_ref().map(ViewMut::as_view);
        let [list, count] = self.pages.map_or([None, None], |both| both.map(Some));
        let sums = self.workspace.map_or(null_mut(), BsrPartsMemory::sums_pointer);
        let slots = (p.items as usize) << p.run_log2;
        let logs = slots * p.partial_rows as usize * p.head_dim_v as usize;
        blockflash_attention_decode_params {
            q: pointer(&self.queries()),
            o: pointer_mut(&self.o),
            lse: optional(lse.as_ref()).cast_mut().cast(),
            scores: with_sink(&p.scores, self.sink.as_ref()),
            cu_seqlens_q: optional(self.cu_seqlens_q.as_ref()).cast(),
            cache: self.cache.pointers(&p.cache),
            group: p.num_heads_q / p.num_heads_kv,
            page_list: optional(list.as_ref()).cast(),
            page_count: optional(count.as_ref()).cast(),
            partial_sums: sums,
            partial_logs: sums.wrapping_add(logs),
            arrivals: self.workspace.map_or(null_mut(), BsrPartsMemory::counters_pointer),
            ..*p
        }
    }
}

// SAFETY:
// 1. This is the parameter struct of attention over a cache.
// 2. All pointers come from views. Addresses follow from the sizes and strides in the struct, which
//    `fit` found to be those of the views, and from lengths, offsets and page numbers, each of
//    which the kernel clamps to these sizes. It computes no item beyond `items`, for which the
//    workspace has room, and one warp of a CTA decides for all how many items there are.
// 3. In a cluster a CTA reads the shared memory of others, of which there is one for each split of
//    a group.
// 4. `o` and `lse` are `ViewMut`. The workspace is used in turns, by kernels only. Whatever its
//    counters hold, they decide only which CTA combines parts and when: nobody waits for them, and
//    no address follows from them.
unsafe impl Launch for AttentionDecode {
    type Operands<'a> = AttentionDecodeOperands<'a>;
    type Plan = blockflash_attention_decode_params;
    type Params = blockflash_attention_decode_params;
    const FAMILY: &'static str = "attention over a cache";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionDecode(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(&self, plan: &Self::Plan, operands: &Self::Operands<'_>) -> Fit<i128> {
        let Self { types, head_dims, rows, .. } = *self;
        operands.fit_items(&DecodeTile { types, head_dims, rows, run: 1, is_even: false }, plan)
    }

    /// A CTA reads the shared memory of one for each split of a group.
    fn fewest_in_cluster(&self, p: &Self::Plan) -> u32 {
        let keys = p.cache.capacity.max(p.page_list_capacity.saturating_mul(p.cache.page_size));
        let division = [p.splits, p.chunk_min, p.chunk_max].map(i64::from);
        most_splits(keys.into(), division).min(16) as u32
    }

    fn params(&self, plan: &Self::Plan, operands: &Self::Operands<'_>) -> Result<Self::Params> {
        Ok(operands.params(plan))
    }

    fn set_counter(params: &mut Self::Params, counter: *mut u32) {
        params.tile_counter = counter;
    }
}

#[cfg(test)]
#[path = "attention_decode_tests.rs"]
mod tests;
