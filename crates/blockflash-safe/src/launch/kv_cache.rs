//! The cache of keys and values, as launches see it.

use super::attention_sizes::{row_sizes, row_strides};
use super::fit::{Fit, absent, fits, narrow, optional, pointer, require, rows_aligned, strides};
use crate::view::Used;
use crate::{DType, View};
use blockflash_sys::params::{blockflash_cache_scales, blockflash_kv_cache};

/// Keys and values of a cache, one page per sequence or pages that a table names.
#[derive(Clone, Copy, Debug)]
pub struct KvCacheViews<'a> {
    /// `[pages, page_size, num_heads_kv, head_dim_qk]`.
    pub k: View<'a>,
    /// As `k`, with `head_dim_v`.
    pub v: View<'a>,
    /// i32 `[batch, columns]`; without it, page b belongs to sequence b. It may hold any values:
    /// kernels clamp them to the pages.
    pub block_table: Option<View<'a>>,
    /// i32 `[batch]`: keys of each sequence, clamped to the capacity.
    pub seqused: Option<View<'a>>,
    /// What codes of `k` and `v` are multiplied with, f32 with any values; `None` is 1, and the
    /// only choice where k and v are no codes: `[1]`, `[batch or 1, num_heads_kv or 1]`, or
    /// `[pages or 1, page_size or 1, num_heads_kv or 1]`.
    pub scales: [Option<View<'a>>; 2],
}

impl<'a> KvCacheViews<'a> {
    pub(super) fn used(&self) -> [Option<Used<'a>>; 6] {
        let [k_scale, v_scale] = &self.scales;
        let [table, seqused, k_scale, v_scale] =
            [&self.block_table, &self.seqused, k_scale, v_scale]
                .map(|view| view.as_ref().map(View::used));
        [Some(self.k.used()), Some(self.v.used()), table, seqused, k_scale, v_scale]
    }

    /// Whether a sequence may have several pages.
    pub(super) fn has_pages(&self) -> bool {
        self.block_table.as_ref().is_some_and(|table| table.shape().get(1) > Some(&1))
    }

    /// Checks that there are no scales, for a kernel that reads none.
    pub(super) fn refuse_scales(&self) -> Fit {
        let [k, v] = self.scales;
        absent("k_scale or v_scale", k.or(v).is_some(), "the kernel reads no codes")
    }

    /// Checks the scales against this many sequences and the heads of a cache that was checked, and
    /// writes the argument.
    pub(super) fn fit_scales(
        &self,
        batch: i64,
        cache: &blockflash_kv_cache,
        params: &mut blockflash_cache_scales,
    ) -> Fit {
        let heads = self.k.shape().get(2).map_or(0, |&heads| heads as i64);
        let slots = [cache.pages, cache.page_size].map(i64::from);
        let [k, v] = &self.scales;
        if let Some(k) = k {
            let strides = scale_strides("k_scale", k, batch, slots, heads)?;
            [
                params.k_stride_sequence,
                params.k_stride_page,
                params.k_stride_slot,
                params.k_stride_head,
            ] = strides;
        }
        if let Some(v) = v {
            let strides = scale_strides("v_scale", v, batch, slots, heads)?;
            [
                params.v_stride_sequence,
                params.v_stride_page,
                params.v_stride_slot,
                params.v_stride_head,
            ] = strides;
        }
        params.k = optional(k.as_ref()).cast();
        params.v = optional(v.as_ref()).cast();
        Ok(())
    }

    /// Checks the views against each other and this many sequences, writes the argument, and
    /// returns the heads, and the columns of keys and of values.
    pub(super) fn fit(
        &self,
        dtype: DType,
        batch: i64,
        params: &mut blockflash_kv_cache,
    ) -> Fit<[i64; 3]> {
        let [pages, page_size, heads, head_dim_qk] = row_sizes("k", &self.k, false)?;
        let [.., head_dim_v] = row_sizes("v", &self.v, false)?;
        require(
            pages > 0 && page_size > 0,
            format_args!("{pages} pages of {page_size} slots: a size is not positive"),
        )?;
        let keys = [pages, page_size, heads, head_dim_qk];
        let k = row_strides("k", &self.k, dtype, false, keys)?;
        let v = row_strides("v", &self.v, dtype, false, [pages, page_size, heads, head_dim_v])?;
        let of_chunk = 16 / dtype.size() as i64;
        rows_aligned("k", &self.k, of_chunk, k)?;
        rows_aligned("v", &self.v, of_chunk, v)?;
        // The kernel multiplies strides of slots, in bytes, as 32-bit numbers.
        require(
            k[1].max(v[1]) < 1 << 30,
            format_args!(
                "slots of k and v are {} and {} elements apart, the limit is {}",
                k[1],
                v[1],
                1 << 30
            ),
        )?;
        let (mut columns, mut block_table_stride) = (1, 0);
        if let Some(table) = &self.block_table {
            columns = table.shape().get(1).map_or(0, |&columns| columns as i64);
            [block_table_stride, _] = strides("block_table", table, DType::I32, [batch, columns])?;
        }
        require(
            self.block_table.is_some() || pages >= batch,
            format_args!("k_cache has {pages} pages for a batch of {batch}"),
        )?;
        // A step of 16 keys is in one page.
        require(
            columns <= 1 || page_size % 16 == 0,
            format_args!("page_size is {page_size}, expected a multiple of 16"),
        )?;
        let capacity = columns.saturating_mul(page_size);
        require(
            capacity <= 1 << 30,
            format_args!("the capacity is {capacity}, the limit is {}", 1 << 30),
        )?;
        let seqused = self.seqused.as_ref();
        seqused.map_or(Ok(()), |x| fits("seqused", x, DType::I32, [(batch, 1)]))?;
        *params = blockflash_kv_cache {
            k: pointer(&self.k),
            v: pointer(&self.v),
            block_table: optional(self.block_table.as_ref()).cast(),
            seqused: optional(seqused).cast(),
            k_stride_page: k[0],
            k_stride_slot: k[1],
            k_stride_head: k[2],
            v_stride_page: v[0],
            v_stride_slot: v[1],
            v_stride_head: v[2],
            block_table_stride,
            pages: narrow("pages", pages)?,
            page_size: narrow("page_size", page_size)?,
            capacity: narrow("capacity", capacity)?,
        };
        Ok([heads, head_dim_qk, head_dim_v])
    }
}

/// The strides of scales along sequences, pages, slots and heads, 0 where all have the same one.
fn scale_strides(
    name: &str,
    view: &View<'_>,
    batch: i64,
    [pages, page_size]: [i64; 2],
    heads: i64,
) -> Fit<[i64; 4]> {
    let stride = |dim: usize, size: i64| match view.shape()[dim] {
        1 => Some(0),
        found => (found as i64 == size).then(|| view.strides()[dim] as i64),
    };
    let found = match view.shape().len() {
        _ if view.dtype() != DType::F32 => None,
        1 => stride(0, 1).map(|_| [0; 4]),
        2 => stride(0, batch).zip(stride(1, heads)).map(|(sequence, head)| [sequence, 0, 0, head]),
        3 => stride(0, pages)
            .zip(stride(1, page_size))
            .zip(stride(2, heads))
            .map(|((page, slot), head)| [0, page, slot, head]),
        _ => None,
    };
    found.ok_or_else(|| {
        format!(
            "{name} is {} {:?}, expected f32 [1], [{batch} or 1, {heads} or 1] or [{pages} or 1, \
             {page_size} or 1, {heads} or 1]",
            view.dtype(),
            view.shape()
        )
    })
}
