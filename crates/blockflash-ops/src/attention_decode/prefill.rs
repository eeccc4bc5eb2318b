//! Many rows, as in the prefill of a cache or where many heads share keys: they have kernels with
//! the tiles of attention forward.

use super::AttentionDecodeProblem;
use super::many::{Packs, splits};
use super::select::others;
use super::tile::CacheTile;
use crate::attention::{AttentionProblem, heads_per_section, score_params};
use crate::check::{grid_of, grid_x, to_i32};
use crate::selection::{fits, tile_of, unsupported};
use crate::{Error, Result};
use blockflash_safe::{AttentionCachePlan, AttentionCombineOperands, CudaProperties, LaunchConfig};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::Variant;
use std::sync::LazyLock;

/// Slots of the boxes that TMA loads at least.
const FEWEST_SLOTS: usize = 16;

/// A launch for sequences with many queries as plain data. Sizes, strides and pointers come from
/// the tensors.
#[derive(Clone, Copy, Debug)]
pub(super) struct PrefillPlan {
    /// What the tensors do not say.
    pub(super) plan: AttentionCachePlan,
    /// Grid, block and shared memory.
    pub(super) config: LaunchConfig,
    /// The launch that combines splits.
    pub(super) combine: Option<(&'static Kernel, LaunchConfig)>,
}

/// Plans the launch of a kernel for many queries and a problem that it accepts on this GPU.
///
/// # Errors
/// [`Error::Misaligned`](crate::Error::Misaligned) for a stride that is not a multiple of 8
/// elements, [`Error::TooLarge`](crate::Error::TooLarge) for a grid or size beyond 32 bits,
/// [`Error::Unsupported`](crate::Error::Unsupported) if the kernel does not compute this problem.
pub(super) fn plan_prefill(
    kernel: &Kernel,
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Result<PrefillPlan> {
    fits(kernel, problem, gpu)?;
    let tile = tile_of::<AttentionDecodeProblem>(kernel, &gpu.compute_capability)?;
    let (attention, cache) = (&problem.attention, &problem.cache);
    // The output holds the queries after they are turned.
    let q = if problem.rotary.is_some() { attention.o } else { attention.q };
    problem.check_strides(q)?;
    let CacheTile::Many(tile) = tile else {
        let what = format!("{}: this kernel has another plan", kernel.symbol());
        return Err(unsupported::<AttentionDecodeProblem>(&gpu.compute_capability, what));
    };
    let block_kv = tile.tile.block_kv as usize;
    let (packs, splits) = (Packs::of(&tile, attention), splits(&tile, problem, gpu));
    let heads = attention.num_heads_kv * packs.count;
    let tiles = grid_x(&[packs.tiles_q, heads, attention.batch, splits])?;
    let blocks = grid_of(kernel, tiles as usize, gpu)?;
    let fewest_queries = others(kernel, problem, gpu)?.map_or(0, |(_, most)| most + 1);
    let scores = score_params(attention);
    // Sequences have lengths of their own, so sections of heads are within one.
    let sections = heads_per_section(attention, &scores.window, true, blocks, packs.tiles_q);
    let plan = AttentionCachePlan {
        scores,
        longest: to_i32("seqlen_q", attention.seqlen_q)?,
        heads_per_section: to_i32("num_heads_q", sections)?,
        fewest_queries: to_i32("seqlen_q", fewest_queries)?,
        box_rows: to_i32("box", box_rows(cache.page_size, cache.capacity, block_kv))?,
        pack: to_i32("num_heads_q", packs.heads)?,
        splits: to_i32("splits", splits)?,
    };
    let combine = (splits > 1).then(|| plan_combine(problem)).transpose()?;
    Ok(PrefillPlan { plan, config: LaunchConfig::of(kernel, blocks, true), combine })
}

/// The launch that combines splits.
fn plan_combine(problem: &AttentionDecodeProblem) -> Result<(&'static Kernel, LaunchConfig)> {
    static KERNEL: LazyLock<Option<&Kernel>> = LazyLock::new(|| {
        let mut kernels = blockflash_sys::manifest::kernels().iter();
        kernels.find(|kernel| matches!(kernel.variant, Variant::AttentionCombine(_)))
    });
    let kernel = KERNEL.expect("the table has a kernel that combines splits");
    let attention = &problem.attention;
    let AttentionProblem { batch, seqlen_q, num_heads_q, head_dims, .. } = *attention;
    let blocks = AttentionCombineOperands::blocks([batch, seqlen_q, num_heads_q, head_dims.v]);
    let too_large = Error::TooLarge {
        what: "rows of all heads",
        value: batch.saturating_mul(seqlen_q).saturating_mul(num_heads_q),
        limit: i32::MAX as usize,
    };
    Ok((kernel, LaunchConfig::of(kernel, blocks.ok_or(too_large)?, true)))
}

/// Slots that one TMA load takes: as many as a key tile and a page have in whole parts. The only
/// page of a sequence may end anywhere.
fn box_rows(page_size: usize, capacity: usize, block_kv: usize) -> usize {
    if capacity <= page_size {
        return block_kv;
    }
    let mut rows = block_kv;
    while rows > FEWEST_SLOTS && !page_size.is_multiple_of(rows) {
        rows /= 2;
    }
    rows
}

#[cfg(test)]
#[path = "prefill_tests.rs"]
mod tests;
