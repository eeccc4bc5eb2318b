use super::attention::{define_tile, row_bytes};
use super::family::{Family, Support, each_dtype};
use super::{AttentionTile, Lse};
use crate::{DType, ElementTypes, HeadDims, Target};

/// Tiles of `attention_fwd_small_sm90a`: a CTA computes 64 queries of one head against all keys,
/// 64 of them at a time. They have what launches with few CTAs need, and no tensor maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionFwdSmall {
    /// Element types of q, of k and v, and of o.
    pub types: ElementTypes,
    /// Head dimensions of the tile; smaller ones are padded with zeros on chip.
    pub head_dims: HeadDims,
    /// Warpgroups per CTA, which divide the key tiles.
    pub warpgroups: u32,
    /// Pipeline stages of K and of V for each warpgroup.
    pub stages: u32,
    /// CTAs per SM that the register allocation must allow.
    pub min_blocks: u32,
}

const fn tile(head_dim: usize, warpgroups: u32, min_blocks: u32) -> AttentionFwdSmall {
    let (types, head_dims) = (ElementTypes::all(DType::F16), HeadDims::all(head_dim));
    AttentionFwdSmall { types, head_dims, warpgroups, stages: 3, min_blocks }
}

/// Tiles by head dimension. Two warpgroups overlap the products of one with the exponentials of the
/// other and add their partial results in the end. One alone was 1 to 7 % faster with one key tile,
/// and 9 to 30 % slower from two on. Two CTAs fit on an SM where possible, so that the next launch
/// can begin beside this one. Four warpgroups hide more of each other's latencies where there are
/// key tiles for all; beyond a head_dim of 64 they find no room.
const TILES: &[AttentionFwdSmall] = &[tile(64, 2, 2), tile(64, 4, 1), tile(128, 2, 1)];

pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionFwdSmall> {
    each_dtype(TILES)
        .filter(move |_| target == Target::Sm90a)
        .map(|(dtype, tile)| AttentionFwdSmall { types: ElementTypes::all(dtype), ..tile })
}

impl AttentionFwdSmall {
    /// Queries, and keys, of a tile: the rows of a WGMMA.
    const ROWS: u32 = 64;

    /// The part that all attention kernels have.
    pub const fn tile(&self) -> AttentionTile {
        let Self { types, head_dims, .. } = *self;
        let (block_q, block_kv) = (Self::ROWS, Self::ROWS);
        AttentionTile {
            types,
            head_dims,
            block_q,
            block_rows: 1,
            block_kv,
            heads: 1,
            lse: Lse::AsAsked,
            dense_only: true,
            block_masks: false,
            tensor_maps: false,
            terms: false,
            bits_only: false,
        }
    }
}

impl Family for AttentionFwdSmall {
    fn source(&self) -> &'static str {
        "attention_fwd_small_sm90a"
    }

    fn name(&self) -> String {
        let Self { types, head_dims, warpgroups, stages, .. } = self;
        format!("{types}_d{head_dims}_w{}_s{stages}", 4 * warpgroups)
    }

    fn warps(&self) -> u32 {
        4 * self.warpgroups
    }

    /// The Q tile, and for each warpgroup a ring of K tiles and of V tiles.
    fn smem_bytes(&self) -> u32 {
        let [q, k, v] = row_bytes(self.types, self.head_dims);
        Self::ROWS * (q + self.warpgroups * self.stages * (k + v))
    }

    fn waits_for_predecessor(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define_tile(define, self.types, self.head_dims);
        define("VARIANT_BLOCK_Q", Self::ROWS);
        define("VARIANT_BLOCK_KV", Self::ROWS);
        define("VARIANT_WARPGROUPS", self.warpgroups);
        define("VARIANT_STAGES", self.stages);
        define("VARIANT_MIN_BLOCKS", self.min_blocks);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["HGMMA", "LDGSTS", "MUFU", "VIMNMX3", "ACQBULK"]
    }

    fn supports(&self) -> Option<Support> {
        Some(self.tile().support())
    }

    fn profile_case(&self) -> Option<String> {
        Some(self.tile().profile_case())
    }
}
