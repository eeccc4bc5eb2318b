use super::{BlockReduction, IndexRows, IndexScoresProblem, TopKProblem};
use crate::Result;
use crate::attention::{Align, check_strides, window_params};
use crate::check::{grid_x, persistent_grid, to_i32};
use crate::selection::{fits, select};
use blockflash_safe::{CudaProperties, IndexRowsPlan, IndexScoresPlan, LaunchConfig, TopKPlan};
use blockflash_sys::manifest::{IndexKernel, Variant};
use blockflash_sys::params::{
    BLOCKFLASH_INDEX_IDENTITY, BLOCKFLASH_INDEX_MAX, BLOCKFLASH_INDEX_MEAN, BLOCKFLASH_INDEX_RELU,
};
use blockflash_sys::{Kernel, params::blockflash_window};

/// Columns of products, queries times heads of one head of keys, for which a tile of keys is worth
/// loading, and for how many more are not worth fewer items.
const COLUMNS: [usize; 2] = [256, 1024];
/// Queries of an item.
const MOST_QUERIES: usize = 128;
/// Items for each CTA that runs at once, so that all end at about the same time.
const ITEMS_OF_CTA: usize = 4;
/// Shared memory that the system takes of each CTA.
const RESERVED: u32 = 1024;
/// Items that a launch counts, below the limit of 32 bits.
const MOST_ITEMS: usize = 1 << 30;
/// Columns of a row that a further CTA is worth, and of the shortest row that several share.
const COLUMNS_OF_PART: usize = 8192;
const SHARED_COLUMNS: usize = 100_000;
/// The fewest and the most CTAs of a row that several share.
const PARTS: [usize; 2] = [4, 64];

/// A launch of [`IndexScores`](super::IndexScores) as plain data.
#[derive(Clone, Copy, Debug)]
pub struct IndexScoresLaunch {
    /// What the tensors do not say.
    pub plan: IndexScoresPlan,
    /// Grid, block and shared memory.
    pub config: LaunchConfig,
}

/// A launch of [`TopK`](super::TopK) as plain data.
#[derive(Clone, Copy, Debug)]
pub struct TopKLaunch {
    /// What the tensors do not say.
    pub plan: TopKPlan,
    /// Grid, block and shared memory.
    pub config: LaunchConfig,
}

/// The rows for a launch.
fn rows(rows: &IndexRows) -> Result<IndexRowsPlan> {
    let window = window_params(&rows.mask.limits(rows.seqlen_q, rows.capacity));
    Ok(IndexRowsPlan {
        batch: to_i32("batch", rows.batch)?,
        seqlen_q: to_i32("seqlen_q", rows.seqlen_q)?,
        capacity: to_i32("capacity", rows.capacity)?,
        // Without limits it does not matter.
        window: blockflash_window { align_bottom_right: 1, ..window },
        granularity: to_i32("granularity", rows.granularity)?,
    })
}

/// Plans the launch of `kernel` for scores that it accepts on this GPU.
///
/// # Errors
/// [`Error::Misaligned`](crate::Error::Misaligned) for a stride that is not a multiple of 8
/// elements, [`Error::TooLarge`](crate::Error::TooLarge) for more tiles than 32 bits count,
/// [`Error::Unsupported`](crate::Error::Unsupported) if the kernel does not compute these scores.
pub fn plan_scores(
    kernel: &Kernel,
    problem: &IndexScoresProblem,
    gpu: &CudaProperties,
) -> Result<IndexScoresLaunch> {
    fits(kernel, problem, gpu)?;
    let (of, cache) = (&problem.rows, &problem.cache);
    check_strides(&[
        ("q", problem.q, [of.batch, of.seqlen_q, problem.num_heads]),
        ("cache.k", cache.k, [cache.pages, cache.page_size, cache.num_heads_kv]),
        ("cache.v", cache.v, [cache.pages, cache.page_size, cache.num_heads_kv]),
    ])?;
    let keys = match kernel.variant {
        Variant::Index(variant) => variant.keys().max(1) as usize,
        _ => 1,
    };
    let heads = problem.num_heads / cache.num_heads_kv.max(1);
    let outer = of.batch.saturating_mul(cache.num_heads_kv);
    let outer = outer.saturating_mul(of.capacity.div_ceil(keys));
    let items = |queries: usize| of.seqlen_q.div_ceil(queries).max(1).saturating_mul(outer);
    // One CTA fits everywhere, two where there is the shared memory.
    let room = (gpu.smem_per_multiprocessor / (kernel.smem_bytes() + RESERVED)).clamp(1, 2);
    let resident = (room * gpu.multiprocessors.max(1)) as usize;
    let mut queries = (COLUMNS[1] / heads.max(1)).clamp(1, MOST_QUERIES).next_power_of_two();
    while queries > 1
        && items(queries) < ITEMS_OF_CTA * resident
        && queries / 2 * heads >= COLUMNS[0]
    {
        queries /= 2;
    }
    // Wrong offsets could lead to as many.
    while items(queries) > MOST_ITEMS && queries < of.seqlen_q {
        queries *= 2;
    }
    let blocks = persistent_grid(items(queries), resident)?;
    let plan = IndexScoresPlan {
        rows: rows(of)?,
        reduction: match problem.reduction {
            BlockReduction::Max => BLOCKFLASH_INDEX_MAX,
            BlockReduction::Mean => BLOCKFLASH_INDEX_MEAN,
        },
        activation: if problem.relu { BLOCKFLASH_INDEX_RELU } else { BLOCKFLASH_INDEX_IDENTITY },
        scale: problem.scale,
        item_queries: to_i32("queries", queries)?,
        leaves_hidden: problem.leaves_hidden,
    };
    let waits = kernel.target.has_programmatic_launch();
    Ok(IndexScoresLaunch { plan, config: LaunchConfig::of(kernel, blocks, waits) })
}

/// Plans the launch of `kernel` for a choice that it accepts on this GPU.
///
/// # Errors
/// As [`plan_scores`].
pub fn plan_top_k(
    kernel: &Kernel,
    problem: &TopKProblem,
    gpu: &CudaProperties,
) -> Result<TopKLaunch> {
    fits(kernel, problem, gpu)?;
    let all = problem.lists();
    let (parts, of_cta) = match kernel.variant {
        Variant::Index(IndexKernel::TopKWarps { .. }) => (1, kernel.threads() as usize / 32),
        _ => (problem.parts(gpu), 1),
    };
    let blocks = grid_x(&[all.div_ceil(of_cta), parts])?;
    let [first, last] = problem.forced;
    let plan = TopKPlan {
        rows: rows(&problem.rows)?,
        forced: [to_i32("first", first)?, to_i32("last", last)?],
        parts: to_i32("parts", parts)?,
    };
    let waits = kernel.target.has_programmatic_launch();
    Ok(TopKLaunch { plan, config: LaunchConfig::of(kernel, blocks, waits) })
}

impl TopKProblem {
    /// Lists of all groups.
    pub(super) fn lists(&self) -> usize {
        self.groups.saturating_mul(self.rows.rows())
    }

    /// CTAs that share a row, of a kernel with CTAs for rows.
    fn parts(&self, gpu: &CudaProperties) -> usize {
        let blocks = self.rows.blocks();
        let parts = (gpu.multiprocessors as usize / self.lists().max(1))
            .min(blocks / COLUMNS_OF_PART)
            .min(PARTS[1]);
        if blocks < SHARED_COLUMNS || parts < PARTS[0] { 1 } else { parts }
    }

    /// Numbers of 32 bits, and words that count, of the workspace on a GPU, whatever kernel runs.
    pub(super) fn room(&self, gpu: &CudaProperties) -> Option<[usize; 2]> {
        let (all, parts) = (self.lists(), self.parts(gpu));
        if parts == 1 {
            return Some([0, 0]);
        }
        let of_part = self.k.checked_mul(2)?.checked_add(1)?;
        Some([all.checked_mul(parts)?.checked_mul(of_part)?, all])
    }

    /// The kernel, checked.
    pub(super) fn select(&self, gpu: &CudaProperties) -> Result<&'static Kernel> {
        select(self, gpu)
    }
}

/// Whether a mask is one that kernels take.
pub(super) fn is_aligned(rows: &IndexRows) -> bool {
    let limits = rows.mask.limits(rows.seqlen_q, rows.capacity);
    limits.is_unbounded() || limits.align == Align::BottomRight
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
