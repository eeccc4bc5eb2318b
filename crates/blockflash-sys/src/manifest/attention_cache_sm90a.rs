use super::attention_fwd_sm90a::AttentionFwdHopper;
use super::family::{Family, Support};
use crate::Target;

/// Tiles of `attention_fwd_sm90a` whose keys are in a cache, contiguous or in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionCacheHopper {
    /// The tile, of one head, as without a cache.
    pub tile: AttentionFwdHopper,
}

/// Calls with few queries have another kernel, and there are no block masks, so a tile for each
/// head dimension suffices, and one of 64 queries where many sequences have no more. All of them
/// compute the log-sum-exp, and store it where it is asked for.
const TILES: [(usize, [u32; 2]); 5] =
    [(64, [128, 128]), (128, [128, 128]), (128, [64, 128]), (256, [128, 64]), (256, [64, 64])];

pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionCacheHopper> {
    super::attention_fwd_sm90a::tiles(target)
        .filter(|tile| {
            let sizes = (tile.head_dims.max(), [tile.block_q(), tile.block_kv]);
            tile.lse && !tile.terms && tile.heads * tile.block_rows == 1 && TILES.contains(&sizes)
        })
        .map(|tile| AttentionCacheHopper { tile })
}

impl Family for AttentionCacheHopper {
    fn source(&self) -> &'static str {
        self.tile.source()
    }

    fn name(&self) -> String {
        format!("{}_cache", AttentionFwdHopper { lse: false, ..self.tile }.name())
    }

    fn warps(&self) -> u32 {
        self.tile.warps()
    }

    fn smem_bytes(&self) -> u32 {
        self.tile.smem_bytes()
    }

    fn counts_tiles(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        self.tile.macros(&mut |name, value| {
            define(name, if name == "VARIANT_CACHE" { 1 } else { value });
        });
    }

    fn contains(&self) -> &'static [&'static str] {
        self.tile.contains()
    }

    fn supports(&self) -> Option<Support> {
        let support = self.tile.supports()?;
        Some(Support { operation: "attention over a cache", ..support })
    }
}

#[cfg(test)]
mod tests {
    use crate::manifest::{Variant, kernels};

    #[test]
    fn tiles_for_each_head_dimension() {
        let tiles = kernels().iter().filter_map(|kernel| match kernel.variant {
            Variant::AttentionCacheHopper(cache) => {
                Some((cache.tile.head_dims.single()?, cache.tile.block_q()))
            }
            _ => None,
        });
        let of_type = [(64, 128), (128, 128), (128, 64), (256, 128), (256, 64)];
        assert_eq!(tiles.collect::<Vec<_>>(), [of_type; 2].concat());
    }
}
