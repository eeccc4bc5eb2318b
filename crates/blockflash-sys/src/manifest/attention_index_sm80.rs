use super::attention::support;
use super::attention_decode_sm80::{self, AttentionDecode};
use super::family::{Family, Support};
use crate::{DType, Target};

/// Tiles of `attention_decode_sm80` whose keys are those that lists name. A CTA computes items,
/// each a split of the list of a query for up to `rows` of its heads, which share the list and a
/// key head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionIndex {
    /// The tile, as without lists.
    pub tile: AttentionDecode,
}

/// Rows of all tiles, so that there are few images: lists that more heads share are rare, and fewer
/// rows are hardly faster.
const ROWS: u32 = 16;

/// Head dimensions of caches of codes, which are e4m3.
const OF_CODES: [usize; 3] = [64, 128, 256];

pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionIndex> {
    let of_codes = OF_CODES.into_iter().filter(move |_| target.is_baseline());
    let of_codes = of_codes
        .map(move |head_dim| AttentionDecode::of_codes(target, DType::E4M3, (head_dim, ROWS)));
    attention_decode_sm80::tiles(target)
        .filter(|tile| !tile.terms && !tile.has_codes())
        .filter(|tile| tile.rows == ROWS && tile.head_dims.max() <= 256)
        .chain(of_codes)
        .map(|tile| AttentionIndex { tile })
}

impl Family for AttentionIndex {
    fn source(&self) -> &'static str {
        self.tile.source()
    }

    fn name(&self) -> String {
        format!("{}_index", self.tile.name())
    }

    fn warps(&self) -> u32 {
        self.tile.warps()
    }

    fn smem_bytes(&self) -> u32 {
        self.tile.smem_bytes()
    }

    /// The splits that are combined with each other. Results take the place of the queries of two
    /// items.
    fn most_in_cluster(&self) -> u32 {
        16
    }

    fn counts_tiles(&self) -> bool {
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
        let AttentionDecode { types, head_dims, .. } = self.tile;
        Some(support("attention to listed keys", types, head_dims))
    }
}

#[cfg(test)]
mod tests {
    use crate::manifest::{Variant, kernels};

    #[test]
    fn clusters_have_a_thread_for_four_columns_of_a_row() {
        let mut count = 0;
        for kernel in kernels() {
            let Variant::AttentionIndex(index) = kernel.variant else { continue };
            count += 1;
            assert!(kernel.threads() as usize * 4 >= index.tile.head_dims.v);
            assert!(!kernel.target.has_clusters() || kernel.most_in_cluster() == Some(16));
        }
        assert_eq!(count, 3 * (2 * 3 + 3));
    }
}
