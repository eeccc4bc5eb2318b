//! The cache of keys and values, as launches see it.

use super::fit::{Fit, fits, optional, pointer, require, rows_aligned};
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

    /// Checks sizes and strides against the tensors.
    pub(super) fn fit(
        &self,
        c: &blockflash_kv_cache,
        dtype: DType,
        [batch, heads_kv]: [i64; 2],
        [head_dim_qk, head_dim_v]: [i64; 2],
    ) -> Fit {
        let [pages, page_size, capacity] = [c.pages, c.page_size, c.capacity].map(i64::from);
        require(
            pages > 0 && page_size > 0 && capacity >= 0,
            format_args!(
                "{pages} pages of {page_size} slots and a capacity of {capacity}: a size is not \
                 positive"
            ),
        )?;
        let dims = |columns, [page, slot, head]: [i64; 3]| {
            [(pages, page), (page_size, slot), (heads_kv, head), (columns, 1)]
        };
        let k = [c.k_stride_page, c.k_stride_slot, c.k_stride_head];
        let v = [c.v_stride_page, c.v_stride_slot, c.v_stride_head];
        fits("k", &self.k, dtype, dims(head_dim_qk, k))?;
        fits("v", &self.v, dtype, dims(head_dim_v, v))?;
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
        let columns = match &self.block_table {
            None => 1,
            Some(table) => {
                let columns = table.shape().get(1).map_or(0, |&columns| columns as i64);
                let dims = [(batch, c.block_table_stride), (columns, 1)];
                fits("block_table", table, DType::I32, dims)?;
                columns
            }
        };
        require(
            self.block_table.is_some() || pages >= batch,
            format_args!("k_cache has {pages} pages for a batch of {batch}"),
        )?;
        require(
            capacity <= columns * page_size,
            format_args!(
                "the capacity is {capacity}, and the table has {columns} pages of {page_size}"
            ),
        )?;
        // A step of 16 keys is in one page.
        require(
            columns <= 1 || page_size % 16 == 0,
            format_args!("page_size is {page_size}, expected a multiple of 16"),
        )?;
        require(
            capacity <= 1 << 30,
            format_args!("the capacity is {capacity}, the limit is {}", 1 << 30),
        )?;
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
