//! How lists of rows of latent caches are divided among items.

use super::IndexAttentionProblem;
use super::division::Division;
use super::tile::{LatentIndexTile, LatentScheme, blocks};
use crate::Result;
use blockflash_safe::CudaProperties;
use blockflash_sys::Kernel;

/// Fewest positions of a split: the end of an item takes as long as about as many keys.
const SHORTEST: usize = 128;

/// Clusters of this many CTAs that run at a time, on this many multiprocessors: those of a GPC are
/// not a multiple of them. An H200 has 7 clusters of 16 on its 132, 15 of 8 and 30 of 4
/// (`kernels/attention_latent_index_sm80/NOTES.md`).
fn clusters_at_once(size: usize, multiprocessors: usize) -> usize {
    let part = match size {
        ..=2 => 1.0,
        3..=8 => 0.91,
        _ => 0.85,
    };
    (multiprocessors as f64 * part) as usize / size
}

impl IndexAttentionProblem {
    /// Divides the lists among the items of a kernel for latent rows.
    pub(super) fn divided_latents(
        &self,
        kernel: &Kernel,
        tile: &LatentIndexTile,
        gpu: &CudaProperties,
    ) -> Result<Division> {
        if self.batch_invariant {
            return self.by_capacity(tile.rows as usize);
        }
        let multiprocessors = gpu.multiprocessors.max(1) as usize;
        let slots = multiprocessors * blocks(kernel, tile.min_blocks, gpu) as usize;
        let row_tiles = self.row_tiles(tile.rows as usize).max(1);
        let most = self.positions().div_ceil(SHORTEST).max(1);
        let fits = |size: &usize| row_tiles <= clusters_at_once(*size, multiprocessors);
        let splits = match tile.scheme {
            LatentScheme::Clusters => [16, 8, 4, 2].into_iter().find(fits).unwrap_or(1),
            LatentScheme::Persistent | LatentScheme::Tree => (slots / row_tiles).max(1),
        };
        self.in_splits(splits.min(most), tile.rows as usize)
    }
}
