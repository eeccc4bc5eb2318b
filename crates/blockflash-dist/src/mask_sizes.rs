//! What a distributed block mask and its exchange are made for.

use crate::band::Band;
use crate::grid::Grid;
use crate::plan::PARTS;
use crate::{Communicator, Error, Result, Scheme, Shard};
use blockflash_ops::{BlockGeometry, BlockMask, Mask};
use std::hash::{DefaultHasher, Hash, Hasher};

/// What the ranks have in common, and the place of this one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) grid: Grid,
    pub(crate) mask: Mask,
    pub(crate) band: Band,
    /// Of the whole sequence.
    pub(crate) geometry: BlockGeometry,
    pub(crate) batch: usize,
    /// Of the mask, on all ranks of a group.
    pub(crate) heads: usize,
}

impl Sizes {
    pub(crate) fn new(
        lists: &BlockMask,
        mask: Mask,
        shard: Shard,
        scheme: Scheme,
    ) -> Result<Sizes> {
        let grid = Grid::of(scheme, shard)?;
        let unsupported = |what| Error::Unsupported { scheme, what };
        let band = Band::of(mask, shard.seqlen()).ok_or(unsupported("the mask"))?;
        if scheme.keys > 1 && !band.is_simple() {
            return Err(unsupported("a block mask with a window"));
        }
        if lists.cu_rows().is_some() {
            return Err(unsupported("packed sequences"));
        }
        if lists.bits().is_some() {
            return Err(unsupported("a block mask with partial blocks"));
        }
        if !lists.device().is_cpu() {
            return Err(unsupported("lists on a GPU"));
        }
        let (batch, heads) = (lists.batch(), lists.heads());
        let found = [lists.seqlen_q(), lists.seqlen_kv()];
        let expected = [shard.rows(), shard.seqlen()];
        let error =
            |what, found: String, expected: String| Err(Error::BlockMask { what, found, expected });
        if found != expected {
            return error("queries and keys", format!("{found:?}"), format!("{expected:?}"));
        }
        let blocks = [lists.block_q(), lists.block_kv()];
        if !blocks.iter().all(|&block| shard.block().is_multiple_of(block)) {
            let expected = format!("divisors of the {} rows of a block of rows", shard.block());
            return error("blocks", format!("{blocks:?}"), expected);
        }
        if heads != 1 && !heads.is_multiple_of(scheme.heads) {
            return error(
                "heads",
                heads.to_string(),
                format!("1 or a multiple of {}", scheme.heads),
            );
        }
        let geometry =
            BlockGeometry::new(shard.seqlen(), shard.seqlen(), lists.block_q(), lists.block_kv())?;
        Ok(Sizes { grid, mask, band, geometry, batch, heads })
    }

    /// Parts of the heads that need lists of their own where keys are gathered: 1 if one list
    /// serves them, 0 if keys come by steps.
    pub(crate) fn parts(&self, comm: &dyn Communicator) -> usize {
        let gathers = comm.gathers() && self.grid.scheme.heads == 1 && self.grid.scheme.keys > 1;
        let divides = self.heads > 1 && self.heads.is_multiple_of(PARTS);
        match gathers {
            true if divides => PARTS,
            gathers => usize::from(gathers),
        }
    }

    /// What has to be the same on every rank.
    pub(crate) fn arguments(sizes: Option<&Sizes>) -> Vec<(&'static str, u64)> {
        const NAMES: [&str; 11] = [
            "seqlen",
            "block of shard",
            "queries of a block",
            "keys of a block",
            "batch",
            "heads of block mask",
            "heads of scheme",
            "kind of mask",
            "left side of mask",
            "right side of mask",
            "world",
        ];
        let values = sizes.map_or([0; NAMES.len()], |sizes| {
            let Sizes { grid, mask, geometry, batch, heads, .. } = *sizes;
            let [kind, left, right] = mask_arguments(mask);
            let (block_q, block_kv) = (geometry.block_q(), geometry.block_kv());
            let shard = [geometry.seqlen_q(), grid.shard.block(), block_q, block_kv];
            let [seqlen, block, block_q, block_kv] = shard.map(|size| size as u64);
            let sizes = [batch, heads, grid.scheme.heads, grid.shard.world()];
            let [batch, heads, members, world] = sizes.map(|size| size as u64);
            [seqlen, block, block_q, block_kv, batch, heads, members, kind, left, right, world]
        });
        NAMES.into_iter().zip(values).collect()
    }

    /// The heads of the mask that a rank computes. All ranks do a mask of one head.
    pub(crate) fn heads_of(&self, rank: usize) -> std::ops::Range<usize> {
        let members = self.grid.scheme.heads;
        if self.heads == 1 {
            return 0..1;
        }
        let heads = self.heads / members;
        rank % members * heads..(rank % members + 1) * heads
    }
}

/// Kind and sides of a mask.
pub(crate) fn mask_arguments(mask: Mask) -> [u64; 3] {
    let side = |side: Option<usize>| side.map_or(u64::MAX, |side| side as u64);
    match mask {
        Mask::Full => [0, 0, 0],
        Mask::Causal { .. } => [1, 0, 0],
        Mask::Window { left, right, .. } => [2, side(left), side(right)],
        _ => [3, 0, 0],
    }
}

/// Equal for equal values on all ranks.
pub(crate) fn hash_of(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
