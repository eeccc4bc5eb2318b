use super::attention::{define_tile, support};
use super::family::{Family, Support, each_dtype};
use crate::{DType, ElementTypes, HeadDims, Target};

/// Tiles of `attention_index_sm90a`: attention of neighbouring queries to the union of their lists,
/// with the instructions of Hopper. A CTA computes tiles of [`ROW_GROUPS`](Self::ROW_GROUPS) row
/// groups, each queries times heads that share a list and a key head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionIndexHopper {
    /// Element types of q, of k and v, and of o.
    pub types: ElementTypes,
    /// Head dimensions of the tile; smaller ones are padded with zeros on chip.
    pub head_dims: HeadDims,
    /// Keys of a step.
    pub step_keys: u32,
    /// Stages of keys, and of values.
    pub stages: u32,
}

const fn tile(head_dim: usize, step_keys: u32, stages: u32) -> AttentionIndexHopper {
    let (types, head_dims) = (ElementTypes::all(DType::F16), HeadDims::all(head_dim));
    AttentionIndexHopper { types, head_dims, step_keys, stages }
}

const TILES: &[AttentionIndexHopper] = &[tile(64, 128, 5), tile(128, 128, 3), tile(256, 64, 2)];

pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionIndexHopper> {
    each_dtype(TILES)
        .filter(move |_| target == Target::Sm90a)
        .map(|(dtype, tile)| AttentionIndexHopper { types: ElementTypes::all(dtype), ..tile })
}

impl AttentionIndexHopper {
    /// Rows of a row group, as many as a warpgroup multiplies at once.
    pub const ROWS: u32 = 64;
    /// Row groups of a tile.
    pub const ROW_GROUPS: u32 = 2;
    /// CTAs per SM.
    pub const MIN_BLOCKS: u32 = 1;
    /// The smallest granularity of lists: a box of a tensor map is in one entry.
    pub const LEAST_GRANULARITY: u32 = 16;
}

impl Family for AttentionIndexHopper {
    fn source(&self) -> &'static str {
        "attention_index_sm90a"
    }

    fn name(&self) -> String {
        let Self { types, head_dims, step_keys, .. } = self;
        format!("{types}_d{head_dims}_n{}_kv{step_keys}", Self::ROWS)
    }

    /// Two warpgroups compute, one loads.
    fn warps(&self) -> u32 {
        12
    }

    /// Queries, the stages, a KiB of zeros, and what warps tell one another.
    fn smem_bytes(&self) -> u32 {
        let row = (self.types.kv.size() * self.head_dims.max()) as u32;
        (Self::ROW_GROUPS * Self::ROWS + 2 * self.stages * self.step_keys) * row + 1024 + 2048
    }

    fn counts_tiles(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define_tile(define, self.types, self.head_dims);
        define("VARIANT_STEP_KEYS", self.step_keys);
        define("VARIANT_STAGES", self.stages);
        define("VARIANT_MIN_BLOCKS", Self::MIN_BLOCKS);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["HGMMA", "UTMALDG", "MUFU", "USETMAXREG"]
    }

    fn supports(&self) -> Option<Support> {
        Some(support("attention to listed keys", self.types, self.head_dims))
    }
}

#[cfg(test)]
mod tests {
    use super::AttentionIndexHopper;
    use crate::Target;
    use crate::manifest::{Variant, kernels};

    #[test]
    fn tiles_fit_into_shared_memory_and_hold_whole_entries() {
        let mut count = 0;
        for kernel in kernels() {
            let Variant::AttentionIndexHopper(tile) = kernel.variant else { continue };
            count += 1;
            assert_eq!((kernel.target, kernel.threads()), (Target::Sm90a, 384));
            assert!(kernel.smem_bytes() <= kernel.target.smem_limit(), "{}", kernel.symbol());
            assert_eq!(tile.step_keys % AttentionIndexHopper::LEAST_GRANULARITY, 0);
            // Phases of stages are bits of a word: three kinds of steps, of keys and of values.
            assert!(2 * 3 * tile.stages <= 32);
            assert!(kernel.waits_for_predecessor() && kernel.family().counts_tiles());
        }
        assert_eq!(count, 2 * 3);
    }
}
