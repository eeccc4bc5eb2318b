use super::attention::{define_tile, row_bytes, support};
use super::family::{Family, Support, each_dtype};
use crate::{ElementTypes, HeadDims, Target};

/// Tiles of `attention_decode_sm90a`: a CTA of one warpgroup computes items, each a run of splits
/// of the keys for up to [`ROWS`](Self::ROWS) rows (queries times heads that share a key head).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionDecodeHopper {
    /// Element types of q, of k and v, and of o.
    pub types: ElementTypes,
    /// Head dimensions of the tile; smaller ones are padded with zeros on chip.
    pub head_dims: HeadDims,
    /// Tiles of 64 keys in the ring.
    pub stages: u32,
}

/// The rings take what shared memory holds for two CTAs per SM.
const TILES: &[(usize, u32)] = &[(64, 5), (128, 2)];

pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionDecodeHopper> {
    each_dtype(TILES).filter(move |_| target == Target::Sm90a).map(|(dtype, (head_dim, stages))| {
        let (types, head_dims) = (ElementTypes::all(dtype), HeadDims::all(head_dim));
        AttentionDecodeHopper { types, head_dims, stages }
    })
}

impl AttentionDecodeHopper {
    /// Rows of a row tile, as many as a warpgroup multiplies at once.
    pub const ROWS: u32 = 64;
    /// The largest head dimension that a tile has.
    pub const WIDEST: usize = TILES[TILES.len() - 1].0;
    /// CTAs per SM.
    pub const MIN_BLOCKS: u32 = 2;
    /// Splits of a run: this many are joined before others are, whatever the batch.
    pub const RUNS: [u32; 3] = [1, 4, 8];
}

impl Family for AttentionDecodeHopper {
    fn source(&self) -> &'static str {
        "attention_decode_sm90a"
    }

    fn name(&self) -> String {
        let Self { types, head_dims, stages } = self;
        format!("{types}_d{head_dims}_n{}_w4_s{stages}", Self::ROWS)
    }

    fn warps(&self) -> u32 {
        4
    }

    /// The ring of K and V, the queries of an item, sums in f32, and what warps tell one another.
    fn smem_bytes(&self) -> u32 {
        let [q, k, v] = row_bytes(self.types, self.head_dims);
        let sums = self.head_dims.v as u32 * 4;
        64 * self.stages * (k + v) + Self::ROWS * (q + sums) + 1024
    }

    fn counts_tiles(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define_tile(define, self.types, self.head_dims);
        define("VARIANT_DECODE_ROWS", Self::ROWS);
        define("VARIANT_WARPS", self.warps());
        define("VARIANT_STAGES", self.stages);
        define("VARIANT_MIN_BLOCKS", Self::MIN_BLOCKS);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["HGMMA", "LDGSTS", "MUFU"]
    }

    fn supports(&self) -> Option<Support> {
        Some(support("attention over a cache", self.types, self.head_dims))
    }

    /// As many rows for each head of keys as a row tile has.
    fn profile_case(&self) -> Option<String> {
        let Self { head_dims, types, .. } = self;
        Some(format!("decode_b64_q16_kv8192_h32kv8_d{head_dims}_contiguous_full_{types}"))
    }
}

#[cfg(test)]
mod tests {
    use crate::Target;
    use crate::manifest::{Variant, kernels};

    #[test]
    fn two_ctas_fit() {
        let mut count = 0;
        for kernel in kernels() {
            let Variant::AttentionDecodeHopper(_) = kernel.variant else { continue };
            count += 1;
            assert_eq!(kernel.target, Target::Sm90a);
            assert!(2 * (kernel.smem_bytes() + 1024) <= 228 * 1024, "{}", kernel.image_name());
        }
        assert_eq!(count, 4);
    }
}
