use super::division::divided;
use super::estimate::most_room;
use super::many;
use super::params::scalars;
use super::select::{accepts, is_many, others};
use super::tile::{CacheTile, Tile, split_tile};
use super::{AttentionDecodeProblem, AttentionDecodeWorkspace};
use crate::check::persistent_grid;
use crate::selection::{Problem, fits, tile_of, unsupported};
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

/// Numbers and words of the workspace of any kernel: that of a longer sequence, or of a larger
/// batch, may have fewer splits, or be another kernel.
fn most_of_any(
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Result<Option<[usize; 2]>> {
    let mut most = Some([0; 2]);
    let kernels = AttentionDecodeProblem::kernels().iter().flat_map(|peers| &peers.kernels);
    for (kernel, tile) in kernels.filter(|(kernel, _)| accepts(kernel, problem, gpu).is_ok()) {
        let room = match (tile, split_tile(kernel, tile, problem, gpu)) {
            (CacheTile::Many(tile), _) => many::room(tile, problem, gpu),
            (_, Some(_)) if problem.has_many() => continue,
            (_, Some(_)) if problem.splits_by_batch() => most_room(problem, gpu),
            (_, Some(tile)) => {
                divided(&tile, gpu, problem, problem.attention.seqlen_q)?.room(problem)
            }
            (_, None) => continue,
        };
        most = most.zip(room).map(|([a, b], [c, d])| [a.max(c), b.max(d)]);
    }
    Ok(most)
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
        None if problem.is_estimated() => most_of_any(problem, gpu)?,
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
