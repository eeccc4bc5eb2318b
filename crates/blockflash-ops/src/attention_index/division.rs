//! How the lists of a call are divided among items.

use super::IndexAttentionProblem;
use crate::Result;
use crate::attention_decode::estimate::{Estimate, Launch};
use crate::attention_decode::items::Work;
use crate::attention_decode::tile::Tile;
use crate::check::to_i32;
use crate::rates::GpuRates;
use blockflash_safe::CudaProperties;

/// What positions of a split are multiples of.
const STEP: usize = 64;
/// Splits of a group, which a cluster combines.
const GROUP: usize = 16;
/// Splits of a list at most, and fewest positions of one, where they follow from its capacity
/// alone.
const INVARIANT: [usize; 2] = [GROUP, 256];
/// Part of the rate of device memory that launches reach.
const MEMORY: f64 = 0.85;
/// Most rows and columns of a tile whose items combine the splits of a run in registers.
const COMBINES: [usize; 2] = [8, 256];

/// How the work of a call is divided: lists have splits of `chunk` positions, the keys of their
/// entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Division {
    /// Positions of a split.
    pub(super) chunk: usize,
    /// Splits of a list.
    pub(super) splits: usize,
    /// Log2 of the splits of an item.
    pub(super) run_log2: u32,
    /// Row tiles of all units of all queries.
    pub(super) row_tiles: usize,
    /// Rows of a tile that can be in use.
    pub(super) rows: usize,
}

impl IndexAttentionProblem {
    /// Keys that a list can name.
    pub(super) fn positions(&self) -> usize {
        self.lists.capacity.saturating_mul(self.lists.granularity)
    }

    /// Row tiles of this many rows, of all units of all queries.
    pub(super) fn row_tiles(&self, rows: usize) -> usize {
        let of_query = self.units().saturating_mul(self.group().div_ceil(rows.max(1)));
        self.total_q().saturating_mul(of_query)
    }

    /// Nanoseconds that device memory needs for the keys and values of all lists, or of all
    /// sequences if these are fewer.
    pub(super) fn reading(&self, gpu: &CudaProperties) -> f64 {
        let (attention, cache) = (&self.attention, &self.cache);
        let of_lists = self.total_q() as f64 * self.units() as f64 * self.positions() as f64;
        let keys = attention.seqlen_kv as f64 * attention.batch as f64;
        let keys = of_lists.min(keys * cache.num_heads_kv as f64);
        let memory = GpuRates::of(gpu).memory_bytes_per_second() * MEMORY / 1e9;
        keys * (cache.head_dims.sum() * attention.types.kv.size()) as f64 / memory
    }

    /// The division that is estimated to be the fastest.
    pub(super) fn fastest(&self, tile: &Tile, gpu: &CudaProperties) -> Estimate {
        let keys = self.positions().min(self.attention.seqlen_kv).max(1);
        let launch = Launch {
            tile,
            keys,
            tiles: self.row_tiles(tile.rows).max(1),
            multiprocessors: gpu.multiprocessors.max(1) as usize,
            reading: self.reading(gpu),
        };
        launch.fastest()
    }

    /// Divides lists into this many splits, or a few less, for tiles of this many rows.
    pub(super) fn in_splits(&self, splits: usize, rows: usize) -> Result<Division> {
        let positions = self.positions();
        let chunk = positions.div_ceil(splits.max(1)).max(1).next_multiple_of(STEP);
        let splits = positions.div_ceil(chunk).max(1);
        let (row_tiles, rows) = (self.row_tiles(rows), self.group().min(rows));
        let division = Division { chunk, splits, run_log2: 0, row_tiles, rows };
        // Kernels count splits in 32 bits.
        to_i32("splits", division.slots())?;
        Ok(division)
    }

    /// Divides lists by their capacity alone, for tiles of this many rows.
    pub(super) fn by_capacity(&self, rows: usize) -> Result<Division> {
        let [most, shortest] = INVARIANT;
        self.in_splits((self.positions() / shortest).clamp(1, most), rows)
    }

    /// Divides the lists among the items of a kernel with this tile.
    pub(super) fn divided(&self, tile: &Tile, gpu: &CudaProperties) -> Result<Division> {
        if !self.batch_invariant {
            return self.in_splits(self.fastest(tile, gpu).splits, tile.rows);
        }
        let division = self.by_capacity(tile.rows)?;
        let columns = self.attention.head_dims.sum() / 2;
        let work = Work {
            splits: division.items(),
            ctas: tile.most_blocks(gpu),
            ctas_of_multiprocessor: tile.blocks as usize,
            of_row_tile: division.splits,
            split_elements: division.chunk.saturating_mul(columns),
            combines: tile.rows <= COMBINES[0] && tile.columns <= COMBINES[1],
        };
        Ok(Division { run_log2: work.run_log2(), ..division })
    }
}

impl Division {
    /// Items of all row tiles.
    pub(super) const fn items(&self) -> usize {
        self.row_tiles.saturating_mul(self.splits.div_ceil(1 << self.run_log2))
    }

    /// Splits of all row tiles, of which the last ones of a run need not exist.
    const fn slots(&self) -> usize {
        self.items().saturating_mul(1 << self.run_log2)
    }

    /// CTAs, and those of a cluster, where the splits of few lists are combined in clusters.
    pub(super) fn in_clusters(&self, tile: &Tile, multiprocessors: usize) -> Option<[u32; 2]> {
        if self.run_log2 > 0 || self.splits == 1 {
            return None;
        }
        let splits = [self.splits; 2];
        let [clusters, _] = tile.clusters(self.row_tiles, splits, multiprocessors)?;
        let size = self.splits.min(GROUP);
        Some([clusters * size, size].map(|count| count as u32))
    }

    /// Numbers of 32 bits, and words that count, of the workspace.
    pub(super) fn room(&self, head_dim_v: usize) -> Option<[usize; 2]> {
        if self.splits == 1 {
            return Some([0, 0]);
        }
        let row = head_dim_v.checked_add(2)?;
        Some([self.slots().checked_mul(self.rows)?.checked_mul(row)?, self.slots()])
    }
}
