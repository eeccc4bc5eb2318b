//! The choice of the pages of a cache, from summaries of their keys.

use super::bsr_parts::BsrPartsMemory;
use super::checked::{Launch, Operands};
use super::fit::{Fit, fits, optional, pointer, pointer_mut, require, rows_aligned, steps};
use super::kv_cache::KvCacheViews;
use crate::view::Used;
use crate::{DType, Kernel, Result, View, ViewMut};
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
        let [k, v, table, seqused] = self.cache.used();
        [k, v, table, seqused, Some(self.summaries.used())]
    }
}

impl Operands for PageChoiceOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let [k, v, table, seqused] = self.cache.used();
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

/// Checks cache and summaries.
fn pages_fit(
    (cache, views): (&blockflash_kv_cache, &KvCacheViews<'_>),
    (summaries, rows): (&blockflash_page_summaries, &View<'_>),
    dtype: DType,
    sizes: [i64; 3],
) -> Fit {
    let [batch, heads_kv, head_dim] = sizes;
    require(
        sizes.iter().all(|&size| size > 0),
        format_args!("batch, heads of k and head_dim are {sizes:?}: a size is not positive"),
    )?;
    require(
        head_dim % 8 == 0 && head_dim <= MAX_HEAD_DIM,
        format_args!("head_dim is {head_dim}, expected a multiple of 8 up to {MAX_HEAD_DIM}"),
    )?;
    // Nobody reads values, whatever columns they have.
    let columns_v = views.v.shape().last().map_or(0, |&columns| columns as i64);
    views.fit(cache, dtype, [batch, heads_kv], [head_dim, columns_v])?;
    require(
        cache.capacity > 0,
        format_args!("the capacity of the cache is {}, expected at least 1", cache.capacity),
    )?;
    let statistics = i64::from(summaries.statistics);
    require(
        (1..=2).contains(&statistics),
        format_args!("summaries have {statistics} statistics, expected 1 or 2"),
    )?;
    let dims = [
        (i64::from(cache.pages), summaries.stride_page),
        (statistics, summaries.stride_statistic),
        (heads_kv, summaries.stride_head),
        (head_dim, 1),
    ];
    fits("summaries", rows, dtype, dims)?;
    rows_aligned("summaries", rows, 8, steps(&dims[..3]))
}

// SAFETY:
// 1. This is the parameter struct of the kernels that summarise pages.
// 2. All pointers come from views. Addresses follow from the sizes and strides in the struct, which
//    `fit` found to be those of the views, and from lengths and page numbers, each of which one
//    thread of a CTA reads and clamps to these sizes.
// 3. The summaries are a `ViewMut`.
unsafe impl Launch for PageSummaries {
    type Operands<'a> = PageSummariesOperands<'a>;
    type Plan = blockflash_page_summaries_params;
    type Params = blockflash_page_summaries_params;
    const FAMILY: &'static str = "summaries of pages";

    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel.variant {
            Variant::PageChoice(PageKernel::Summaries { dtype, .. }) => Some(Self { dtype }),
            _ => None,
        }
    }

    fn fit(&self, p: &Self::Plan, operands: &Self::Operands<'_>) -> Fit<i128> {
        let sizes = [p.batch, p.num_heads_kv, p.head_dim].map(i64::from);
        let rows = operands.summaries.as_view();
        pages_fit((&p.cache, &operands.cache), (&p.summaries, &rows), self.dtype, sizes)?;
        require(
            p.tokens > 0 && p.most_pages > 0,
            format_args!("{} tokens and {} pages, expected at least 1", p.tokens, p.most_pages),
        )?;
        let [batch, heads, pages] = [p.batch, p.num_heads_kv, p.most_pages].map(i128::from);
        let blocks = batch * heads * pages;
        // The kernel counts in 32 bits.
        require(
            blocks <= i32::MAX.into(),
            format_args!("{blocks} blocks, the limit is {}", i32::MAX),
        )?;
        Ok(blocks)
    }

    fn params(&self, p: &Self::Plan, operands: &Self::Operands<'_>) -> Result<Self::Params> {
        let rows = pointer_mut(&operands.summaries);
        Ok(blockflash_page_summaries_params {
            cache: operands.cache.pointers(&p.cache),
            summaries: blockflash_page_summaries { rows, ..p.summaries },
            ..*p
        })
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
    type Plan = blockflash_page_choice_params;
    type Params = blockflash_page_choice_params;
    const FAMILY: &'static str = "choice of pages";

    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel.variant {
            Variant::PageChoice(PageKernel::Choice { dtype, .. }) => Some(Self { dtype }),
            _ => None,
        }
    }

    fn fit(&self, p: &Self::Plan, operands: &Self::Operands<'_>) -> Fit<i128> {
        let sizes = [p.batch, p.num_heads_kv, p.head_dim].map(i64::from);
        let [batch, heads_kv, head_dim] = sizes;
        let rows = &operands.summaries;
        pages_fit((&p.cache, &operands.cache), (&p.summaries, rows), self.dtype, sizes)?;

        require(
            p.group >= 0 && p.seqlen_q >= 0 && p.total_q >= 0,
            format_args!(
                "group, seqlen_q and total_q are {}, {} and {}: a size is negative",
                p.group, p.seqlen_q, p.total_q
            ),
        )?;
        let heads = (heads_kv * i64::from(p.group), p.q_stride_head);
        let tokens = |count: i32| (i64::from(count), p.q_stride_seq);
        let inner = (head_dim, 1);
        let aligned = |dims| match operands.q.layout().is_empty() {
            true => Ok(()),
            false => rows_aligned("q", &operands.q, 8, steps(dims)),
        };
        match &operands.cu_seqlens_q {
            Some(cu_seqlens) => {
                fits("cu_seqlens_q", cu_seqlens, DType::I32, [(batch + 1, 1)])?;
                let dims = [tokens(p.total_q), heads, inner];
                fits("q", &operands.q, self.dtype, dims)?;
                aligned(&dims[..2])?;
            }
            None => {
                let dims = [(batch, p.q_stride_batch), tokens(p.seqlen_q), heads, inner];
                fits("q", &operands.q, self.dtype, dims)?;
                aligned(&dims[..3])?;
            }
        }

        let listed = i64::from(p.list_capacity);
        require(listed >= 2, format_args!("list_capacity is {listed}, expected at least 2"))?;
        let of_head = [(batch, heads_kv * listed), (heads_kv, listed), (listed, 1)];
        fits("lists", &operands.lists.as_view(), DType::I32, of_head)?;
        fits("counts", &operands.counts.as_view(), DType::I32, [(batch, 1)])?;

        let [capacity, page_size, max_pages] =
            [p.cache.capacity, p.cache.page_size, p.max_pages].map(i64::from);
        let columns = (capacity + page_size - 1) / page_size;
        require(
            max_pages == columns,
            format_args!("max_pages is {max_pages}, expected {columns}"),
        )?;
        let groups = i128::from(batch) * i128::from(heads_kv);
        let room = groups * i128::from(max_pages) <= operands.workspace.sums() as i128
            && groups <= operands.workspace.counters() as i128;
        require(
            room,
            format_args!(
                "the workspace has {} sums and {} counters for {groups} lists of {max_pages} pages",
                operands.workspace.sums(),
                operands.workspace.counters()
            ),
        )?;
        // The kernel multiplies them by the pages that a CTA scores at once, as 32-bit numbers.
        require(
            p.parts > 0 && p.parts <= 1 << 20,
            format_args!("{} parts, expected 1 to {}", p.parts, 1 << 20),
        )?;
        Ok(groups * i128::from(p.parts))
    }

    fn params(&self, p: &Self::Plan, operands: &Self::Operands<'_>) -> Result<Self::Params> {
        let rows = pointer(&operands.summaries).cast_mut();
        Ok(blockflash_page_choice_params {
            q: pointer(&operands.q),
            cu_seqlens_q: optional(operands.cu_seqlens_q.as_ref()).cast(),
            cache: operands.cache.pointers(&p.cache),
            summaries: blockflash_page_summaries { rows, ..p.summaries },
            scores: operands.workspace.sums_pointer(),
            arrivals: operands.workspace.counters_pointer(),
            lists: pointer_mut(&operands.lists).cast(),
            counts: pointer_mut(&operands.counts).cast(),
            ..*p
        })
    }
}
