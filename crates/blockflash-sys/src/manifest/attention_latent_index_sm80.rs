use super::attention_latent_sm80::{self, AttentionLatent};
use super::family::{Family, Size, Support};
use crate::Target;

/// Tiles of `attention_latent_index_sm80`: attention of each query to the rows of a latent cache
/// that its list names. A CTA has one split of a list, for up to [`AttentionLatent::ROWS`] heads of
/// the query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionLatentIndex {
    /// The tile, as without lists.
    pub tile: AttentionLatent,
}

/// Hopper has kernels of its own.
pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionLatentIndex> {
    attention_latent_sm80::tiles(target)
        .filter(move |_| target != Target::Sm90)
        .map(|tile| AttentionLatentIndex { tile })
}

impl Family for AttentionLatentIndex {
    fn source(&self) -> &'static str {
        "attention_latent_index_sm80"
    }

    fn name(&self) -> String {
        self.tile.name()
    }

    fn warps(&self) -> u32 {
        self.tile.warps()
    }

    fn smem_bytes(&self) -> u32 {
        self.tile.smem_bytes()
    }

    fn waits_for_predecessor(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        self.tile.macros(define);
        define("VARIANT_INDEX", 1);
    }

    fn contains(&self) -> &'static [&'static str] {
        self.tile.contains()
    }

    fn supports(&self) -> Option<Support> {
        Some(support(&self.tile))
    }
}

/// The cell of the support table of kernels for lists of latent rows.
fn support(tile: &AttentionLatent) -> Support {
    let [qk, v] = [tile.head_dims.qk, tile.head_dims.v].map(|columns| columns as u32);
    let size = Size::Latent { qk, v, codes: tile.has_codes() };
    Support { operation: "attention to listed keys", size, dtype: tile.types.q }
}

#[cfg(test)]
mod tests {
    use crate::manifest::{Variant, kernels};

    #[test]
    fn each_tile_of_latent_rows_has_one_for_lists() {
        let mut count = 0;
        for kernel in kernels() {
            let Variant::AttentionLatentIndex(index) = kernel.variant else { continue };
            count += 1;
            assert!(kernels().iter().any(|other| {
                other.target == kernel.target
                    && matches!(other.variant, Variant::AttentionLatent(tile) if tile == index.tile)
            }));
        }
        assert_eq!(count, 2 * (2 * 2 + 1));
    }
}
