//! How lists of rows of latent caches are divided among items.

use super::IndexAttentionProblem;
use super::division::Division;
use super::tile::{LatentIndexTile, LatentScheme, blocks};
use crate::Result;
use blockflash_safe::CudaProperties;
use blockflash_sys::Kernel;

/// Fewest positions of a split: the end of an item takes as long as about as many keys.
const SHORTEST: usize = 128;

/// Sizes of clusters, each of which has one split of a list in each CTA.
const CLUSTERS: [usize; 7] = [16, 8, 6, 5, 4, 3, 2];

/// Clusters of this many CTAs that run at a time, on this many multiprocessors: those of a GPC are
/// not a multiple of them. An H200 has 7 clusters of 16 on its 132, 15 of 8, 17 of 6, 22 of 5, 30
/// of 4 and 39 of 3 (`kernels/attention_latent_index_sm80/NOTES.md`), as if it had 7 GPCs of 16,
/// one of 8, and pairs.
fn clusters_at_once(size: usize, multiprocessors: usize) -> usize {
    const GPC: usize = 16;
    match size {
        ..=2 => multiprocessors / size.max(1),
        _ => (multiprocessors / GPC).saturating_sub(1) * (GPC / size) + GPC / 2 / size,
    }
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
            LatentScheme::Clusters => CLUSTERS.into_iter().find(fits).unwrap_or(1),
            LatentScheme::Persistent | LatentScheme::Tree => (slots / row_tiles).max(1),
        };
        self.in_splits(splits.min(most), tile.rows as usize)
    }
}
