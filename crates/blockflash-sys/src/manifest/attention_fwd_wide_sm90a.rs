use super::attention::{define_tile, row_bytes};
use super::family::{Family, Support, each_dtype};
use super::{AttentionTile, Lse};
use crate::{DType, ElementTypes, HeadDims, Target};

/// Tiles of `attention_fwd_wide_sm90a`, for head dimensions beyond 256: a CTA computes 64 queries
/// of one head against all keys, 64 of them at a time. Two warpgroups share the columns of the
/// output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionFwdWide {
    /// Element types of q, of k and v, and of o.
    pub types: ElementTypes,
    /// Head dimensions of the tile; smaller ones are padded with zeros on chip.
    pub head_dims: HeadDims,
}

const TILES: &[AttentionFwdWide] =
    &[AttentionFwdWide { types: ElementTypes::all(DType::F16), head_dims: HeadDims::all(512) }];

pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionFwdWide> {
    each_dtype(TILES)
        .filter(move |_| target == Target::Sm90a)
        .map(|(dtype, tile)| AttentionFwdWide { types: ElementTypes::all(dtype), ..tile })
}

impl AttentionFwdWide {
    /// Queries of a CTA, and keys of a tile.
    pub const ROWS: u32 = 64;
    /// Tiles of probabilities in shared memory.
    const PROBABILITY_TILES: u32 = 3;

    /// The part that all attention kernels have.
    pub const fn tile(&self) -> AttentionTile {
        let Self { types, head_dims } = *self;
        AttentionTile {
            types,
            head_dims,
            block_q: Self::ROWS,
            block_rows: 1,
            block_kv: Self::ROWS,
            heads: 1,
            lse: Lse::AsAsked,
            dense_only: false,
            block_masks: false,
            tensor_maps: true,
            terms: false,
            bits_only: false,
        }
    }
}

impl Family for AttentionFwdWide {
    fn source(&self) -> &'static str {
        "attention_fwd_wide_sm90a"
    }

    fn name(&self) -> String {
        let Self { types, head_dims } = self;
        format!("{types}_d{head_dims}_q{0}_kv{0}", Self::ROWS)
    }

    /// Two warpgroups compute, one loads.
    fn warps(&self) -> u32 {
        12
    }

    /// A tile of queries, of keys and of values each, probabilities, and what warps tell one
    /// another.
    fn smem_bytes(&self) -> u32 {
        let row: u32 = row_bytes(self.types, self.head_dims).iter().sum();
        Self::ROWS * row + Self::PROBABILITY_TILES * Self::ROWS * Self::ROWS * 2 + 2048
    }

    fn waits_for_predecessor(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define_tile(define, self.types, self.head_dims);
        define("VARIANT_BLOCK_Q", Self::ROWS);
        define("VARIANT_BLOCK_KV", Self::ROWS);
        define("VARIANT_MIN_BLOCKS", self.blocks_per_multiprocessor());
    }

    fn contains(&self) -> &'static [&'static str] {
        &["HGMMA", "UTMALDG", "MUFU", "STSM", "USETMAXREG"]
    }

    fn supports(&self) -> Option<Support> {
        Some(self.tile().support())
    }

    fn profile_case(&self) -> Option<String> {
        Some(self.tile().profile_case())
    }
}

#[cfg(test)]
#[path = "attention_fwd_wide_sm90a_tests.rs"]
mod tests;
