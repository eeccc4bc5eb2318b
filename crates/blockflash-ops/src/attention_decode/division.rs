//! How the work of a call is divided among items.

use super::AttentionDecodeProblem;
use super::estimate::fastest;
use super::items::Work;
use super::tile::Tile;
use crate::Result;
use crate::check::to_i32;
use blockflash_safe::CudaProperties;

/// Most keys of a split, as long as a sequence has at most [`MOST_SPLITS`].
const LONGEST_SPLIT: usize = 4096;
/// Splits of the longest sequences.
const MOST_SPLITS: usize = 256;

/// Splits of a sequence with many queries, whose row tiles fill a GPU alone: they only even out its
/// last wave, and each of them has partial results of the size of the output.
const SPLITS_OF_MANY: usize = 4;

/// Most keys of a split that is combined with others in a cluster, where splits follow from the
/// sequence alone.
const LONGEST_IN_CLUSTER: usize = 256;
/// Most keys of a split of any sequence, a limit of the kernels.
const LONGEST_OF_ALL: usize = 1 << 20;

/// Items of a CTA at most where the splits of all sequences are even, but for one for each row
/// tile.
const MOST_TURNS: usize = 3;

/// Items of a CTA that splits aim for where only the device knows the lengths: long sequences among
/// short ones should not be the last ones for long.
const TURNS_THAT_FILL: usize = 3;

/// Most rows and columns of a tile of `attention_decode_sm80` with which it combines the splits of
/// a run in registers.
const ROWS_THAT_COMBINE: usize = 8;
const COLUMNS_THAT_COMBINE: usize = 256;

/// How the work of a call is divided. A sequence of `keys` keys has splits of `chunk` keys, a
/// multiple of 64: the greater of `keys / splits`, but within `chunk_min..=chunk_max`, and of
/// `keys / 256`. Where `splits` does not depend on the batch, bits of a sequence do not either.
/// With `even_ctas` the device takes longer splits, by the lengths of all sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Division {
    /// Splits of a sequence of medium length.
    pub(super) splits: usize,
    /// Fewest keys of a split.
    pub(super) chunk_min: usize,
    /// Most keys of a split, unless there are 256 splits.
    pub(super) chunk_max: usize,
    /// Splits that a sequence can have within the capacity.
    pub(super) most_splits: usize,
    /// Sequences with more queries have another kernel.
    pub(super) most_queries: usize,
    /// Rows of a tile that can be in use.
    pub(super) partial_rows: usize,
    /// Splits that an item of the kernel for several queries has.
    pub(super) run: usize,
    /// Items of all row tiles of all heads that a call can have.
    pub(super) items: usize,
    /// Log2 of the splits that an item of the kernel for one query has. No result depends on it.
    pub(super) run_log2: u32,
    /// Most keys of a split that is combined with others in a cluster.
    pub(super) longest_in_cluster: usize,
    /// CTAs among which the device divides the keys of all sequences evenly; 0: it does not.
    pub(super) even_ctas: usize,
}

/// A launch has this many waves of CTAs, or so much of each is used, with the longest items that it
/// may have. Longer items have fewer partial results, but are not equally many for all CTAs.
const WAVES: usize = 4;
const USED: f64 = 0.85;

/// Divides the work of the sequences with at most `most_queries` queries among the items of a
/// kernel with this tile.
pub(super) fn divided(
    tile: &Tile,
    gpu: &CudaProperties,
    problem: &AttentionDecodeProblem,
    most_queries: usize,
) -> Result<Division> {
    let (attention, cache) = (&problem.attention, &problem.cache);
    let most_blocks = tile.most_blocks(gpu);
    problem.check_strides(attention.q)?;
    let rows = tile.rows.max(1);
    let heads = attention.num_heads_kv.max(1);
    let by_batch = problem.splits_by_batch();
    let many = problem.has_many() && attention.packed.is_none();
    let evenly = !many && tile.counts_lengths && problem.splits_evenly();
    let (splits, [chunk_min, chunk_max], longest_in_cluster) = match by_batch {
        true => (fastest(tile, problem, gpu).splits, [64, LONGEST_OF_ALL], LONGEST_OF_ALL),
        false if many => (SPLITS_OF_MANY, [tile.fewest_keys, LONGEST_OF_ALL], 0),
        false if evenly => (MOST_SPLITS, [tile.fewest_keys, LONGEST_OF_ALL], 0),
        false if tile.fills && !problem.batch_invariant => {
            let row_tiles = problem.rows_of(most_queries.min(attention.seqlen_q)).div_ceil(rows);
            let all = attention.batch.saturating_mul(heads).saturating_mul(row_tiles).max(1);
            let splits = (most_blocks * TURNS_THAT_FILL).div_ceil(all).min(MOST_SPLITS);
            (splits, [tile.fewest_keys, LONGEST_SPLIT], 0)
        }
        false => {
            let splits = (tile.heads_and_splits / heads).max(1);
            (splits, [tile.fewest_keys, LONGEST_SPLIT], LONGEST_IN_CLUSTER)
        }
    };
    let visited = match problem.pages {
        None => attention.seqlen_kv,
        Some(pages) => pages.capacity.saturating_mul(cache.page_size).min(attention.seqlen_kv),
    };
    // Splits begin at a multiple of 16 keys.
    let most_splits = most_splits(visited.next_multiple_of(16), splits, [chunk_min, chunk_max]);

    let most_queries = most_queries.min(attention.seqlen_q);
    let group_rows = problem.rows_of(most_queries);
    let tiles = attention.batch.saturating_mul(group_rows.div_ceil(rows));
    // Offsets of packed sequences that do not ascend may ask for all of them.
    to_i32("items", tiles.saturating_mul(heads.saturating_mul(most_splits)))?;
    let tiles = attention.packed.map_or(tiles, |packed| {
        let all = packed.total_q.saturating_mul(attention.num_heads_q / heads).div_ceil(rows);
        tiles.min(all.saturating_add(attention.batch))
    });
    let items = |run: usize| tiles * heads * most_splits.div_ceil(run);
    let fills = |&&run: &&usize| {
        let waves = items(run).div_ceil(most_blocks.max(1));
        let used = items(run) as f64 / (waves * most_blocks).max(1) as f64;
        waves >= WAVES || used >= USED
    };
    let run = match by_batch || evenly {
        true => 1,
        false => tile.runs.iter().find(fills).copied().unwrap_or(1),
    };
    let (mut items, partial_rows) = (items(run), rows.min(group_rows));
    if evenly {
        // The device adds lengths in f32, so there is room for one more item of each CTA.
        let turns = most_blocks.saturating_mul(MOST_TURNS + 1);
        items = items.min(turns.saturating_add(tiles * heads));
    }
    Ok(Division {
        splits,
        chunk_min,
        chunk_max,
        most_splits,
        most_queries,
        partial_rows,
        run,
        items,
        run_log2: 0,
        longest_in_cluster,
        even_ctas: if evenly { most_blocks } else { 0 },
    })
}

/// The most splits of a sequence of at most `capacity` keys.
fn most_splits(capacity: usize, splits: usize, [chunk_min, chunk_max]: [usize; 2]) -> usize {
    let most = if capacity <= chunk_max.saturating_mul(splits) {
        splits.min(capacity.div_ceil(chunk_min))
    } else {
        splits.max(capacity.div_ceil(chunk_max).min(MOST_SPLITS))
    };
    most.max(1)
}

impl Division {
    /// Keys of a split and splits of a sequence whose queries see this many keys: the rule of
    /// the kernel.
    pub(super) fn of_sequence(&self, keys: usize) -> [usize; 2] {
        let medium = keys.div_ceil(self.splits).clamp(self.chunk_min, self.chunk_max);
        let chunk = medium.max(keys.div_ceil(MOST_SPLITS)).next_multiple_of(64);
        [chunk, keys.div_ceil(chunk).max(1)]
    }

    /// The same splits in fewer items, for this number of CTAs and of those on a multiprocessor. A
    /// sequence whose length only the device knows may have far fewer splits than the capacity, so
    /// that runs would leave CTAs without work. The workspace stays as large.
    pub(super) fn in_runs(
        self,
        problem: &AttentionDecodeProblem,
        tile: &Tile,
        ctas: [usize; 2],
    ) -> Self {
        let Some(keys) = problem.keys_of_each().filter(|_| !problem.splits_by_batch()) else {
            return self;
        };
        let [chunk, splits] = self.of_sequence(keys);
        let work = Work {
            splits: self.items / self.most_splits * splits,
            ctas: ctas[0],
            ctas_of_multiprocessor: ctas[1],
            of_row_tile: splits,
            split_elements: chunk.saturating_mul(problem.attention.head_dims.sum() / 2),
            combines: tile.rows <= ROWS_THAT_COMBINE && tile.columns <= COLUMNS_THAT_COMBINE,
        };
        let run_log2 = work.run_log2().min(self.most_splits.trailing_zeros());
        Self { items: self.items >> run_log2, run_log2, ..self }
    }

    /// [Clusters](Tile::clusters) and the CTAs of one, where the splits of few sequences are
    /// combined in clusters. They are for splits that are read soon.
    pub(super) fn in_clusters(
        &self,
        tile: &Tile,
        problem: &AttentionDecodeProblem,
        multiprocessors: usize,
    ) -> Option<[u32; 2]> {
        // The kernel has to find as many splits.
        let keys = problem.sees_all().then_some(problem.attention.seqlen_kv)?;
        let [chunk, splits] = self.of_sequence(keys);
        if self.run_log2 > 0 || splits == 1 || chunk > self.longest_in_cluster {
            return None;
        }
        let row_tiles = self.items / self.most_splits;
        let clusters = tile.clusters(row_tiles, [splits, self.most_splits], multiprocessors)?;
        Some(clusters.map(|count| count as u32))
    }

    /// Numbers of 32 bits, and words that count, of the workspace.
    pub(super) fn room(&self, problem: &AttentionDecodeProblem) -> Option<[usize; 2]> {
        if self.most_splits == 1 {
            return Some([0, 0]);
        }
        let row = problem.attention.head_dims.v.checked_add(2)?;
        let sums = self.items.checked_mul(self.partial_rows)?.checked_mul(row)?;
        Some([sums, self.items])
    }
}

#[cfg(test)]
#[path = "division_tests.rs"]
mod tests;
