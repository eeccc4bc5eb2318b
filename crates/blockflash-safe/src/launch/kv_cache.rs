//! The cache of keys and values, as launches see it.

use super::attention_sizes::{row_sizes, row_strides};
use super::fit::{Fit, fits, narrow, optional, pointer, require, rows_aligned, strides};
use crate::view::Used;
use crate::{DType, View};
use blockflash_sys::params::blockflash_kv_cache;

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
}

impl<'a> KvCacheViews<'a> {
    pub(super) fn used(&self) -> [Option<Used<'a>>; 4] {
        let [table, seqused] =
            [&self.block_table, &self.seqused].map(|view| view.as_ref().map(View::used));
        [Some(self.k.used()), Some(self.v.used()), table, seqused]
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
        rows_aligned("k", &self.k, 8, k)?;
        rows_aligned("v", &self.v, 8, v)?;
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
