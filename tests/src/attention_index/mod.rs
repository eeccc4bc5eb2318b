//! Attention by an index: cases, their numbers and lists, the reference, and the harness that runs
//! a case on a device and judges every output.

mod case;
mod checks;
mod data;
mod garbage;
mod run;
mod stored;

pub use case::{IndexCase, IndexForm, KeyLayout, RowKind};
pub use checks::{lists_alone_as_in_a_batch, replays_of_lists, same_bits_of_lists};
pub use data::IndexData;
pub use garbage::lists_survive_garbage;
pub use run::{run_index_case, run_or_refuse_lists};

use crate::gpu::Gpu;
use blockflash_ops::DType;
use blockflash_ops::attention_index::{IndexTile, tile};
use blockflash_sys::Kernel;
use std::collections::BTreeMap;

/// Kernels with their tiles, by what they are made for.
pub type IndexGroup = (IndexForm, Vec<(&'static Kernel, IndexTile)>);

/// The kernels of attention by an index that a GPU can run.
pub fn index_groups(gpu: &Gpu) -> Vec<IndexGroup> {
    let mut groups: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for kernel in gpu.kernels() {
        let Some(tile) = tile(kernel) else { continue };
        let types = tile.types();
        let rows = match (types.kv, tile.is_latent()) {
            (DType::U8, _) => RowKind::LatentCodes,
            (_, true) => RowKind::Latent,
            (kv, false) if kv.is_code() => RowKind::Codes,
            (_, false) => RowKind::Plain,
        };
        let form = IndexForm { dtype: types.q, head_dims: tile.head_dims(), rows };
        groups.entry(form).or_default().push((kernel, tile));
    }
    groups.into_iter().collect()
}
