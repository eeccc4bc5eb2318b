use super::attention_fwd_sm90a::AttentionFwdHopper;
use super::family::{Family, Support};
use crate::Target;

/// Tiles of `attention_fwd_sm90a` whose keys are in a cache, contiguous or in pages, and whose rows
/// are queries times heads that share keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionCacheHopper {
    /// The tile, of one head, as without a cache.
    pub tile: AttentionFwdHopper,
}

/// A tile for each head dimension, and one of 64 rows, of which two share an SM where registers
/// allow it: head dimension, rows and keys, CTAs of an SM, and what selection compares, nanoseconds
/// on an H200 of a key tile, where all CTAs of an SM are busy, and of the change from one tile of
/// rows to the next. There are no block masks. All of them compute the log-sum-exp, and store it
/// where it is asked for.
const TILES: [(usize, [u32; 2], u32, [u32; 2]); 6] = [
    (64, [128, 128], 1, [832, 2533]),
    (64, [64, 128], 2, [1327, 1927]),
    (128, [128, 128], 1, [1052, 2557]),
    (128, [64, 64], 2, [989, 1405]),
    (256, [128, 64], 1, [1019, 2876]),
    (256, [64, 64], 1, [932, 2503]),
];

/// Bytes of shared memory behind all that is used.
const TAIL_BYTES: u32 = 1024;

pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionCacheHopper> {
    super::attention_fwd_sm90a::tiles(target).filter_map(|tile| {
        let plain = tile.lse && !tile.terms && tile.heads * tile.block_rows == 1;
        let sizes = (tile.head_dims.single()?, [tile.block_q(), tile.block_kv]);
        let found = TILES.iter().find(|&&(head_dim, rows, ..)| plain && (head_dim, rows) == sizes);
        found.map(|&(_, _, blocks_per_multiprocessor, cost_ns)| {
            let tile = AttentionFwdHopper { blocks_per_multiprocessor, cost_ns, ..tile };
            AttentionCacheHopper { tile }
        })
    })
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
        // Rows of several heads leave from registers. The tail is for memcheck (layout.cuh).
        self.tile.smem_bytes() - self.tile.staging_bytes() + TAIL_BYTES
    }

    fn counts_tiles(&self) -> bool {
        true
    }

    fn blocks_per_multiprocessor(&self) -> u32 {
        self.tile.blocks_per_multiprocessor
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
        let of_type = [(64, 128), (64, 64), (128, 128), (128, 64), (256, 128), (256, 64)];
        assert_eq!(tiles.collect::<Vec<_>>(), [of_type; 2].concat());
    }
}
