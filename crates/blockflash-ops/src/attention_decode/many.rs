//! Sequences with many queries, as in the prefill of a cache: they have kernels with the tiles of
//! attention forward.

use super::AttentionDecodeProblem;
use super::plan::{AttentionDecodePlan, plan, plan_few, workspace_bytes};
use super::select::{CacheTile, few};
use crate::Result;
use crate::attention::{
    AttentionProblem, base_params, check_strides, heads_per_section, hopper_params,
};
use crate::check::{grid_x, to_i32};
use crate::kv_append::AppendKvPlan;
use crate::selection::{fits, tile_of};
use blockflash_safe::{CudaProperties, LaunchConfig};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{AttentionDecodeHopper, Variant};
use blockflash_sys::params::blockflash_attention_cache_params;

/// Tiles of queries, times heads, from which on their own kernel is the faster one. It does not
/// split keys, so with fewer too many SMs would have nothing to do. A property of the sequence
/// alone: its bits do not depend on the batch.
const FEWEST_TILES: usize = 64;
/// Queries of the tiles that this is counted in.
const TILE_QUERIES: usize = 128;
/// Slots of the boxes that TMA loads at least.
const FEWEST_SLOTS: usize = 16;

/// A launch for sequences with many queries as plain data, without pointers.
#[derive(Clone, Copy, Debug)]
pub(super) struct PrefillPlan {
    /// The kernel argument.
    pub(super) params: blockflash_attention_cache_params,
    /// Grid, block and shared memory.
    pub(super) config: LaunchConfig,
}

/// The launches of a call, for sequences with many queries and for the others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Planned<'k> {
    pub(super) many: Option<(&'k Kernel, PrefillPlan)>,
    pub(super) few: Option<(&'k Kernel, AttentionDecodePlan)>,
}

/// All launches of a call as plain data, in their order.
#[derive(Clone, Copy, Debug)]
pub struct Launches {
    /// Bytes of workspace that they need.
    pub(super) workspace_bytes: usize,
    /// The append and the turning of queries.
    pub(super) first_step: Option<(&'static Kernel, AppendKvPlan)>,
    /// `None` if no query attends.
    pub(super) attention: Option<Planned<'static>>,
}

impl Launches {
    /// Those of a kernel and a problem that it accepts on this GPU.
    pub(super) fn of(
        kernel: &'static Kernel,
        problem: &AttentionDecodeProblem,
        gpu: &CudaProperties,
    ) -> Result<Launches> {
        let attends = !problem.attention.is_empty();
        Ok(Launches {
            workspace_bytes: workspace_bytes(kernel, problem, gpu)?,
            first_step: problem.first_step(kernel.target, gpu)?,
            attention: attends.then(|| plan_all(kernel, problem, gpu)).transpose()?,
        })
    }

    pub(super) fn kernels(&self) -> Vec<&'static Kernel> {
        let first = self.first_step.map(|(kernel, _)| kernel);
        let (many, few) = self.attention.map_or((None, None), |planned| {
            (planned.many.map(|(kernel, _)| kernel), planned.few.map(|(kernel, _)| kernel))
        });
        [first, many, few].into_iter().flatten().collect()
    }
}

impl AttentionDecodeProblem {
    /// The fewest queries for which a sequence has a kernel of its own.
    pub(super) fn fewest_queries(&self) -> usize {
        FEWEST_TILES.div_ceil(self.attention.num_heads_q.max(1)) * TILE_QUERIES
    }

    /// Whether a sequence can have this many.
    pub(super) fn has_many(&self) -> bool {
        self.attention.seqlen_q >= self.fewest_queries()
    }
}

/// Whether a kernel is one for many queries.
pub(super) fn is_many(kernel: &Kernel) -> bool {
    matches!(kernel.variant, Variant::AttentionCacheHopper(_))
}

/// The kernel for the sequences that `kernel` leaves, and the most queries of one. Only packed
/// sequences have unequal numbers of queries.
pub(super) fn others(
    kernel: &Kernel,
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Result<Option<(&'static Kernel, usize)>> {
    if !is_many(kernel) || problem.attention.packed.is_none() || !problem.has_many() {
        return Ok(None);
    }
    Ok(Some((few(problem, gpu)?, problem.fewest_queries() - 1)))
}

/// Plans the launches of a kernel and a problem that it accepts on this GPU.
///
/// # Errors
/// As [`plan_prefill`] and [`plan`](super::plan()).
pub(super) fn plan_all<'k>(
    kernel: &'k Kernel,
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Result<Planned<'k>> {
    if !is_many(kernel) {
        return Ok(Planned { many: None, few: Some((kernel, plan(kernel, problem, gpu)?)) });
    }
    let few = match others(kernel, problem, gpu)? {
        None => None,
        Some((kernel, most)) => Some((kernel, plan_few(kernel, problem, gpu, most)?)),
    };
    Ok(Planned { many: Some((kernel, plan_prefill(kernel, problem, gpu)?)), few })
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
    // The output holds the queries after they are turned.
    let q = if problem.rotary.is_some() { problem.attention.o } else { problem.attention.q };
    let (attention, cache) = (&AttentionProblem { q, ..problem.attention }, &problem.cache);
    let queries = [attention.batch, attention.seqlen_q, attention.num_heads_q];
    let keys = [cache.pages, cache.page_size, cache.num_heads_kv];
    check_strides(&[
        ("q", attention.q, queries),
        ("o", attention.o, queries),
        ("cache.k", cache.k, keys),
        ("cache.v", cache.v, keys),
    ])?;
    let (block_q, block_kv) = match tile {
        CacheTile::Many(tile) => (tile.tile.block_q() as usize, tile.tile.block_kv as usize),
        CacheTile::Few(tile) => (tile.rows as usize, FEWEST_SLOTS),
        CacheTile::Several(_) => (AttentionDecodeHopper::ROWS as usize, FEWEST_SLOTS),
    };
    let tiles_q = attention.seqlen_q.div_ceil(block_q.max(1));
    let tiles = grid_x(&[tiles_q, attention.num_heads_q, attention.batch])?;
    let blocks = tiles.min(gpu.multiprocessors.max(1));
    // Each CTA asks once for a tile past the last one.
    grid_x(&[tiles as usize + 2 * blocks as usize])?;

    let fewest_queries = others(kernel, problem, gpu)?.map_or(0, |(_, most)| most + 1);
    let base = base_params(attention)?;
    // Sequences have lengths of their own, so sections of heads are within one.
    let sections = heads_per_section(&base, true, blocks, tiles_q);
    let params = blockflash_attention_cache_params {
        fwd: hopper_params(attention, base, sections),
        cache: cache.params()?,
        fewest_queries: to_i32("seqlen_q", fewest_queries)?,
        box_rows: to_i32("box", box_rows(cache.page_size, cache.capacity, block_kv))?,
    };
    Ok(PrefillPlan { params, config: LaunchConfig::of(kernel, blocks, true) })
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
#[path = "many_tests.rs"]
mod tests;
