use super::family::{Family, Size, Support, each_dtype};
use crate::{DType, Target};

/// Tiles of `attention_decode_sm90a`: a CTA of one warpgroup computes items, each a run of splits
/// of the keys for up to [`ROWS`](Self::ROWS) rows (queries times heads that share a key head).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionDecodeHopper {
    /// Element type of q, k, v and o.
    pub dtype: DType,
    /// Head dimension of the tile; smaller ones are padded with zeros on chip.
    pub head_dim: u32,
    /// Tiles of 64 keys in the ring.
    pub stages: u32,
}

/// The rings take what shared memory holds for two CTAs per SM.
const TILES: &[(u32, u32)] = &[(64, 5), (128, 2)];

pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionDecodeHopper> {
    each_dtype(TILES)
        .filter(move |_| target == Target::Sm90a)
        .map(|(dtype, (head_dim, stages))| AttentionDecodeHopper { dtype, head_dim, stages })
}

impl AttentionDecodeHopper {
    /// Rows of a row tile, as many as a warpgroup multiplies at once.
    pub const ROWS: u32 = 64;
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
        let Self { dtype, head_dim, stages } = self;
        format!("{dtype}_d{head_dim}_n{}_w4_s{stages}", Self::ROWS)
    }

    fn warps(&self) -> u32 {
        4
    }

    /// The ring of K and V, the queries of an item, sums in f32, and what warps tell one another.
    fn smem_bytes(&self) -> u32 {
        let tile = 64 * self.head_dim * self.dtype.size() as u32;
        (2 * self.stages + 1) * tile + Self::ROWS * self.head_dim * 4 + 1024
    }

    fn counts_tiles(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define("VARIANT_DTYPE", self.dtype as u32);
        define("VARIANT_HEAD_DIM", self.head_dim);
        define("VARIANT_DECODE_ROWS", Self::ROWS);
        define("VARIANT_WARPS", self.warps());
        define("VARIANT_STAGES", self.stages);
        define("VARIANT_MIN_BLOCKS", Self::MIN_BLOCKS);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["HGMMA", "LDGSTS", "MUFU"]
    }

    fn supports(&self) -> Option<Support> {
        let Self { head_dim, dtype, .. } = *self;
        Some(Support { operation: "attention over a cache", size: Size::HeadDim(head_dim), dtype })
    }

    /// As many rows for each head of keys as a row tile has.
    fn profile_case(&self) -> Option<String> {
        let Self { head_dim, dtype, .. } = self;
        Some(format!("decode_b64_q16_kv8192_h32kv8_d{head_dim}_contiguous_full_{dtype}"))
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
