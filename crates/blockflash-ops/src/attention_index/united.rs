//! Neighbouring queries that visit the union of their lists: how a call is divided among launches,
//! and how long they are likely to take.

use super::IndexAttentionProblem;
use crate::Result;
use crate::attention_decode::estimate::both;
use crate::check::to_i32;
use blockflash_safe::{CudaProperties, IndexPacks};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{self, AttentionIndexHopper, IndexUnion, Variant};
use std::sync::LazyLock;

/// Words of 32 bits of the workspace beyond which a call has several pairs of launches.
const MOST_WORDS: usize = 8 << 20;

/// The kernel that unites lists on a GPU.
pub(super) fn union(gpu: &CudaProperties) -> Option<(&'static Kernel, IndexUnion)> {
    static UNIONS: LazyLock<Vec<(&Kernel, IndexUnion)>> = LazyLock::new(|| {
        let of = |kernel: &'static Kernel| match kernel.variant {
            Variant::IndexUnion(union) => Some((kernel, union)),
            _ => None,
        };
        manifest::kernels().iter().filter_map(of).collect()
    });
    UNIONS.iter().copied().find(|(kernel, _)| kernel.target.runs_on(gpu.compute_capability))
}

/// How the tiles of a call are divided among pairs of launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unions {
    pub(super) packs: IndexPacks,
    /// Tiles of a call.
    pub(super) tiles: usize,
    /// Tiles of a pair of launches; the last one may have fewer.
    pub(super) at_once: usize,
    /// Words of the workspace.
    pub(super) words: usize,
}

impl Unions {
    pub(super) fn of(problem: &IndexAttentionProblem) -> Result<Self> {
        let attention = &problem.attention;
        let packs = IndexPacks::of(problem.group());
        let sizes = [attention.batch, attention.seqlen_q];
        let total = attention.packed.map(|packed| packed.total_q);
        let tiles = packs.tiles(problem.units(), sizes, total);
        to_i32("tiles", tiles.saturating_mul(2))?;
        let of_tile: usize = packs.words(problem.lists.capacity).iter().sum();
        let at_once = (MOST_WORDS / of_tile).clamp(1, tiles.max(1));
        Ok(Self { packs, tiles, at_once, words: of_tile.saturating_mul(at_once) })
    }
}

impl IndexAttentionProblem {
    /// Entries of the lists that a tile unites.
    pub(super) fn united_entries(&self) -> usize {
        IndexPacks::of(self.group()).queries().saturating_mul(self.lists.capacity)
    }
}

/// Slots that one copy takes: they are in one block of a list, in one step and in one page.
pub(super) fn box_rows(tile: &AttentionIndexHopper, problem: &IndexAttentionProblem) -> usize {
    let one_page = problem.cache.table.is_none_or(|table| table.max_pages <= 1);
    let fits = |rows: usize| {
        problem.lists.granularity.is_multiple_of(rows)
            && (tile.step_keys as usize).is_multiple_of(rows)
            && (one_page || problem.cache.page_size.is_multiple_of(rows))
    };
    [128, 64, 32].into_iter().find(|&rows| fits(rows)).unwrap_or(16)
}

/// Nanoseconds of both launches without work, and of a tile: in the kernel that unites its lists,
/// and in the other one beside its keys.
const LAUNCHES: f64 = 8000.0;
const OF_TILE: [f64; 2] = [5.0, 3000.0];
/// How many entries each query adds to the union of its row group, of those that it lists: half as
/// many as all four again, where neighbours share four fifths of what they choose.
const NEW: f64 = 1.0 / 6.0;
/// Keys of a step that is counted, and how much longer it takes in blocks of fewer than 64.
const STEP: f64 = 128.0;
const SMALL_BLOCKS: f64 = 1.5;

/// Nanoseconds of a step of both row groups (`kernels/attention_index_sm90a/NOTES.md`).
const fn of_step(head_dim: usize) -> f64 {
    match head_dim {
        ..=64 => 2150.0,
        65..=128 => 2360.0,
        _ => 3700.0,
    }
}

/// Nanoseconds that a call is likely to take.
pub(super) fn estimate(
    tile: &AttentionIndexHopper,
    problem: &IndexAttentionProblem,
    gpu: &CudaProperties,
) -> f64 {
    let Ok(unions) = Unions::of(problem) else { return f64::MAX };
    let attention = &problem.attention;
    let keys = problem.positions().min(attention.seqlen_kv) as f64;
    let others = unions.packs.pack_queries.min(attention.seqlen_q).max(1) - 1;
    // Neighbours in the middle of a causal sequence see half of it.
    let most = keys.max(attention.seqlen_kv as f64 / 2.0);
    let united = (keys * (1.0 + NEW * others as f64)).min(most);
    let slower = if problem.lists.granularity < 64 { SMALL_BLOCKS } else { 1.0 };
    let steps = united / STEP * of_step(tile.head_dims.max()) * slower;
    let turns = unions.tiles.div_ceil(gpu.multiprocessors.max(1) as usize) as f64;
    let work = both(turns * (OF_TILE[1] + steps), problem.reading(gpu));
    LAUNCHES + OF_TILE[0] * unions.tiles as f64 + work
}
