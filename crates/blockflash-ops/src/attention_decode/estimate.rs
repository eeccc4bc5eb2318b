//! How long a launch is likely to take, and into how many splits the keys should be divided.
//!
//! A launch is estimated as the longer of two times: what the busiest CTA needs for its items, and
//! what device memory needs for all keys; and the combination of splits. The constants were fitted
//! to launches on an H200 (`benches/results/nvidia-h200/kv_cache.md`).

use super::AttentionDecodeProblem;
use super::tile::Tile;
use crate::kv_cache::latent_codes::ROW_BYTES;
use crate::rates::GpuRates;
use blockflash_safe::CudaProperties;

/// Nanoseconds of a launch without work.
pub(super) const LAUNCH: f64 = 500.0;
/// Nanoseconds of a combination, of each result in it, and of a second level of it.
const COMBINE: [f64; 3] = [950.0, 60.0, 1300.0];
/// Splits that are combined at once.
const GROUP: usize = 16;
/// Part of the rate of device memory that launches reach.
const MEMORY: f64 = 0.85;
/// How much longer reading takes where row tiles read the same keys.
const SHARED: f64 = 1.4;

/// Nanoseconds of a tile by its rows: of an item, and of a key for each 64 columns, where a
/// CTA is alone on its SM and where it shares it.
pub(crate) const fn pace(rows: usize) -> [f64; 3] {
    match rows {
        ..=8 => [8800.0, 4.3, 6.3],
        9..=16 => [10_200.0, 4.9, 7.6],
        17..=32 => [11_500.0, 7.8, 9.5],
        _ => [9500.0, 9.1, 11.7],
    }
}

/// How much longer a CTA of two warps takes for a key than one of four: 36 sequences of 1,792 keys,
/// 8 heads on 1 of head_dim 256, took 34 µs, where four warps would take about 17.
pub(crate) const TWO_WARPS: f64 = 1.8;

/// The same of the Hopper kernel for latent rows, which is alone on its SM.
pub(super) const LATENT_PACE: [f64; 3] = [14_000.0, 5.9, 5.9];

/// A division of the keys of each sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Estimate {
    /// Splits of a sequence.
    pub(crate) splits: usize,
    /// Estimated time of the launch in nanoseconds.
    pub(crate) time: f64,
}

/// The most items that are worth their combination, for each CTA that runs at the same time: more
/// rows have larger results.
pub(crate) const fn items_of_cta(rows: usize) -> usize {
    if rows <= 16 { 4 } else { 2 }
}

/// The fastest division for a tile, by estimate. The host knows the lengths.
pub(super) fn fastest(
    tile: &Tile,
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Estimate {
    let attention = &problem.attention;
    let keys = problem.keys_of_full().max(1);
    let row_tiles = problem.group_rows().div_ceil(tile.rows.max(1)).max(1);
    let sequences = attention.batch.max(1).saturating_mul(attention.num_heads_kv.max(1));
    let launch = Launch {
        tile,
        keys,
        tiles: sequences.saturating_mul(row_tiles),
        multiprocessors: gpu.multiprocessors.max(1) as usize,
        reading: reading(problem, row_tiles > 1, gpu),
    };
    launch.fastest()
}

/// Nanoseconds that device memory needs for the keys and values, which several tiles may read.
pub(super) fn reading(problem: &AttentionDecodeProblem, shared: bool, gpu: &CudaProperties) -> f64 {
    let attention = &problem.attention;
    let columns = match problem.cache.shared {
        true if problem.cache.has_code_rows() => ROW_BYTES,
        true => attention.head_dims.max(),
        false => attention.head_dims.sum(),
    };
    let of_key = columns * attention.types.kv.size();
    let sequences = attention.batch.max(1) as f64 * attention.num_heads_kv.max(1) as f64;
    let bytes = sequences * problem.keys_of_full().max(1) as f64 * of_key as f64;
    let memory = GpuRates::of(gpu).memory_bytes_per_second() * MEMORY / 1e9;
    bytes / memory * if shared { SHARED } else { 1.0 }
}

/// Nanoseconds for two things at once, neither of which hides the other one entirely.
pub(crate) fn both(a: f64, b: f64) -> f64 {
    (a.powi(4) + b.powi(4)).sqrt().sqrt()
}

/// Numbers and words of a workspace that has room for the splits of any number of sequences of any
/// length, for each tile.
pub(super) fn most_room(
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Option<[usize; 2]> {
    // Two CTAs of an SM at most; with twice the rows there are half as many items.
    let items = gpu.multiprocessors.max(1) as usize * 2 * items_of_cta(16);
    let row = problem.attention.head_dims.v.checked_add(2)?;
    Some([items.checked_mul(problem.group_rows().min(32))?.checked_mul(row)?, items])
}

/// A launch whose keys may be divided in several ways.
pub(crate) struct Launch<'t> {
    pub(crate) tile: &'t Tile,
    /// Keys of a sequence.
    pub(crate) keys: usize,
    /// Row tiles of all sequences and heads.
    pub(crate) tiles: usize,
    pub(crate) multiprocessors: usize,
    /// Nanoseconds that device memory needs.
    pub(crate) reading: f64,
}

impl Launch<'_> {
    /// The fastest division.
    pub(crate) fn fastest(&self) -> Estimate {
        let slots = self.multiprocessors * self.tile.blocks.max(1) as usize;
        let filling = |ctas: usize| ctas / self.tiles.max(1);
        let candidates = [
            1,
            filling(self.multiprocessors),
            filling(slots),
            filling(2 * slots),
            filling(4 * slots),
            GROUP,
            filling(self.multiprocessors / 2).min(GROUP),
        ];
        let mut best = self.estimate(1);
        for splits in candidates {
            let items = self.tiles.saturating_mul(splits);
            if splits > 1 && items <= slots * items_of_cta(self.tile.rows) {
                let found = self.estimate(splits);
                if found.time < best.time {
                    best = found;
                }
            }
        }
        best
    }

    fn estimate(&self, splits: usize) -> Estimate {
        let Self { tile, keys, tiles, multiprocessors, reading } = *self;
        let chunk = keys.div_ceil(splits).max(keys.div_ceil(256)).next_multiple_of(64);
        let splits = keys.div_ceil(chunk);
        let [item, alone, beside] = tile.pace;
        let slots = multiprocessors * tile.blocks.max(1) as usize;
        let of_item =
            |of_key: f64| item + chunk.min(keys) as f64 * of_key * tile.columns.div_ceil(64) as f64;
        let items = tiles.saturating_mul(splits);
        let (rounds, rest) = (items / slots, items % slots);
        let shared = if tile.blocks > 1 { beside } else { alone };
        let last = match rest {
            0 => 0.0,
            _ if rest > multiprocessors => of_item(shared),
            _ => of_item(alone),
        };
        let busiest = rounds as f64 * of_item(shared) + last;
        let work = both(busiest, reading);
        let [combine, result, level] = COMBINE;
        let groups = splits.div_ceil(GROUP);
        let in_clusters = tile.clusters(tiles, [splits; 2], multiprocessors).is_some();
        let combining = match splits {
            1 => 0.0,
            _ if in_clusters && groups == 1 => 0.0,
            _ if in_clusters => combine + level + result * groups as f64,
            _ if splits <= GROUP => combine + result * splits as f64,
            _ => combine + result * splits as f64 + level,
        };
        Estimate { splits, time: LAUNCH + work + combining }
    }
}

#[cfg(test)]
#[path = "estimate_tests.rs"]
mod tests;
