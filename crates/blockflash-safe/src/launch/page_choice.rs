//! The choice of the pages of a cache, from summaries of their keys.

use super::attention_sizes::{row_sizes, row_strides};
use super::bsr_parts::BsrPartsMemory;
use super::checked::{Launch, Operands};
use super::fit::{Fit, fits, narrow, optional, pointer, require, rows_aligned, steps};
use super::kv_cache::KvCacheViews;
use crate::view::Used;
use crate::{DType, Kernel, View, ViewMut};
use blockflash_sys::manifest::{PageKernel, Variant};
use blockflash_sys::params::{
    blockflash_kv_cache, blockflash_page_choice_params, blockflash_page_summaries,
    blockflash_page_summaries_params,
};

/// The widest head.
const MAX_HEAD_DIM: i64 = 256;

/// Tensors of summaries of pages.
#[derive(Debug)]
pub struct PageSummariesOperands<'a> {
    /// The cache; values are not read.
    pub cache: KvCacheViews<'a>,
    /// `[pages, 1 or 2, num_heads_kv, head_dim]`.
    pub summaries: ViewMut<'a>,
}

/// Tensors of a choice of pages. With `cu_seqlens_q` the queries are packed.
#[derive(Debug)]
pub struct PageChoiceOperands<'a> {
    /// `[batch, seqlen_q, num_heads_q, head_dim]`, packed `[total_q, num_heads_q, head_dim]`.
    pub q: View<'a>,
    /// i32 `[batch + 1]`, with any values: kernels clamp them.
    pub cu_seqlens_q: Option<View<'a>>,
    /// The cache; keys and values are not read.
    pub cache: KvCacheViews<'a>,
    /// `[pages, 1 or 2, num_heads_kv, head_dim]`.
    pub summaries: View<'a>,
    /// i32 `[batch, num_heads_kv, capacity]`, contiguous.
    pub lists: ViewMut<'a>,
    /// i32 `[batch]`.
    pub counts: ViewMut<'a>,
    /// A score for each page of each sequence and head of keys, and a word for each head.
    pub workspace: &'a BsrPartsMemory,
}

impl Operands for PageSummariesOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let [k, v, table, seqused, ..] = self.cache.used();
        [k, v, table, seqused, Some(self.summaries.used())]
    }
}

impl Operands for PageChoiceOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let [k, v, table, seqused, ..] = self.cache.used();
        let [lists, counts] = [&self.lists, &self.counts].map(|view| Some(view.used()));
        let [q, summaries] = [&self.q, &self.summaries].map(|view| Some(view.used()));
        let workspace = Some(self.workspace.used());
        [
            q,
            self.cu_seqlens_q.as_ref().map(View::used),
            k,
            v,
            table,
            seqused,
            summaries,
            lists,
            counts,
            workspace,
        ]
    }
}

/// A kernel that summarises pages.
#[derive(Clone, Copy, Debug)]
pub struct PageSummaries {
    dtype: DType,
}

/// A kernel that chooses pages.
#[derive(Clone, Copy, Debug)]
pub struct PageChoice {
    dtype: DType,
}

/// What a launch of summaries of pages knows beside its tensors.
#[derive(Clone, Copy, Debug)]
pub struct PageSummariesPlan {
    /// The last tokens of each sequence, whose pages are summarised.
    pub tokens: i32,
    /// The most pages that hold such tokens of a sequence.
    pub most_pages: i32,
}

/// What a launch of a choice of pages knows beside its tensors.
#[derive(Clone, Copy, Debug)]
pub struct PageChoicePlan {
    /// Queries of the longest sequence in a packed batch; ignored otherwise.
    pub longest: i32,
    /// CTAs that share the pages of a sequence and head of keys.
    pub parts: i32,
}

/// Checks a cache and its summaries against each other, writes their arguments, and returns the
/// heads and the columns of keys.
fn fit_pages(
    views: &KvCacheViews<'_>,
    rows: &View<'_>,
    dtype: DType,
    batch: i64,
    (cache, summaries): (&mut blockflash_kv_cache, &mut blockflash_page_summaries),
) -> Fit<[i64; 2]> {
    // Nobody reads values, whatever columns they have.
    let [heads_kv, head_dim, _] = views.fit(dtype, batch, cache)?;
    let sizes = [batch, heads_kv, head_dim];
    require(
        sizes.iter().all(|&size| size > 0),
        format_args!("batch, heads of k and head_dim are {sizes:?}: a size is not positive"),
    )?;
    require(
        head_dim % 8 == 0 && head_dim <= MAX_HEAD_DIM,
        format_args!("head_dim is {head_dim}, expected a multiple of 8 up to {MAX_HEAD_DIM}"),
    )?;
    require(
        cache.capacity > 0,
        format_args!("the capacity of the cache is {}, expected at least 1", cache.capacity),
    )?;
    let [_, statistics, ..] = row_sizes("summaries", rows, false)?;
    require(
        (1..=2).contains(&statistics),
        format_args!("summaries have {statistics} statistics, expected 1 or 2"),
    )?;
    let sizes = [cache.pages.into(), statistics, heads_kv, head_dim];
    let strides = row_strides("summaries", rows, dtype, false, sizes)?;
    let dims = [0, 1, 2].map(|dim| (sizes[dim], strides[dim]));
    rows_aligned("summaries", rows, 8, steps(&dims))?;
    *summaries = blockflash_page_summaries {
        rows: pointer(rows).cast_mut(),
        stride_page: strides[0],
        stride_statistic: strides[1],
        stride_head: strides[2],
        statistics: statistics as i32,
    };
    Ok([heads_kv, head_dim])
}

// SAFETY:
// 1. This is the parameter struct of the kernels that summarise pages.
// 2. All pointers come from views. Addresses follow from the sizes and strides in the struct, which
//    `fit` wrote from the views, and from lengths and page numbers, each of which one thread of a
//    CTA reads and clamps to these sizes.
// 3. The summaries are a `ViewMut`.
unsafe impl Launch for PageSummaries {
    type Operands<'a> = PageSummariesOperands<'a>;
    type Plan = PageSummariesPlan;
    type Params = blockflash_page_summaries_params;
    const FAMILY: &'static str = "summaries of pages";

    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel.variant {
            Variant::PageChoice(PageKernel::Summaries { dtype, .. }) => Some(Self { dtype }),
            _ => None,
        }
    }

    fn fit(
        &self,
        p: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let cache = &operands.cache;
        let batch = cache.block_table.as_ref().unwrap_or(&cache.k).shape().first();
        let batch = batch.map_or(0, |&batch| batch as i64);
        let written = (&mut params.cache, &mut params.summaries);
        let [heads_kv, head_dim] =
            fit_pages(cache, &operands.summaries.as_view(), self.dtype, batch, written)?;
        require(
            p.tokens > 0 && p.most_pages > 0,
            format_args!("{} tokens and {} pages, expected at least 1", p.tokens, p.most_pages),
        )?;
        let blocks = i128::from(batch) * i128::from(heads_kv) * i128::from(p.most_pages);
        // The kernel counts in 32 bits.
        require(
            blocks <= i32::MAX.into(),
            format_args!("{blocks} blocks, the limit is {}", i32::MAX),
        )?;
        *params = blockflash_page_summaries_params {
            cache: params.cache,
            summaries: params.summaries,
            batch: narrow("batch", batch)?,
            num_heads_kv: narrow("num_heads_kv", heads_kv)?,
            head_dim: narrow("head_dim", head_dim)?,
            tokens: p.tokens,
            most_pages: p.most_pages,
        };
        Ok(blocks)
    }
}

// SAFETY:
// 1. This is the parameter struct of the kernels that choose pages.
// 2. As for summaries; offsets of packed queries are clamped, too. Lists are written below their
//    capacity only, whatever scores the workspace holds.
// 3. Lists and counts are `ViewMut`. The workspace is used in turns, by kernels only. Whatever its
//    counters hold, they decide only which CTA chooses and when: nobody waits for them, and no
//    address follows from them.
unsafe impl Launch for PageChoice {
    type Operands<'a> = PageChoiceOperands<'a>;
    type Plan = PageChoicePlan;
    type Params = blockflash_page_choice_params;
    const FAMILY: &'static str = "choice of pages";

    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel.variant {
            Variant::PageChoice(PageKernel::Choice { dtype, .. }) => Some(Self { dtype }),
            _ => None,
        }
    }

    fn fit(
        &self,
        p: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let PageChoiceOperands { q, cu_seqlens_q, lists, counts, workspace, .. } = operands;
        let (lists, counts) = (lists.as_view(), counts.as_view());
        let batch = lists.shape().first().map_or(0, |&batch| batch as i64);
        let written = (&mut params.cache, &mut params.summaries);
        let [heads_kv, head_dim] =
            fit_pages(&operands.cache, &operands.summaries, self.dtype, batch, written)?;

        let packed = cu_seqlens_q.is_some();
        let [_, rows, heads_q, _] = row_sizes("q", q, packed)?;
        require(
            heads_q % heads_kv == 0,
            format_args!("q has {heads_q} heads, not a multiple of the {heads_kv} of k"),
        )?;
        let (mut seqlen_q, mut total_q) = (rows, 0);
        if let Some(cu_seqlens) = cu_seqlens_q {
            fits("cu_seqlens_q", cu_seqlens, DType::I32, [(batch + 1, 1)])?;
            (seqlen_q, total_q) = (p.longest.into(), rows);
        }
        require(seqlen_q >= 0, format_args!("seqlen_q is {seqlen_q}: a size is negative"))?;
        let of_q = row_strides("q", q, self.dtype, packed, [batch, rows, heads_q, head_dim])?;
        if !q.layout().is_empty() {
            let dims = [(batch, of_q[0]), (rows, of_q[1]), (heads_q, of_q[2])];
            rows_aligned("q", q, 8, steps(&dims))?;
        }

        let listed = lists.shape().last().map_or(0, |&listed| listed as i64);
        require(listed >= 2, format_args!("lists have room for {listed} pages, expected 2"))?;
        let of_head = [(batch, heads_kv * listed), (heads_kv, listed), (listed, 1)];
        fits("lists", &lists, DType::I32, of_head)?;
        fits("counts", &counts, DType::I32, [(batch, 1)])?;

        let [capacity, page_size] = [params.cache.capacity, params.cache.page_size].map(i64::from);
        let max_pages = (capacity + page_size - 1) / page_size;
        let groups = i128::from(batch) * i128::from(heads_kv);
        let room = groups * i128::from(max_pages) <= workspace.sums() as i128
            && groups <= workspace.counters() as i128;
        require(
            room,
            format_args!(
                "the workspace has {} sums and {} counters for {groups} lists of {max_pages} pages",
                workspace.sums(),
                workspace.counters()
            ),
        )?;
        // The kernel multiplies them by the pages that a CTA scores at once, as 32-bit numbers.
        require(
            p.parts > 0 && p.parts <= 1 << 20,
            format_args!("{} parts, expected 1 to {}", p.parts, 1 << 20),
        )?;
        *params = blockflash_page_choice_params {
            q: pointer(q),
            cu_seqlens_q: optional(cu_seqlens_q.as_ref()).cast(),
            cache: params.cache,
            summaries: params.summaries,
            scores: workspace.sums_pointer(),
            arrivals: workspace.counters_pointer(),
            lists: pointer(&lists).cast_mut().cast(),
            counts: pointer(&counts).cast_mut().cast(),
            q_stride_batch: of_q[0],
            q_stride_seq: of_q[1],
            q_stride_head: of_q[2],
            batch: narrow("batch", batch)?,
            num_heads_kv: narrow("num_heads_kv", heads_kv)?,
            group: narrow("group", heads_q / heads_kv)?,
            seqlen_q: narrow("seqlen_q", seqlen_q)?,
            total_q: narrow("total_q", total_q)?,
            head_dim: narrow("head_dim", head_dim)?,
            list_capacity: narrow("lists", listed)?,
            max_pages: narrow("pages", max_pages)?,
            parts: p.parts,
        };
        Ok(groups * i128::from(p.parts))
    }
}
