//! Attention to caches whose values are the first columns of the keys: cases, their numbers, the
//! reference, and the harness that runs a case on a device and judges every output.

mod case;
mod checks;
mod garbage;
pub(crate) mod rows;
mod run;

pub use case::{LatentCase, latent_cases};
pub use checks::{alone_as_in_a_batch, replays_of_latents, same_bits_of_latents};
pub use garbage::latents_survive_garbage;
pub use run::{LatentData, run_latent_case, run_or_refuse_latents};

use crate::gpu::Gpu;
use blockflash_ops::attention_decode::{CacheTile, LatentTile, tile};
use blockflash_ops::{DType, HeadDims};
use blockflash_sys::Kernel;
use std::collections::BTreeMap;

/// The element type of queries and outputs, head dimensions, and whether rows of the cache are
/// codes; otherwise they have the type of the queries.
pub type LatentForm = (DType, HeadDims, bool);

/// Kernels for latent rows with their tiles.
pub type LatentGroup = (LatentForm, Vec<(&'static Kernel, LatentTile)>);

/// The kernels for latent rows that a GPU can run.
pub fn latent_groups(gpu: &Gpu) -> Vec<LatentGroup> {
    let mut groups: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for kernel in gpu.kernels() {
        if let Some(CacheTile::Latent(tile)) = tile(kernel) {
            let form = (tile.types.q, tile.head_dims, tile.types.kv == DType::U8);
            groups.entry(form).or_default().push((kernel, tile));
        }
    }
    groups.into_iter().collect()
}
