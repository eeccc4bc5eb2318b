use super::division::divided;
use super::estimate::most_room;
use super::params::scalars;
use super::select::{is_many, others, select};
use super::tile::{Tile, split_tile};
use super::{AttentionDecodeProblem, AttentionDecodeWorkspace};
use crate::check::persistent_grid;
use crate::selection::{fits, tile_of, unsupported};
use crate::{Error, Result};
use blockflash_safe::{AttentionDecodeScalars, CudaProperties, LaunchConfig};
use blockflash_sys::Kernel;

/// A launch as plain data. Sizes, strides and pointers come from the tensors.
#[derive(Clone, Copy, Debug)]
pub struct AttentionDecodePlan {
    /// What the tensors do not say.
    pub scalars: AttentionDecodeScalars,
    /// Items of all row tiles of all heads that the call can have.
    pub items: usize,
    /// Rows of a tile that can be in use.
    pub partial_rows: usize,
    /// Grid, block and shared memory.
    pub config: LaunchConfig,
}

/// Plans the launch of `kernel` for a problem that it accepts on this GPU.
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
    let most = tile.most_blocks(gpu);
    let mut division = divided(&tile, gpu, problem, most_queries)?;
    let multiprocessors = gpu.multiprocessors.max(1) as usize;
    if tile.stores_runs {
        division = division.in_runs(problem, &tile, [most, most / multiprocessors]);
    }
    let blocks = persistent_grid(division.items, most)?;
    let waits = kernel.waits_for_predecessor();
    let config = match division.in_clusters(&tile, problem, multiprocessors) {
        None => LaunchConfig::of(kernel, blocks, waits),
        Some([clusters, size]) => LaunchConfig {
            cluster: Some([size, 1, 1]),
            ..LaunchConfig::of(kernel, clusters * size, waits)
        },
    };
    let (items, partial_rows) = (division.items, division.partial_rows);
    let scalars = scalars(problem, &division)?;
    Ok(AttentionDecodePlan { scalars, items, partial_rows, config })
}

fn few_tile(
    kernel: &Kernel,
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Result<Tile> {
    let tile = tile_of::<AttentionDecodeProblem>(kernel, &gpu.compute_capability)?;
    split_tile(kernel, &tile, problem, gpu).ok_or_else(|| {
        let what = format!("{}: this kernel has another plan", kernel.symbol());
        unsupported::<AttentionDecodeProblem>(&gpu.compute_capability, what)
    })
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
    let room = match others(kernel, problem, gpu)? {
        // A longer sequence, or a larger batch, may have fewer splits, or a kernel without.
        None if problem.splits_by_batch() && !problem.has_many() => most_room(problem, gpu),
        None if is_many(kernel) && problem.is_estimated() && !problem.has_many() => {
            // A smaller batch may have another kernel, which needs most with the most sequences.
            let problem = AttentionDecodeProblem { batch_invariant: true, ..*problem };
            return workspace_bytes(select(&problem, gpu)?, &problem, gpu);
        }
        None if is_many(kernel) => return Ok(0),
        others => {
            let (kernel, most_queries) = others.unwrap_or((kernel, problem.attention.seqlen_q));
            let tile = few_tile(kernel, problem, gpu)?;
            divided(&tile, gpu, problem, most_queries)?.room(problem)
        }
    };
    let bytes = room.and_then(|[sums, words]| {
        AttentionDecodeWorkspace::bytes_for(sums, words).filter(|&b| isize::try_from(b).is_ok())
    });
    let limit = isize::MAX as usize;
    bytes.ok_or(Error::TooLarge { what: "workspace", value: usize::MAX, limit })
}
