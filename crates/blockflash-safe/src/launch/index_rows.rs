//! The queries of a batch and the keys that each of them sees, as launches of the kernels for
//! scores of blocks and for the choice among them see them.

use super::fit::{Fit, absent, fits, narrow, optional, require};
use super::kv_cache::KvCacheViews;
use crate::{DType, View};
use blockflash_sys::params::{blockflash_index_rows, blockflash_window};

/// The longest sequence.
pub(super) const MOST_KEYS: i64 = 1 << 30;

/// What launches know about rows beside their tensors.
#[derive(Clone, Copy, Debug)]
pub struct IndexRowsPlan {
    /// Sequences.
    pub batch: i32,
    /// Queries of each sequence; of the longest one when packed.
    pub seqlen_q: i32,
    /// The most keys of a sequence: of packed ones, or where no cache tells it.
    pub capacity: i32,
    /// The keys that a query sees.
    pub window: blockflash_window,
    /// Tokens of a block.
    pub granularity: i32,
}

/// Offsets with any values: kernels clamp them.
#[derive(Clone, Copy, Debug)]
pub struct IndexOffsets<'a> {
    /// i32 `[batch + 1]`: of packed queries.
    pub q: Option<View<'a>>,
    /// i32 `[batch + 1]`: of packed keys.
    pub kv: Option<View<'a>>,
}

impl IndexRowsPlan {
    /// Checks this many rows and the offsets, and writes everything but the cache.
    pub(super) fn fit(
        &self,
        rows: i64,
        offsets: &IndexOffsets<'_>,
        params: &mut blockflash_index_rows,
    ) -> Fit {
        let [batch, seqlen_q] = [self.batch, self.seqlen_q].map(i64::from);
        require(
            batch > 0 && seqlen_q >= 0,
            format_args!("{batch} sequences of {seqlen_q} queries: a size is not positive"),
        )?;
        require(
            offsets.q.is_some() || batch * seqlen_q == rows,
            format_args!("{rows} rows, expected {batch} sequences of {seqlen_q} queries"),
        )?;
        for (name, view) in [("cu_seqlens_q", &offsets.q), ("cu_seqlens_kv", &offsets.kv)] {
            view.as_ref().map_or(Ok(()), |x| fits(name, x, DType::I32, [(batch + 1, 1)]))?;
        }
        require(
            [1, 4, 16, 64, 128].contains(&self.granularity),
            format_args!("blocks of {} tokens, expected 1, 4, 16, 64 or 128", self.granularity),
        )?;
        let window = self.window;
        require(
            window.left >= 0 && window.right >= 0 && window.align_bottom_right == 1,
            format_args!(
                "the window is {window:?}, expected sides from 0 on, aligned bottom-right"
            ),
        )?;
        *params = blockflash_index_rows {
            cu_seqlens_q: optional(offsets.q.as_ref()).cast(),
            cu_seqlens_kv: optional(offsets.kv.as_ref()).cast(),
            cache: params.cache,
            batch: self.batch,
            seqlen_q: self.seqlen_q,
            rows: narrow("rows", rows)?,
            window,
        };
        Ok(())
    }

    /// Checks the keys, writes the cache, and returns their heads and columns.
    pub(super) fn fit_keys(
        &self,
        dtype: DType,
        cache: &KvCacheViews<'_>,
        packed: bool,
        params: &mut blockflash_index_rows,
    ) -> Fit<[i64; 2]> {
        cache.refuse_scales()?;
        let of = &mut params.cache;
        // Nobody reads values.
        let batch = if packed { 1 } else { self.batch.into() };
        let [heads, head_dim, _] = cache.fit(dtype, batch, of)?;
        if packed {
            let given = cache.block_table.is_some() || cache.seqused.is_some();
            absent("block_table or seqused", given, "offsets tell where packed keys are")?;
            require(
                of.pages == 1 && self.capacity > 0,
                format_args!("{} pages and {} keys, expected 1 and some", of.pages, self.capacity),
            )?;
            of.capacity = self.capacity.min(of.page_size);
        }
        Ok([heads, head_dim])
    }

    /// Blocks of this many keys.
    pub(super) fn blocks(&self, capacity: i32) -> i64 {
        let granularity = i64::from(self.granularity);
        (i64::from(capacity) + granularity - 1) / granularity
    }
}
