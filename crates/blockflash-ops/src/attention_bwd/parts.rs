//! How many CTAs share the query heads of a block of keys.

use super::AttentionBackwardProblem;
use super::plan::workspace;
use crate::attention::Align;
use blockflash_safe::{AttentionBwdParts, CudaProperties};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{AttentionBwdStep as Step, AttentionBwdTile};

/// What a block of keys costs beside its tiles, in the time of one of them.
const BLOCK: f64 = 2.3;
/// Where blocks take unequal time, SMs are busy at the end for this part of the longest on average.
const TAIL: f64 = 0.2;
/// Bytes that an SM writes, or reads, in the time of a tile.
const BYTES_PER_TILE: f64 = 50e3;
/// A launch for the sums of parts, in the time of a tile, and what it takes longer where dq is
/// rounded by the same one.
const LAUNCH: f64 = 1.5;
const LONGER_LAUNCH: f64 = 0.3;
/// Rounds of CTAs beyond which more parts change nothing.
const MOST_ROUNDS: f64 = 16.0;
/// Of counts whose times are estimated within this factor of the best, the least is taken; 1 within
/// the square of it.
const LEVEL: f64 = 1.02;

/// The parts into which a kernel splits the query heads of each group; `None` if a CTA has all
/// heads of one, or if the workspace has no room for parts.
///
/// A block of keys visits its queries for one head after another, so that dk and dv stay in
/// registers. With few blocks of keys, or long ones, SMs have nothing to do meanwhile.
pub(super) fn parts(
    kernel: &Kernel,
    problem: &AttentionBackwardProblem,
    gpu: &CudaProperties,
) -> Option<AttentionBwdParts> {
    let forward = &problem.forward;
    let tile = kernel.attention_bwd_tile().filter(|tile| tile.splits_heads)?;
    let group = forward.num_heads_q.checked_div(forward.num_heads_kv)?;
    let dense = forward.packed.is_none() && forward.block_mask.is_none();
    let grid = Grid::of(&tile, problem, group, gpu);
    if group < 2 || !dense || grid.blocks < 1.0 {
        return None;
    }
    let counts = group.min((MOST_ROUNDS * grid.multiprocessors / grid.blocks).ceil() as usize);
    let best = (1..=counts).map(|count| grid.time(count)).fold(f64::INFINITY, f64::min);
    if grid.time(1) <= best * LEVEL * LEVEL {
        return None;
    }
    let count = (2..=counts).find(|&count| grid.time(count) <= best * LEVEL)?;
    let parts = AttentionBwdParts { count: count as i32, head_dim: tile.head_dims.max() };
    let room = workspace(kernel, problem, Some(parts)).is_ok_and(|n| n <= problem.workspace);
    room.then_some(parts)
}

/// What decides how long the blocks of keys of a problem take.
struct Grid {
    blocks: f64,
    /// Query heads that share keys.
    group: usize,
    /// Tiles of queries that a block visits for each head: the mean and the most.
    visited: [f64; 2],
    /// What the parts of a block take, written and read, and a launch for them.
    part: f64,
    launch: f64,
    multiprocessors: f64,
}

impl Grid {
    fn of(
        tile: &AttentionBwdTile,
        problem: &AttentionBackwardProblem,
        group: usize,
        gpu: &CudaProperties,
    ) -> Self {
        let forward = &problem.forward;
        let tiles = forward.seqlen_kv.div_ceil(tile.block_kv as usize);
        // dk and dv in f32.
        let bytes = 2.0 * 4.0 * f64::from(tile.block_kv) * (2 * tile.head_dims.max()) as f64;
        Self {
            blocks: forward.batch as f64 * forward.num_heads_kv as f64 * tiles as f64,
            group,
            visited: query_tiles(tile, problem),
            part: bytes / BYTES_PER_TILE,
            launch: if tile.step == Step::KeysAndSums { LONGER_LAUNCH } else { LAUNCH },
            multiprocessors: f64::from(gpu.multiprocessors.max(1)),
        }
    }

    /// Estimated time with this number of parts, in units of a tile's.
    fn time(&self, count: usize) -> f64 {
        let [mean, most] = self.visited;
        let longest = self.group.div_ceil(count) as f64 * most + BLOCK;
        let rounds = self.blocks * count as f64 / self.multiprocessors;
        let even = self.blocks * self.group as f64 * mean / self.multiprocessors + rounds * BLOCK;
        let multiply = if rounds <= 1.0 {
            longest
        } else if mean == most {
            (rounds.ceil() * longest).min(even + longest)
        } else {
            longest.max(even + TAIL * longest)
        };
        if count == 1 { multiply } else { multiply + rounds * self.part + self.launch }
    }
}

/// Tiles of queries that a block of keys visits for each head: the mean over a sample, and the
/// most.
fn query_tiles(tile: &AttentionBwdTile, problem: &AttentionBackwardProblem) -> [f64; 2] {
    const SAMPLES: usize = 8;
    let forward = &problem.forward;
    let (block_q, block_kv) = (u64::from(tile.block_q), tile.block_kv as usize);
    let limits = forward.scores.mask.limits(forward.seqlen_q, forward.seqlen_kv);
    let tiles = forward.seqlen_kv.div_ceil(block_kv);
    if limits.is_unbounded() || tiles == 0 {
        return [forward.seqlen_q.div_ceil(tile.block_q as usize) as f64; 2];
    }
    // Existing sequences are shorter than the bound, and sums of their lengths fit into 64 bits.
    let signed = |length: usize| length.min(1 << 40) as i64;
    let (queries, keys) = (signed(forward.seqlen_q), signed(forward.seqlen_kv));
    let diagonal = if limits.align == Align::TopLeft { 0 } else { keys - queries };
    let query = |query: i64| query.clamp(0, queries) as u64;
    let samples = tiles.min(SAMPLES);
    let visited = (0..samples).map(|i| {
        let first = signed(i * (tiles - 1) / (samples - 1).max(1) * block_kv);
        let last = (first + signed(block_kv)).min(keys) - 1;
        let start = limits.right.map_or(0, |right| query(first - diagonal - signed(right)));
        let end =
            limits.left.map_or(queries as u64, |left| query(last - diagonal + signed(left) + 1));
        (end.max(start).div_ceil(block_q) - start / block_q) as f64
    });
    let (sum, most) = visited.fold((0.0, 0.0), |(sum, most): (f64, f64), n| (sum + n, most.max(n)));
    [sum / samples as f64, most]
}

#[cfg(test)]
#[path = "parts_tests.rs"]
mod tests;
