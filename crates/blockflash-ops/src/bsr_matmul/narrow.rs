//! Products with few columns, which do little but read A: where clusters share long strips.

use super::BsrProblem;
use super::parts::Lengths;
use crate::Result;
use crate::check::grid_x;
use blockflash_safe::{BsrMatmulNarrowPlan, CudaProperties, LaunchConfig};
use blockflash_sys::manifest::BsrMatmulNarrow;
use blockflash_sys::params::blockflash_bsr_matmul_params;

/// Columns up to which reading A bounds a product; each tile of columns would read it again.
pub(super) const MOST_COLUMNS: usize = 32;
/// The most CTAs of a cluster that every GPU with clusters allows.
const MOST_CTAS: f64 = 8.0;
/// A CTA's share of a long strip, in means of all CTAs that run at a time. With less, more CTAs
/// than run at a time would wait for one another.
const SHARE: f64 = 1.5;
/// Its fewest windows per warp: sharing a strip costs as much as reading some.
const FEWEST_WINDOWS: f64 = 1.5;

/// Blocks of a block row that are a CTA's share. Several CTAs share block rows that have twice as
/// many.
pub(super) fn share(tile: &BsrMatmulNarrow, problem: &BsrProblem, gpu: &CudaProperties) -> usize {
    let windows_of_block = f64::from(tile.block_size) / f64::from(BsrMatmulNarrow::WINDOW);
    let tiles = (tile.tile().tiles_n(problem.n as u64) * u64::from(tile.strips())) as f64;
    let windows = problem.nnz_blocks as f64 * windows_of_block * tiles;
    let mean = windows / f64::from(gpu.multiprocessors.max(1) * tile.min_blocks);
    let share = (SHARE * mean).max(FEWEST_WINDOWS * f64::from(tile.warps));
    ((share / windows_of_block) as usize).max(1)
}

/// The launch for block rows of these lengths, in the order in which they are taken. `config` is
/// that without clusters.
pub(super) fn launch(
    tile: &BsrMatmulNarrow,
    base: &blockflash_bsr_matmul_params,
    config: &LaunchConfig,
    share: usize,
    lengths: &Lengths,
) -> Result<(BsrMatmulNarrowPlan, LaunchConfig)> {
    let long_strips = lengths.at_least(share.saturating_mul(2)) * tile.strips() as usize;
    if long_strips == 0 {
        return Ok((BsrMatmulNarrowPlan { base: *base, ctas: 1, long_strips: 0 }, *config));
    }
    // As many as the longest has shares, to the nearest power of two.
    let shares = lengths.longest() as f64 / share as f64;
    let ctas = shares.log2().round().exp2().clamp(2.0, MOST_CTAS) as u32;
    let tiles_n = tile.tile().tiles_n(base.n as u64) as usize;
    let strips = config.grid[0] as usize / tiles_n;
    // Not more than the CTAs of a grid.
    let plan = BsrMatmulNarrowPlan { base: *base, ctas, long_strips: long_strips as i32 };
    let blocks = usize::try_from(plan.blocks(strips as i128)).unwrap_or(usize::MAX);
    let grid = [grid_x(&[tiles_n, blocks])?, 1, 1];
    Ok((plan, LaunchConfig { grid, cluster: Some([ctas, 1, 1]), ..*config }))
}

#[cfg(test)]
#[path = "narrow_tests.rs"]
mod tests;
