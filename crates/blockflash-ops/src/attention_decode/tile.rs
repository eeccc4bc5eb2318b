//! The tiles of the kernels, and what the division of the work follows from.

use super::AttentionDecodeProblem;
use super::estimate::{LATENT_PACE, TWO_WARPS, pace};
use crate::attention::Rows;
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::{
    AttentionCacheHopper, AttentionDecode as FewTile, AttentionDecodeHopper, AttentionLatent,
    AttentionLatentHopper, Variant,
};
use blockflash_sys::{ElementTypes, HeadDims, Kernel};

/// The tile of a kernel of attention to a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheTile {
    /// For few queries of a sequence.
    Few(FewTile),
    /// For several.
    Several(AttentionDecodeHopper),
    /// For many.
    Many(AttentionCacheHopper),
    /// For a cache whose values are the first columns of its keys.
    Latent(LatentTile),
}

/// The tile of a kernel for a cache whose values are the first columns of its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentTile {
    /// Element types of q, of k and v, and of o.
    pub types: ElementTypes,
    /// Head dimensions, of which it takes no others.
    pub head_dims: HeadDims,
    /// Rows of a row tile.
    pub rows: u32,
    /// CTAs of an SM that registers allow.
    pub min_blocks: u32,
    /// Whether it is for Hopper alone.
    pub hopper: bool,
}

impl From<AttentionLatent> for LatentTile {
    fn from(AttentionLatent { types, head_dims, .. }: AttentionLatent) -> Self {
        let (rows, min_blocks) = (AttentionLatent::ROWS, AttentionLatent::MIN_BLOCKS);
        Self { types, head_dims, rows, min_blocks, hopper: false }
    }
}

impl From<AttentionLatentHopper> for LatentTile {
    fn from(AttentionLatentHopper { types, head_dims }: AttentionLatentHopper) -> Self {
        let (rows, min_blocks) = (AttentionLatentHopper::ROWS, AttentionLatentHopper::MIN_BLOCKS);
        Self { types, head_dims, rows, min_blocks, hopper: true }
    }
}

impl CacheTile {
    /// Element types of q, of k and v, and of o.
    pub const fn types(&self) -> ElementTypes {
        match self {
            Self::Few(tile) => tile.types,
            Self::Several(tile) => tile.types,
            Self::Many(tile) => tile.tile.types,
            Self::Latent(tile) => tile.types,
        }
    }

    pub(super) const fn is_latent(&self) -> bool {
        matches!(self, Self::Latent(_))
    }

    pub(super) fn rows(&self) -> Rows {
        Rows { types: self.types(), head_dims: self.head_dims() }
    }

    /// Largest head dimensions.
    pub const fn head_dims(&self) -> HeadDims {
        match self {
            Self::Few(tile) => tile.head_dims,
            Self::Several(tile) => tile.head_dims,
            Self::Many(tile) => tile.tile.head_dims,
            Self::Latent(tile) => tile.head_dims,
        }
    }
}

/// The tile of a kernel of attention to a cache; `None` for other kernels.
pub fn tile(kernel: &Kernel) -> Option<CacheTile> {
    match kernel.variant {
        Variant::AttentionDecode(tile) => Some(CacheTile::Few(tile)),
        Variant::AttentionDecodeHopper(tile) => Some(CacheTile::Several(tile)),
        Variant::AttentionCacheHopper(tile) => Some(CacheTile::Many(tile)),
        Variant::AttentionLatent(tile) => Some(CacheTile::Latent(tile.into())),
        Variant::AttentionLatentHopper(tile) => Some(CacheTile::Latent(tile.into())),
        _ => None,
    }
}

/// What the division of the work follows from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile {
    pub(crate) rows: usize,
    /// CTAs of an SM at most.
    pub(crate) blocks: u32,
    /// Key heads times splits of a sequence of medium length.
    pub(crate) heads_and_splits: usize,
    /// Fewest keys of a split.
    pub(crate) fewest_keys: usize,
    /// Splits that an item may have, the most first.
    pub(crate) runs: &'static [usize],
    /// Whether the kernel can divide the keys of all sequences by lengths on the device.
    pub(crate) counts_lengths: bool,
    /// Whether an item may have several splits, each with a result of its own.
    pub(crate) stores_runs: bool,
    /// Nanoseconds by which launches are estimated: [`pace`].
    pub(crate) pace: [f64; 3],
    /// Whether splits follow from the batch where lengths are on the device.
    pub(crate) fills: bool,
    /// Most CTAs of a cluster that combines splits; 1 for none.
    pub(crate) cluster: usize,
    /// Columns that are read of a key and of its value, half of both.
    pub(crate) columns: usize,
}

impl Tile {
    /// CTAs that a GPU has room for. They are persistent and take item after item.
    pub(crate) fn most_blocks(&self, gpu: &CudaProperties) -> usize {
        gpu.multiprocessors.max(1) as usize * self.blocks.max(1) as usize
    }

    /// Clusters that combine the splits of each of these row tiles, one for each group of `splits`,
    /// and the CTAs of a cluster, which has room for `most_splits`. `None` without clusters, and
    /// where they would be too many: CTAs of a cluster share multiprocessors while others are free,
    /// so they are for half of the GPU, or for all of it where the groups have to be combined, too.
    pub(crate) fn clusters(
        &self,
        row_tiles: usize,
        [splits, most_splits]: [usize; 2],
        multiprocessors: usize,
    ) -> Option<[usize; 2]> {
        if self.cluster <= 1 {
            return None;
        }
        let groups = splits.div_ceil(self.cluster);
        let size = most_splits.min(self.cluster).next_power_of_two();
        let clusters = row_tiles.checked_mul(groups)?;
        let ctas = clusters.checked_mul(size)?;
        let room = if groups > 1 { multiprocessors } else { multiprocessors / 2 };
        (ctas <= room).then_some([clusters, size])
    }
}

/// Fewest keys of a split of latent rows, whose partial results are as large as 28 keys. With 128
/// one sequence of 8,192 keys took 32 µs on an H200, with 256 it takes 18
/// (`kernels/attention_latent_sm90a/NOTES.md`).
const LATENT_SPLIT: usize = 256;

/// What the division of the work follows from; `None` for a kernel that splits no keys.
pub(super) fn split_tile(
    kernel: &Kernel,
    tile: &CacheTile,
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Option<Tile> {
    let (rows, heads_and_splits, by_registers, fewest_keys, runs): (_, _, _, _, &[usize]) =
        match tile {
            CacheTile::Few(tile) => {
                (tile.rows, 128, tile.min_blocks, problem.fewest_keys_of_a_split(), &[1])
            }
            CacheTile::Several(_) => {
                let (rows, blocks) =
                    (AttentionDecodeHopper::ROWS, AttentionDecodeHopper::MIN_BLOCKS);
                // The end of a split takes longer with more rows. One sequence gives work to two
                // CTAs of each SM.
                let fewest = if problem.group_rows() > rows as usize / 2 { 512 } else { 256 };
                (rows, 256, blocks, fewest, &[8, 4, 1])
            }
            CacheTile::Latent(tile) => (tile.rows, 32, tile.min_blocks, LATENT_SPLIT, &[1]),
            CacheTile::Many(_) => return None,
        };
    let is_hopper = matches!(tile, CacheTile::Latent(tile) if tile.hopper);
    let by_memory = gpu.smem_per_multiprocessor / (kernel.smem_bytes() + 1024).max(1);
    Some(Tile {
        rows: rows as usize,
        blocks: by_memory.clamp(1, by_registers.max(1)),
        heads_and_splits,
        fewest_keys,
        runs,
        counts_lengths: matches!(tile, CacheTile::Several(_)) || is_hopper,
        stores_runs: runs == [1] && !tile.is_latent(),
        pace: match tile {
            _ if is_hopper => LATENT_PACE,
            CacheTile::Few(few) if few.warps == 2 && !few.has_codes() => {
                let [item, alone, beside] = pace(rows as usize);
                [item, alone * TWO_WARPS, beside * TWO_WARPS]
            }
            _ => pace(rows as usize),
        },
        fills: tile.is_latent() && !is_hopper,
        cluster: kernel.most_in_cluster().unwrap_or(1) as usize,
        columns: match tile {
            CacheTile::Latent(tile) => tile.head_dims.qk / 2,
            _ => tile.head_dims().max(),
        },
    })
}
