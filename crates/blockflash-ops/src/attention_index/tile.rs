//! The tiles of the kernels.

use crate::attention::Rows;
use crate::attention_decode::estimate::{TWO_WARPS, pace};
use crate::attention_decode::tile::Tile;
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::{
    AttentionDecode, AttentionIndex, AttentionIndexHopper, AttentionLatent, AttentionLatentHopper,
    AttentionLatentIndexFew, Variant,
};
use blockflash_sys::{ElementTypes, HeadDims, Kernel};

/// The tile of a kernel of attention by an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexTile {
    /// For the list of one query and the heads that share it, divided into splits.
    Listed(AttentionIndex),
    /// For the union of the lists of neighbouring queries, which another kernel finds.
    United(AttentionIndexHopper),
    /// As [`Listed`](Self::Listed), for a cache whose values are the first columns of its keys.
    Latent(LatentIndexTile),
}

/// The tile of a kernel for a cache whose values are the first columns of its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentIndexTile {
    /// Element types of q, of k and v, and of o.
    pub types: ElementTypes,
    /// Head dimensions, of which it takes no others.
    pub head_dims: HeadDims,
    /// Rows of a row tile.
    pub rows: u32,
    /// CTAs of an SM that registers allow.
    pub min_blocks: u32,
    /// How items are divided among CTAs, and splits combined.
    pub scheme: LatentScheme,
}

/// How a kernel for latent rows divides items among CTAs, and combines splits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LatentScheme {
    /// A CTA for each item; the splits of a list are a cluster.
    Clusters,
    /// CTAs take item after item, and combine through the workspace.
    Persistent,
    /// A CTA for each item; they combine through the workspace.
    Tree,
}

impl IndexTile {
    /// Element types of q, of k and v, and of o.
    pub const fn types(&self) -> ElementTypes {
        match self {
            Self::Listed(tile) => tile.tile.types,
            Self::United(tile) => tile.types,
            Self::Latent(tile) => tile.types,
        }
    }

    /// Largest head dimensions.
    pub const fn head_dims(&self) -> HeadDims {
        match self {
            Self::Listed(tile) => tile.tile.head_dims,
            Self::United(tile) => tile.head_dims,
            Self::Latent(tile) => tile.head_dims,
        }
    }

    /// The smallest granularity that it takes.
    pub const fn least_granularity(&self) -> usize {
        match self {
            Self::United(_) => AttentionIndexHopper::LEAST_GRANULARITY as usize,
            Self::Listed(_) | Self::Latent(_) => 1,
        }
    }

    /// Whether it takes caches of latent rows alone.
    pub const fn is_latent(&self) -> bool {
        matches!(self, Self::Latent(_))
    }

    pub(super) fn rows(&self) -> Rows {
        Rows { types: self.types(), head_dims: self.head_dims() }
    }
}

/// The tile of a kernel of attention by an index; `None` for other kernels.
pub fn tile(kernel: &Kernel) -> Option<IndexTile> {
    let latent = match kernel.variant {
        Variant::AttentionIndex(tile) => return Some(IndexTile::Listed(tile)),
        Variant::AttentionIndexHopper(tile) => return Some(IndexTile::United(tile)),
        Variant::AttentionLatentIndex(index) => {
            let AttentionLatent { types, head_dims, .. } = index.tile;
            let (rows, min_blocks) = (AttentionLatent::ROWS, AttentionLatent::MIN_BLOCKS);
            let scheme = LatentScheme::Tree;
            LatentIndexTile { types, head_dims, rows, min_blocks, scheme }
        }
        Variant::AttentionLatentIndexFew(AttentionLatentIndexFew { types, head_dims }) => {
            let rows = AttentionLatentIndexFew::ROWS;
            let min_blocks = AttentionLatentIndexFew::MIN_BLOCKS;
            let scheme = LatentScheme::Clusters;
            LatentIndexTile { types, head_dims, rows, min_blocks, scheme }
        }
        Variant::AttentionLatentIndexHopper(index) => {
            let AttentionLatentHopper { types, head_dims } = index.tile;
            let rows = AttentionLatentHopper::ROWS;
            let min_blocks = AttentionLatentHopper::MIN_BLOCKS;
            let scheme = LatentScheme::Persistent;
            LatentIndexTile { types, head_dims, rows, min_blocks, scheme }
        }
        _ => return None,
    };
    Some(IndexTile::Latent(latent))
}

/// What the division of lists follows from.
pub(super) fn split_tile(kernel: &Kernel, tile: &AttentionDecode, gpu: &CudaProperties) -> Tile {
    let [item, alone, beside] = pace(tile.rows as usize);
    let slower = if tile.warps == 2 { TWO_WARPS } else { 1.0 };
    Tile {
        rows: tile.rows as usize,
        blocks: blocks(kernel, tile.min_blocks, gpu),
        heads_and_splits: 1,
        fewest_keys: 64,
        runs: &[1],
        counts_lengths: false,
        stores_runs: true,
        pace: [item, alone * slower, beside * slower],
        fills: false,
        cluster: kernel.most_in_cluster().unwrap_or(1) as usize,
        columns: tile.head_dims.max(),
    }
}

/// CTAs of a kernel that an SM has room for.
pub(super) fn blocks(kernel: &Kernel, by_registers: u32, gpu: &CudaProperties) -> u32 {
    let by_memory = gpu.smem_per_multiprocessor / (kernel.smem_bytes() + 1024).max(1);
    by_memory.clamp(1, by_registers.max(1))
}
