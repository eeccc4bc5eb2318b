use super::IndexAttentionProblem;
use super::division::Division;
use super::tile::{IndexTile, LatentScheme, blocks, split_tile};
use super::united::{Unions, box_rows, union};
use crate::attention::{check_strides, check_strides_by, score_params};
use crate::attention_decode::AttentionDecodeWorkspace;
use crate::check::{grid_x, persistent_grid, to_i32};
use crate::selection::{fits, tile_of, unsupported};
use crate::{Error, Result};
use blockflash_safe::{AttentionIndexPlan, CudaProperties, IndexUnionPlan, LaunchConfig};
use blockflash_sys::Kernel;

/// The launches of a call as plain data. Sizes, strides and pointers come from the tensors.
#[derive(Clone, Debug)]
pub struct IndexAttentionPlan {
    /// Bytes of the workspace that they need.
    pub workspace_bytes: usize,
    pub(super) launches: Launches,
}

/// The launches of a call.
#[derive(Clone, Debug)]
pub(super) enum Launches {
    /// Of a kernel that computes each query alone.
    Listed { plan: AttentionIndexPlan, config: LaunchConfig },
    /// Pairs of one that unites the lists of neighbouring queries and one that computes them.
    United { union: &'static Kernel, pairs: Vec<United> },
}

/// A pair of launches for some of the tiles.
#[derive(Clone, Copy, Debug)]
pub(super) struct United {
    pub(super) plan: IndexUnionPlan,
    /// Of the kernel that unites lists, and of the one that computes attention.
    pub(super) configs: [LaunchConfig; 2],
}

/// Plans the launches of `kernel` for a problem that it accepts on this GPU.
///
/// # Errors
/// [`Error::Misaligned`] for a stride that is not a multiple of 8 elements, [`Error::TooLarge`] for
/// more parts of lists than 32 bits count, [`Error::Unsupported`] if the kernel does not compute
/// this problem.
pub fn plan(
    kernel: &Kernel,
    problem: &IndexAttentionProblem,
    gpu: &CudaProperties,
) -> Result<IndexAttentionPlan> {
    fits(kernel, problem, gpu)?;
    problem.check_strides()?;
    match tile_of::<IndexAttentionProblem>(kernel, &gpu.compute_capability)? {
        IndexTile::Listed(tile) => {
            let tile = split_tile(kernel, &tile.tile, gpu);
            let division = problem.divided(&tile, gpu)?;
            let blocks = persistent_grid(division.items(), tile.most_blocks(gpu))?;
            let waits = kernel.waits_for_predecessor();
            let multiprocessors = gpu.multiprocessors.max(1) as usize;
            let config = match division.in_clusters(&tile, multiprocessors) {
                None => LaunchConfig::of(kernel, blocks, waits),
                Some([ctas, size]) => LaunchConfig {
                    cluster: Some([size, 1, 1]),
                    ..LaunchConfig::of(kernel, ctas, waits)
                },
            };
            listed(problem, &division, config)
        }
        IndexTile::Latent(tile) => {
            let division = problem.divided_latents(kernel, &tile, gpu)?;
            let items = division.items();
            let blocks = match tile.scheme {
                LatentScheme::Persistent => {
                    let most = gpu.multiprocessors.max(1) * blocks(kernel, tile.min_blocks, gpu);
                    persistent_grid(items, most as usize)?
                }
                LatentScheme::Clusters | LatentScheme::Tree => grid_x(&[items])?,
            };
            let config = LaunchConfig::of(kernel, blocks, kernel.waits_for_predecessor());
            let is_cluster = tile.scheme == LatentScheme::Clusters && division.splits > 1;
            let cluster = is_cluster.then_some([division.splits as u32, 1, 1]);
            listed(problem, &division, LaunchConfig { cluster, ..config })
        }
        IndexTile::United(tile) => {
            let Some((union, _)) = union(gpu) else {
                let what = format!("{}: nothing unites lists", kernel.symbol());
                return Err(unsupported::<IndexAttentionProblem>(&gpu.compute_capability, what));
            };
            let unions = Unions::of(problem)?;
            let whole = Division { chunk: 64, splits: 1, run_log2: 0, row_tiles: 0, rows: 0 };
            let index = problem.scalars(&whole)?;
            let box_rows = to_i32("box_rows", box_rows(&tile, problem))?;
            let pair = |first: usize| -> Result<United> {
                let count = unions.at_once.min(unions.tiles - first);
                let ctas = persistent_grid(count, gpu.multiprocessors.max(1) as usize)?;
                let (first, tiles) = (to_i32("tiles", first)?, to_i32("tiles", count)?);
                let config = |kernel: &Kernel, blocks| {
                    LaunchConfig::of(kernel, blocks, kernel.waits_for_predecessor())
                };
                Ok(United {
                    plan: IndexUnionPlan { index, first, count: tiles, box_rows },
                    configs: [config(union, grid_x(&[count])?), config(kernel, ctas)],
                })
            };
            let pairs = (0..unions.tiles).step_by(unions.at_once).map(pair);
            let pairs = pairs.collect::<Result<_>>()?;
            Ok(IndexAttentionPlan {
                workspace_bytes: bytes(Some([unions.words, 1]))?,
                launches: Launches::United { union, pairs },
            })
        }
    }
}

/// One launch for lists that are divided like this.
fn listed(
    problem: &IndexAttentionProblem,
    division: &Division,
    config: LaunchConfig,
) -> Result<IndexAttentionPlan> {
    let plan = problem.scalars(division)?;
    let workspace_bytes = bytes(division.room(problem.attention.head_dims.v))?;
    Ok(IndexAttentionPlan { workspace_bytes, launches: Launches::Listed { plan, config } })
}

/// Bytes of a workspace with room for numbers of 32 bits and counters.
fn bytes(room: Option<[usize; 2]>) -> Result<usize> {
    let bytes = room.and_then(|[sums, words]| {
        AttentionDecodeWorkspace::bytes_for(sums, words).filter(|&b| isize::try_from(b).is_ok())
    });
    let limit = isize::MAX as usize;
    bytes.ok_or(Error::TooLarge { what: "workspace", value: usize::MAX, limit })
}

impl IndexAttentionProblem {
    /// Checks the strides of queries, outputs and the cache.
    fn check_strides(&self) -> Result<()> {
        let (attention, cache) = (&self.attention, &self.cache);
        let queries = [attention.batch, attention.seqlen_q, attention.num_heads_q];
        let keys = [cache.pages, cache.page_size, cache.num_heads_kv];
        check_strides(&[("q", attention.q, queries), ("o", attention.o, queries)])?;
        let of_chunk = 16 / cache.dtype.size();
        check_strides_by(of_chunk, &[("cache.k", cache.k, keys), ("cache.v", cache.v, keys)])
    }

    /// What the tensors do not say.
    fn scalars(&self, division: &Division) -> Result<AttentionIndexPlan> {
        let attention = &self.attention;
        Ok(AttentionIndexPlan {
            scores: score_params(attention),
            longest: to_i32("seqlen_q", attention.seqlen_q)?,
            longest_kv: to_i32("capacity", self.cache.capacity)?,
            granularity_log2: self.lists.granularity.trailing_zeros() as i32,
            chunk: to_i32("chunk", division.chunk)?,
            run_log2: division.run_log2 as i32,
        })
    }
}
