use super::attention_latent_sm90a::{self, AttentionLatentHopper};
use super::family::{Family, Size, Support};
use crate::Target;

/// Tiles of `attention_latent_index_sm90a`: attention of each query to the rows of a latent cache
/// that its list names, with the instructions of Hopper. A CTA computes items, each a split of a
/// list for up to [`AttentionLatentHopper::ROWS`] heads of the query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionLatentIndexHopper {
    /// The tile, as without lists.
    pub tile: AttentionLatentHopper,
}

pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionLatentIndexHopper> {
    attention_latent_sm90a::tiles(target).map(|tile| AttentionLatentIndexHopper { tile })
}

impl Family for AttentionLatentIndexHopper {
    fn source(&self) -> &'static str {
        "attention_latent_index_sm90a"
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

    /// A CTA takes every n-th item, where n is the number of CTAs.
    fn is_persistent(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        self.tile.macros(define);
        define("VARIANT_INDEX", 1);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["HGMMA", "LDGSTS", "MUFU", "USETMAXREG"]
    }

    fn supports(&self) -> Option<Support> {
        let AttentionLatentHopper { types, head_dims } = self.tile;
        let [qk, v] = [head_dims.qk, head_dims.v].map(|columns| columns as u32);
        let size = Size::Latent { qk, v, codes: false };
        Some(Support { operation: "attention to listed keys", size, dtype: types.q })
    }
}

#[cfg(test)]
mod tests {
    use crate::Target;
    use crate::manifest::{Variant, kernels};

    #[test]
    fn each_tile_of_latent_rows_has_one_for_lists() {
        let of_lists = kernels()
            .iter()
            .filter(|kernel| matches!(kernel.variant, Variant::AttentionLatentIndexHopper(_)));
        assert!(of_lists.clone().all(|kernel| {
            kernel.target == Target::Sm90a && kernel.smem_bytes() <= kernel.target.smem_limit()
        }));
        assert_eq!(of_lists.count(), 2 * 2);
    }
}
