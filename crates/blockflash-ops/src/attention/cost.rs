//! Estimated times of kernels, which selection compares.

use super::{Align, AttentionProblem};
use crate::rates::{GpuRates, Grid, Work, resident, was_tuned};
use crate::selection::Candidate;
use blockflash_safe::CudaProperties;
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{AttentionFwd, AttentionFwdSmall, AttentionTile, Variant};

/// Estimated time of a kernel, to be compared with those of the same target only: nanoseconds on
/// Hopper, clocks elsewhere.
#[inline]
pub(super) fn relative_time(c: &Candidate<'_, AttentionProblem>) -> f64 {
    match &c.kernel.variant {
        Variant::AttentionFwdHopper(hopper) if hopper.block_rows > 1 && !pairs_pay(c) => {
            f64::INFINITY
        }
        Variant::AttentionFwdHopper(hopper) => persistent_time(hopper.cost_ns, c),
        Variant::AttentionFwdE4m3(codes) => persistent_time(codes.cost_ns, c),
        Variant::AttentionFwdSmall(small) => small_time(small, c.problem, c.gpu),
        Variant::AttentionFwd(tile) if !was_tuned(c.gpu) => {
            portable_time(tile, c.kernel, c.problem, c.gpu)
        }
        // The first one in the table.
        _ => 0.0,
    }
}

/// Whether a tile of two block rows is worth an estimate: each row has a list of its own, and there
/// are pairs for all SMs. With fewer pairs, single rows occupy twice as many SMs.
#[inline]
fn pairs_pay(c: &Candidate<'_, AttentionProblem>) -> bool {
    c.problem.block_mask.is_some_and(|mask| mask.block_q == c.tile.block_q)
        && tiles(c.tile, c.problem) >= f64::from(c.gpu.multiprocessors)
}

/// Nanoseconds of a persistent kernel of Hopper, from those of a key tile and of the change of the
/// tile of queries. When tiles are few, the SMs that get the most tiles determine
/// the time. Many tiles spread evenly, apart from half a wave at the end. Under a causal mask or a
/// window tiles take unequal time: the longest start first, and the others fill the gaps.
#[inline]
fn persistent_time(cost_ns: [u32; 2], c: &Candidate<'_, AttentionProblem>) -> f64 {
    let resident = c.gpu.multiprocessors.max(1) * c.kernel.family().blocks_per_multiprocessor();
    let rounds = tiles(c.tile, c.problem) / f64::from(resident);
    let [step, change] = cost_ns.map(f64::from);
    let [mean, most] = key_tiles(c.tile, c.problem).map(|key_tiles| key_tiles * step + change);
    if rounds <= 4.0 && mean == most {
        rounds.ceil() * most
    } else {
        most.max((rounds + 0.5) * mean)
    }
}

/// Key tiles of 64 up to which the kernels for small grids were the fastest ones of an H100; more
/// were not measured.
const MOST_SMALL_TILES: f64 = 32.0;

/// Next to nothing where the kernels for small grids are taken: each CTA has an SM to itself and
/// visits few key tiles. For others the other kernels are taken, if the problem has tensor maps.
#[inline]
fn small_time(small: &AttentionFwdSmall, problem: &AttentionProblem, gpu: &CudaProperties) -> f64 {
    let (tile, warpgroups) = (&small.tile(), f64::from(small.warpgroups));
    let fills = tiles(tile, problem) > f64::from(gpu.multiprocessors);
    let [_, most] = key_tiles(tile, problem);
    if fills || most > MOST_SMALL_TILES {
        return f64::INFINITY;
    }
    // Microseconds on an H100 at a head_dim of 64.
    let [ends, round] = if warpgroups > 2.0 { [2.1, 1.55] } else { [1.8, 0.92] };
    ends + (most / warpgroups).ceil() * round
}

/// How much faster a tile of fewer queries must be estimated to be: estimates are not measurements,
/// and the wide tile was the faster one where it was measured.
const DOUBT: f64 = 1.1;
/// Queries of the wide tiles.
const WIDE: u32 = 128;

/// Clocks of a portable kernel, from what the units of the GPU can do.
///
/// The warps of a CTA multiply, then compute probabilities, so that CTA alone leaves units idle,
/// which another one on the same SM uses. Each warp reads all keys and values from shared memory,
/// unless warps share rows: with fewer queries per CTA a query costs more of these reads, and more
/// copies from L2.
fn portable_time(
    portable: &AttentionFwd,
    kernel: &Kernel,
    problem: &AttentionProblem,
    gpu: &CudaProperties,
) -> f64 {
    let (rates, tile) = (GpuRates::of(gpu), portable.tile());
    let pairs = f64::from(tile.block_q) * f64::from(tile.block_kv);
    // Of q and k, and of v and o.
    let columns = tile.head_dims.sum() as f64;
    let row_bytes = columns * tile.types.kv.size() as f64;
    let keys_and_values = f64::from(tile.block_kv) * row_bytes;
    // Of a tile of keys.
    let units = rates.units(&Work {
        flops: 2.0 * pairs * columns,
        exponentials: pairs,
        shared_bytes: (1.0 + f64::from(portable.warps / portable.split)) * keys_and_values,
        copied_bytes: keys_and_values,
    });
    // An exponential, and about as much time again for maxima, sums and conversions.
    let alone = units.multiply + 2.0 * units.exponential;
    let [mean, most] = key_tiles(&tile, problem);
    let rows = |seqlen: usize, heads: usize| problem.batch as f64 * seqlen as f64 * heads as f64;
    let time = rates.clocks(&Grid {
        ctas: tiles(&tile, problem),
        resident: resident(portable.min_blocks, kernel.smem_bytes(), gpu),
        busy: mean * units.busiest(),
        alone: mean * alone,
        longest: most * alone,
        memory_bytes: row_bytes
            * (rows(problem.seqlen_q, problem.num_heads_q)
                + rows(problem.seqlen_kv, problem.num_heads_kv)),
    });
    let doubt = if tile.block_q < WIDE { DOUBT } else { 1.0 };
    doubt * time
}

/// Number of tiles of queries.
#[inline]
fn tiles(tile: &AttentionTile, problem: &AttentionProblem) -> f64 {
    problem.batch as f64
        * (problem.num_heads_q / tile.heads as usize) as f64
        * problem.seqlen_q.div_ceil(tile.queries() as usize) as f64
}

/// Number of key tiles that a tile of queries visits: the mean over a sample, and the maximum.
#[inline]
fn key_tiles(tile: &AttentionTile, problem: &AttentionProblem) -> [f64; 2] {
    const SAMPLES: usize = 8;
    let (seqlen_q, seqlen_kv) = (problem.seqlen_q, problem.seqlen_kv);
    let (block_q, block_kv) = (tile.block_q as usize, tile.block_kv as usize);
    let tiles = seqlen_q.div_ceil(block_q);
    let limits = problem.scores.mask.limits(seqlen_q, seqlen_kv);
    if limits.is_unbounded() || tiles == 0 {
        return [seqlen_kv.div_ceil(block_kv) as f64; 2];
    }
    // Existing sequences are shorter than the bound, and sums of their lengths fit into 64 bits.
    let signed = |length: usize| length.min(1 << 40) as i64;
    let (queries, keys) = (signed(seqlen_q), signed(seqlen_kv));
    let diagonal = if limits.align == Align::TopLeft { 0 } else { keys - queries };
    let key = |key: i64| key.clamp(0, keys) as u64;
    let samples = tiles.min(SAMPLES);
    let visited = (0..samples).map(|i| {
        let first = signed(i * (tiles - 1) / (samples - 1).max(1) * block_q);
        let last = (first + signed(block_q)).min(queries) - 1;
        let start = limits.left.map_or(0, |left| key(first + diagonal - signed(left)));
        let end =
            limits.right.map_or(keys as u64, |right| key(last + diagonal + signed(right) + 1));
        let end = end.div_ceil(block_kv as u64);
        (end - (start / block_kv as u64).min(end)) as f64
    });
    let (sum, most) = visited.fold((0.0, 0.0), |(sum, most): (f64, f64), n| (sum + n, most.max(n)));
    [sum / samples as f64, most]
}

#[cfg(test)]
#[path = "cost_tests.rs"]
mod tests;
