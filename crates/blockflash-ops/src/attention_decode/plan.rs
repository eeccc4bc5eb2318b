use super::division::{Tile, divided};
use super::params::params;
use super::select::{CacheTile, is_many, others};
use super::{AttentionDecodeProblem, AttentionDecodeWorkspace};
use crate::check::{grid_x, to_i32};
use crate::selection::{fits, tile_of, unsupported};
use crate::{Error, Result};
use blockflash_safe::{CudaProperties, LaunchConfig};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::AttentionDecodeHopper;
use blockflash_sys::params::blockflash_attention_decode_params;

/// A launch as plain data, without pointers.
#[derive(Clone, Copy, Debug)]
pub struct AttentionDecodePlan {
    /// The kernel argument.
    pub params: blockflash_attention_decode_params,
    /// Splits of an item, where a kernel takes several.
    pub run: i32,
    /// Grid, block and shared memory.
    pub config: LaunchConfig,
}

/// Fills the kernel argument and the launch configuration of `kernel` for a problem that it accepts
/// on this GPU.
///
/// # Errors
/// [`Error::Misaligned`] for a stride that is not a multiple of 8 elements, [`Error::TooLarge`] for
/// more items than 32 bits count, [`Error::Unsupported`] if the kernel does not compute this
/// problem.
pub fn plan(
    kernel: &Kernel,
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Result<AttentionDecodePlan> {
    plan_few(kernel, problem, gpu, problem.attention.seqlen_q)
}

/// Like [`plan`] for the sequences with at most this many queries.
pub(super) fn plan_few(
    kernel: &Kernel,
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
    most_queries: usize,
) -> Result<AttentionDecodePlan> {
    fits(kernel, problem, gpu)?;
    let tile = few_tile(kernel, problem, gpu)?;
    let most = most_blocks(kernel, &tile, gpu);
    let mut division = divided(&tile, most, problem, most_queries)?;
    let multiprocessors = gpu.multiprocessors.max(1) as usize;
    if tile.runs == [1] {
        division = division.in_runs(problem, &tile, [most, most / multiprocessors]);
    }
    // Each CTA asks once for an item past the last one.
    let blocks = grid_x(&[division.items.min(most)])?;
    grid_x(&[division.items.saturating_add(2 * blocks as usize)])?;
    let waits = kernel.waits_for_predecessor();
    let most = kernel.most_in_cluster().map(|most| most as usize);
    let config = match most.and_then(|most| division.in_clusters(most, problem, multiprocessors)) {
        None => LaunchConfig::of(kernel, blocks, waits),
        Some([clusters, size]) => LaunchConfig {
            cluster: Some([size, 1, 1]),
            ..LaunchConfig::of(kernel, clusters * size, waits)
        },
    };
    let run = to_i32("run", division.run)?;
    Ok(AttentionDecodePlan { params: params(problem, &division)?, run, config })
}

/// CTAs that a GPU has room for. They are persistent and take item after item.
fn most_blocks(kernel: &Kernel, tile: &Tile, gpu: &CudaProperties) -> usize {
    let per_multiprocessor = gpu.smem_per_multiprocessor / (kernel.smem_bytes() + 1024).max(1);
    let per_multiprocessor = per_multiprocessor.clamp(1, tile.blocks.max(1));
    gpu.multiprocessors.max(1).saturating_mul(per_multiprocessor) as usize
}

fn few_tile(
    kernel: &Kernel,
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Result<Tile> {
    match tile_of::<AttentionDecodeProblem>(kernel, &gpu.compute_capability)? {
        CacheTile::Few(tile) => {
            let (rows, blocks) = (tile.rows as usize, tile.min_blocks);
            let fewest_keys = problem.fewest_keys_of_a_split();
            Ok(Tile { rows, blocks, heads_and_splits: 128, fewest_keys, runs: &[1] })
        }
        CacheTile::Several(_) => {
            let (rows, blocks) = (AttentionDecodeHopper::ROWS, AttentionDecodeHopper::MIN_BLOCKS);
            let (rows, runs) = (rows as usize, &[8, 4, 1]);
            // The end of a split takes longer with more rows. One sequence gives work to two CTAs
            // of each SM.
            let fewest_keys = if problem.group_rows() > rows / 2 { 512 } else { 256 };
            Ok(Tile { rows, blocks, heads_and_splits: 256, fewest_keys, runs })
        }
        CacheTile::Many(_) => {
            let what = format!("{}: this kernel has another plan", kernel.symbol());
            Err(unsupported::<AttentionDecodeProblem>(&gpu.compute_capability, what))
        }
    }
}

/// Bytes of an [`AttentionDecodeWorkspace`] that a kernel needs for a problem that it accepts: for
/// each item its partial outputs and two numbers per row in f32, and a word. A kernel for many
/// queries needs what the one for the other sequences does.
///
/// # Errors
/// As [`plan`]; [`Error::TooLarge`] beyond the address space.
pub fn workspace_bytes(
    kernel: &Kernel,
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Result<usize> {
    fits(kernel, problem, gpu)?;
    let (kernel, most_queries) = match others(kernel, problem, gpu)? {
        Some(others) => others,
        None if is_many(kernel) => return Ok(0),
        None => (kernel, problem.attention.seqlen_q),
    };
    let tile = few_tile(kernel, problem, gpu)?;
    let most = most_blocks(kernel, &tile, gpu);
    let bytes =
        divided(&tile, most, problem, most_queries)?.room(problem).and_then(|[sums, words]| {
            AttentionDecodeWorkspace::bytes_for(sums, words).filter(|&b| isize::try_from(b).is_ok())
        });
    let limit = isize::MAX as usize;
    bytes.ok_or(Error::TooLarge { what: "workspace", value: usize::MAX, limit })
}
