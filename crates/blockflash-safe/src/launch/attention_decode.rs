//! Attention over a cache.

use super::bsr_parts::BsrPartsMemory;
use super::checked::{Launch, Operands};
use super::fit::{Fit, ceil_div, fits, optional, pointer, pointer_mut, require};
use crate::view::Used;
use crate::{DType, Kernel, Result, View, ViewMut};
use blockflash_sys::manifest::{AttentionDecode, Variant};
use blockflash_sys::params::{blockflash_attention_decode_params, blockflash_kv_cache};
use std::f32::consts::LOG2_E;
use std::ptr::null_mut;

/// Keys and values of a cache, one page per sequence or pages that a table names.
#[derive(Clone, Copy, Debug)]
pub struct KvCacheViews<'a> {
    /// `[pages, page_size, num_heads_kv, head_dim]`.
    pub k: View<'a>,
    /// As `k`.
    pub v: View<'a>,
    /// i32 `[batch, columns]`; without it, page b belongs to sequence b. It may hold any values:
    /// kernels clamp them to the pages.
    pub block_table: Option<View<'a>>,
    /// i32 `[batch]`: keys of each sequence, clamped to the capacity.
    pub seqused: Option<View<'a>>,
}

impl<'a> KvCacheViews<'a> {
    pub(super) fn used(&self) -> [Option<Used<'a>>; 4] {
        let [table, seqused] =
            [&self.block_table, &self.seqused].map(|view| view.as_ref().map(View::used));
        [Some(self.k.used()), Some(self.v.used()), table, seqused]
    }

    /// Checks sizes and strides against the tensors.
    pub(super) fn fit(
        &self,
        c: &blockflash_kv_cache,
        dtype: DType,
        [batch, heads_kv, head_dim]: [i64; 3],
    ) -> Fit {
        let [pages, page_size, capacity] = [c.pages, c.page_size, c.capacity].map(i64::from);
        require(pages > 0 && page_size > 0 && capacity >= 0, "a size is not positive")?;
        let dims = |[page, slot, head]: [i64; 3]| {
            [(pages, page), (page_size, slot), (heads_kv, head), (head_dim, 1)]
        };
        let k = [c.k_stride_page, c.k_stride_slot, c.k_stride_head];
        let v = [c.v_stride_page, c.v_stride_slot, c.v_stride_head];
        fits("k", &self.k, dtype, dims(k))?;
        fits("v", &self.v, dtype, dims(v))?;
        let aligned = [k, v].as_flattened().iter().all(|stride| stride % 8 == 0)
            && [&self.k, &self.v].iter().all(|view| pointer(view).addr().is_multiple_of(16));
        require(aligned, "keys and values are not aligned to 16 bytes")?;
        // The kernel multiplies strides of slots, in bytes, as 32-bit numbers.
        require(k[1].max(v[1]) < 1 << 30, "slots lie too far apart")?;
        let columns = match &self.block_table {
            None => 1,
            Some(table) => {
                let columns = table.shape().get(1).map_or(0, |&columns| columns as i64);
                let dims = [(batch, c.block_table_stride), (columns, 1)];
                fits("block_table", table, DType::I32, dims)?;
                columns
            }
        };
        require(self.block_table.is_some() || pages >= batch, "a sequence has no page")?;
        require(capacity <= columns * page_size, "the capacity is larger than the table")?;
        // A step of 16 keys lies in one page.
        require(columns <= 1 || page_size % 16 == 0, "the page size is no multiple of 16")?;
        require(capacity <= 1 << 30, "the capacity is too large")?;
        self.seqused.as_ref().map_or(Ok(()), |x| fits("seqused", x, DType::I32, [(batch, 1)]))
    }

    pub(super) fn pointers(&self, c: &blockflash_kv_cache) -> blockflash_kv_cache {
        blockflash_kv_cache {
            k: pointer(&self.k),
            v: pointer(&self.v),
            block_table: optional(self.block_table.as_ref()).cast(),
            seqused: optional(self.seqused.as_ref()).cast(),
            ..*c
        }
    }
}

/// Tensors of attention over a cache. With `cu_seqlens_q` the queries are packed.
#[derive(Debug)]
pub struct AttentionDecodeOperands<'a> {
    /// `[batch, seqlen_q, num_heads_q, head_dim]`, packed `[total_q, num_heads_q, head_dim]`.
    /// `None` if `o` holds the queries.
    pub q: Option<View<'a>>,
    /// The keys and values.
    pub cache: KvCacheViews<'a>,
    /// As `q`.
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
    pub dtype: DType,
    /// The largest head dimension of the kernel.
    pub widest: u32,
    /// Sequences, heads of queries, heads of keys.
    pub batch_and_heads: [i32; 3],
    /// The longest sequence, rows when packed, head dimension.
    pub rows: [i32; 3],
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
        let [seqlen_q, total_q, head_dim] = s.rows.map(i64::from);
        let sizes = [batch, heads_q, heads_kv, seqlen_q, head_dim];
        require(sizes.iter().all(|&size| size > 0), "a size is not positive")?;
        require(heads_q % heads_kv == 0, "num_heads_q is not a multiple of num_heads_kv")?;
        let widest = i64::from(s.widest);
        require(head_dim % 8 == 0 && head_dim <= widest, "the head dimension does not fit")?;
        self.cache.fit(cache, s.dtype, [batch, heads_kv, head_dim])?;

        let packed = self.cu_seqlens_q.is_some();
        if let Some(cu_seqlens) = &self.cu_seqlens_q {
            fits("cu_seqlens_q", cu_seqlens, DType::I32, [(batch + 1, 1)])?;
        }
        let rows = |name, view: &View<'_>, [of_batch, seq, head]: [i64; 3]| {
            let aligned = seq % 8 == 0 && head % 8 == 0 && (packed || of_batch % 8 == 0);
            require(
                aligned && pointer(view).addr().is_multiple_of(16),
                "queries or output are not aligned to 16 bytes",
            )?;
            let [heads, inner] = [(heads_q, head), (head_dim, 1)];
            match packed {
                true => fits(name, view, s.dtype, [(total_q, seq), heads, inner]),
                false => {
                    let rows = [(batch, of_batch), (seqlen_q, seq), heads, inner];
                    fits(name, view, s.dtype, rows)
                }
            }
        };
        rows("q", &self.queries(), s.q)?;
        rows("o", &self.o.as_view(), s.o)?;
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
            dtype: tile.dtype,
            widest: tile.head_dim,
            batch_and_heads: [p.batch, p.num_heads_q, p.num_heads_kv],
            rows: [p.seqlen_q, p.total_q, p.head_dim],
            q: [p.q_stride_batch, p.q_stride_seq, p.q_stride_head],
            o: [p.o_stride_batch, p.o_stride_seq, p.o_stride_head],
            lse: [p.lse_stride_batch, p.lse_stride_head],
        };
        self.fit_queries(&queries, &p.cache)?;
        let [batch, heads_q, heads_kv] = [p.batch, p.num_heads_q, p.num_heads_kv].map(i64::from);
        let [total_q, head_dim] = [p.total_q, p.head_dim].map(i64::from);
        let packed = self.cu_seqlens_q.is_some();
        require(p.most_queries > 0, "no sequence has so few queries")?;
        let seqlen_q = i64::from(p.seqlen_q.min(p.most_queries));
        let listed = i64::from(p.page_list_capacity);
        require(listed >= 0 && (listed > 0) == self.pages.is_some(), "a list has no capacity")?;
        if let Some([list, count]) = &self.pages {
            let of_head = [(batch, heads_kv * listed), (heads_kv, listed), (listed, 1)];
            fits("pages", list, DType::I32, of_head)?;
            fits("page_count", count, DType::I32, [(batch, 1)])?;
            require(p.cache.capacity >= p.cache.page_size, "the table has no column")?;
        }

        let chunks = p.splits > 0 && p.splits <= 256 && p.chunk_min > 0 && p.chunk_min % 64 == 0;
        require(chunks && p.chunk_max >= p.chunk_min && p.chunk_max % 64 == 0, "no such splits")?;
        // The kernel multiplies them in 32 bits.
        require(p.chunk_max <= 1 << 20, "splits are too long")?;
        require((0..=4).contains(&p.run_log2), "a run is longer than a group of 16 splits")?;
        let group = heads_q / heads_kv;
        // The kernel divides by reciprocals, which is exact for quotients of 20 bits.
        require(seqlen_q * group < 1 << 20, "there are too many rows")?;
        require(batch < 1 << 20, "there are too many sequences")?;
        let of_sequences = i128::from(batch) * ceil_div(seqlen_q * group, tile.rows);
        let row_tiles = match packed {
            true => of_sequences.min(ceil_div(total_q * group, tile.rows) + i128::from(batch)),
            false => of_sequences,
        };
        let keys = match &self.pages {
            None => i64::from(p.cache.capacity),
            Some(_) => listed * i64::from(p.cache.page_size),
        };
        require(keys <= 1 << 30, "the lists name too many keys")?;
        let splits = most_splits(keys, [p.splits, p.chunk_min, p.chunk_max].map(i64::from));
        let heads = i128::from(heads_kv);
        let runs = ceil_div(splits, 1 << p.run_log2);
        // Lengths that do not ascend may ask for all of them.
        let most = (of_sequences * heads * runs) << p.run_log2;
        require(most <= i32::MAX.into(), "there are too many splits")?;
        let items = row_tiles * heads * ceil_div(runs as i64, tile.run);
        require(i128::from(p.items) == items, "another number of items")?;
        let rows = (seqlen_q * group).min(tile.rows.into());
        require(i64::from(p.partial_rows) == rows, "another number of rows")?;
        match &self.workspace {
            None => require(splits == 1, "the splits have no workspace")?,
            Some(memory) => {
                let slots = items << p.run_log2;
                let sums = slots * i128::from(rows * (head_dim + 2));
                let room = sums <= memory.sums() as i128 && slots <= memory.counters() as i128;
                require(splits == 1 || room, "the workspace is too small")?;
            }
        }
        Ok(items)
    }
}

/// What the checks know about a kernel.
pub(super) struct DecodeTile {
    pub dtype: DType,
    /// The largest head dimension.
    pub head_dim: u32,
    pub rows: u32,
    /// Splits of an item.
    pub run: u32,
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
        let logs = slots * p.partial_rows as usize * p.head_dim as usize;
        blockflash_attention_decode_params {
            q: pointer(&self.queries()),
            o: pointer_mut(&self.o),
            lse: optional(lse.as_ref()).cast_mut().cast(),
            sink: optional(self.sink.as_ref()).cast(),
            cu_seqlens_q: optional(self.cu_seqlens_q.as_ref()).cast(),
            cache: self.cache.pointers(&p.cache),
            group: p.num_heads_q / p.num_heads_kv,
            scale_log2: LOG2_E * if p.softcap > 0.0 { 1.0 } else { p.softmax_scale },
            scale_over_cap: if p.softcap > 0.0 { p.softmax_scale / p.softcap } else { 0.0 },
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
        let Self { dtype, head_dim, rows, .. } = *self;
        operands.fit_items(&DecodeTile { dtype, head_dim, rows, run: 1 }, plan)
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
