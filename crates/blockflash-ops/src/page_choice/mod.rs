//! Chooses the pages of a cache that queries visit, by what is kept of the keys of each page.

mod choose;
mod cpu;
mod plan;
mod select;
mod steps;
mod summarize;

pub use choose::{ChoosePages, ChoosePagesProblem};
pub use plan::{ChoosePagesPlan, SummarizePagesPlan, plan_choice, plan_summaries};
pub use summarize::{SummarizePages, SummarizePagesProblem};

pub(crate) use select::{support_of_choice, support_of_summaries};

use crate::check::Operand;
use crate::kv_cache::{CacheSizes, FLOATS, KvCache};
use crate::operation::Prepared;
use crate::{Error, Result};
use blockflash_safe::KvCacheViews;
use blockflash_sys::HeadDims;

/// See [`Operation::prepare`](crate::Operation::prepare).
pub type PreparedSummarizePages = Prepared<SummarizePagesProblem>;

/// See [`Operation::prepare`](crate::Operation::prepare).
pub type PreparedChoosePages = Prepared<ChoosePagesProblem>;

/// The tensors of a cache, for a launch.
fn views<'a>(cache: &KvCache<'a>) -> KvCacheViews<'a> {
    let KvCache { k, v, block_table, seqused_kv: seqused, .. } = *cache;
    KvCacheViews { k, v, block_table, seqused, scales: [None; 2] }
}

/// Summaries of pages reduced to plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SummarySizes {
    /// The cache, which has pages.
    pub cache: CacheSizes,
    /// Rows for each page and head of keys: 1 for their mean, 2 for their minimum and maximum.
    pub statistics: usize,
    /// Strides between pages, statistics and heads.
    pub strides: [usize; 3],
}

impl SummarySizes {
    /// The sizes of summaries `[pages, 1 or 2, num_heads_kv, head_dim]` in the element type of a
    /// cache with pages, checked.
    fn of(cache: &KvCache<'_>, summaries: &Operand<'_>) -> Result<Self> {
        Operand::new("cache.k", &cache.k).dtype_in(&FLOATS)?;
        let cache = cache.sizes()?;
        if cache.table.is_none() {
            let expected = "a cache with a block table".into();
            let found = summaries.shape.to_vec();
            return Err(Error::Shape { what: summaries.what, expected, found });
        }
        summaries.dtype_in(&[cache.dtype])?;
        let CacheSizes { pages, num_heads_kv, head_dims: HeadDims { qk: head_dim, .. }, .. } =
            cache;
        let &[_, statistics @ 1..=2, _, _] = summaries.shape else {
            let expected = format!("[{pages}, 1 or 2, {num_heads_kv}, {head_dim}]");
            return Err(summaries.wrong_shape(expected));
        };
        summaries.shape_is(&[pages, statistics, num_heads_kv, head_dim])?;
        summaries.last_dim_contiguous()?;
        let strides = [summaries.strides[0], summaries.strides[1], summaries.strides[2]];
        Ok(Self { cache, statistics, strides })
    }

    /// Start of a row.
    fn row(&self, [page, statistic, head]: [usize; 3]) -> usize {
        let [of_page, of_statistic, of_head] = self.strides;
        page * of_page + statistic * of_statistic + head * of_head
    }
}

#[cfg(test)]
mod tests;
