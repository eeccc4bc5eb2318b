//! How the kernels for many rows divide the work of a call among tiles and splits, and how long
//! they are likely to take.

use super::AttentionDecodeProblem;
use super::estimate::{Estimate, LAUNCH, both, reading};
use crate::attention::AttentionProblem;
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::{AttentionCacheHopper, AttentionCombine};

/// Rows of a warpgroup.
const ROWS: usize = 64;

/// Nanoseconds until the first keys arrive.
const FIRST_TILE: f64 = 3500.0;
/// Part of the time of a key tile that a CTA takes alone on its SM, where two may share it.
const ALONE: f64 = 0.57;
/// Nanoseconds of combining splits, and of each 1,000 bytes of their outputs.
const COMBINE: [f64; 2] = [2450.0, 0.85];
/// Items of a CTA at most that are worth their combination.
const MOST_TURNS: usize = 4;
/// Key tiles of the capacity from which a sequence may have splits although all full sequences
/// together fill the GPU: there may be one long sequence among short ones.
const LONG: usize = 24;

/// Part of the time of a call that combining more splits than full sequences need may take.
const WORTH: f64 = 0.2;

/// Which heads share the rows of a tile. The heads that share a head of k are divided into packs; a
/// warpgroup has as many whole queries of a pack as its rows hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packs {
    /// Heads of a pack; the last one of a group may have fewer.
    pub(super) heads: usize,
    /// Packs of a group.
    pub(super) count: usize,
    /// Tiles of queries of a sequence.
    pub(super) tiles_q: usize,
}

impl Packs {
    /// The packs with the fewest tiles for the longest sequence, of which the largest.
    pub(super) fn of(tile: &AttentionCacheHopper, attention: &AttentionProblem) -> Self {
        let group = (attention.num_heads_q / attention.num_heads_kv.max(1)).max(1);
        let warpgroups = tile.tile.warpgroups as usize;
        let packed = |least: usize| {
            let heads = group.div_ceil(least);
            let queries = warpgroups * (ROWS / heads);
            let tiles_q = attention.seqlen_q.div_ceil(queries).max(1);
            Self { heads, count: group.div_ceil(heads), tiles_q }
        };
        let fewest = group.div_ceil(ROWS);
        let packs = (fewest..fewest + 8).map(packed);
        packs.min_by_key(|packs| packs.count * packs.tiles_q).unwrap_or(packed(group))
    }

    /// Tiles of all sequences.
    pub(super) fn tiles(&self, attention: &AttentionProblem) -> usize {
        let heads = attention.num_heads_kv.saturating_mul(self.count);
        attention.batch.saturating_mul(heads).saturating_mul(self.tiles_q)
    }
}

/// Splits of a sequence, of which those with lengths on the device may have fewer. Packed sequences
/// have one each, and so have all where bits must not depend on the batch.
pub(super) fn splits(
    tile: &AttentionCacheHopper,
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> usize {
    let attention = &problem.attention;
    if attention.packed.is_some() || problem.batch_invariant {
        return 1;
    }
    let Estimate { splits: found, time } = fastest(tile, problem, gpu);
    if !problem.cache.seqused_kv {
        return found;
    }
    // The device divides the keys of all sequences evenly: a long one has more splits than others.
    let key_tiles = problem.keys_of_full().div_ceil(tile.tile.block_kv.max(1) as usize);
    if found == 1 && key_tiles < LONG {
        return 1;
    }
    let tiles = Packs::of(tile, attention).tiles(attention).max(1);
    let even = (MOST_TURNS * slots(tile, gpu) / tiles).min(key_tiles);
    let worth = WORTH * time / (COMBINE[1] * output_bytes(attention) / 1e3);
    even.min(worth as usize).clamp(found, AttentionCombine::MOST_SPLITS as usize)
}

/// Bytes of the outputs of one split of all sequences.
fn output_bytes(attention: &AttentionProblem) -> f64 {
    4.0 * attention.o_shape().iter().map(|&size| size as f64).product::<f64>()
}

/// Numbers of a workspace that has room for the splits of any number of sequences of any length,
/// and no words.
pub(super) fn room(
    tile: &AttentionCacheHopper,
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Option<[usize; 2]> {
    if problem.attention.packed.is_some() || problem.batch_invariant {
        return Some([0; 2]);
    }
    let rows = problem.group_rows().min(tile.tile.warpgroups as usize * ROWS);
    let row = problem.attention.head_dims.v.checked_add(1)?;
    Some([(MOST_TURNS * slots(tile, gpu)).checked_mul(rows)?.checked_mul(row)?, 0])
}

fn slots(tile: &AttentionCacheHopper, gpu: &CudaProperties) -> usize {
    (gpu.multiprocessors.max(1) * tile.tile.blocks_per_multiprocessor) as usize
}

/// The fastest division, by estimate, as if all sequences had the length that the host knows, or
/// filled the cache.
pub(super) fn fastest(
    tile: &AttentionCacheHopper,
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Estimate {
    let attention = &problem.attention;
    let packs = Packs::of(tile, attention);
    let keys = problem.keys_of_full().max(1);
    let shared = packs.tiles_q * packs.count > 1;
    let launch = Launch {
        tiles: packs.tiles(attention).max(1),
        key_tiles: keys.div_ceil(tile.tile.block_kv.max(1) as usize).max(1),
        cost_ns: tile.tile.cost_ns.map(f64::from),
        slots: slots(tile, gpu),
        multiprocessors: gpu.multiprocessors.max(1) as usize,
        reading: reading(problem, shared, gpu),
        output_bytes: output_bytes(attention),
    };
    let filling = |ctas: usize| ctas / launch.tiles;
    let most = (AttentionCombine::MOST_SPLITS as usize).min(launch.key_tiles);
    let candidates = [
        filling(launch.multiprocessors),
        filling(launch.slots),
        filling(2 * launch.slots),
        filling(3 * launch.slots),
        AttentionCombine::MOST_SPLITS as usize / 2,
    ];
    let mut best = launch.estimate(1);
    if attention.packed.is_some() || problem.batch_invariant {
        return best;
    }
    for splits in candidates {
        let splits = splits.min(most);
        if splits > 1 && launch.tiles.saturating_mul(splits) <= MOST_TURNS * launch.slots {
            let found = launch.estimate(splits);
            if found.time < best.time {
                best = found;
            }
        }
    }
    best
}

/// A launch whose keys may be divided in several ways.
struct Launch {
    /// Tiles of queries and packs of all sequences.
    tiles: usize,
    /// Key tiles of a sequence.
    key_tiles: usize,
    /// Nanoseconds of a key tile, and of the change to the next item.
    cost_ns: [f64; 2],
    /// CTAs that the GPU has room for.
    slots: usize,
    multiprocessors: usize,
    /// Nanoseconds that device memory needs.
    reading: f64,
    /// Bytes of the output of a split.
    output_bytes: f64,
}

impl Launch {
    fn estimate(&self, splits: usize) -> Estimate {
        let Self { tiles, key_tiles, cost_ns: [of_key_tile, change], slots, .. } = *self;
        let of_item =
            |factor: f64| key_tiles.div_ceil(splits) as f64 * of_key_tile * factor + change;
        let items = tiles.saturating_mul(splits);
        let (rounds, rest) = (items / slots, items % slots);
        let alone = if slots > self.multiprocessors { ALONE } else { 1.0 };
        let last = match rest {
            0 => 0.0,
            // Many items end at different times.
            _ if rounds > 4 => of_item(1.0) / 2.0,
            _ if rest > self.multiprocessors => of_item(1.0),
            _ => of_item(alone),
        };
        let busiest = rounds as f64 * of_item(1.0) + last;
        let combining = match splits {
            1 => 0.0,
            _ => COMBINE[0] + COMBINE[1] * self.output_bytes * splits as f64 / 1e3,
        };
        let time = LAUNCH + FIRST_TILE + both(busiest, self.reading) + combining;
        Estimate { splits, time }
    }
}
