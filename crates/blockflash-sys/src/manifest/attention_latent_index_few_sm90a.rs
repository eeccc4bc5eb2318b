use super::attention::define_types;
use super::attention_latent_sm80::{AttentionLatent, LATENT_HEAD_DIMS};
use super::family::{Family, Size, Support, each_dtype};
use crate::{DType, ElementTypes, HeadDims, Target};

/// Tiles of `attention_latent_index_few_sm90a`: attention of few heads of each query to the rows of
/// a latent cache that its list names. A CTA has one split of a list, for up to
/// [`ROWS`](Self::ROWS) heads of the query; the splits of a list are a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionLatentIndexFew {
    /// Element types of q, of k and v, and of o. A cache of u8 has rows of codes.
    pub types: ElementTypes,
    /// Head dimensions, of which it takes no others.
    pub head_dims: HeadDims,
}

pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionLatentIndexFew> {
    let plain = each_dtype(LATENT_HEAD_DIMS).map(|(dtype, head_dims)| AttentionLatentIndexFew {
        types: ElementTypes::all(dtype),
        head_dims,
    });
    let types = ElementTypes { kv: DType::U8, ..ElementTypes::all(DType::BF16) };
    let codes = AttentionLatentIndexFew { types, head_dims: LATENT_HEAD_DIMS[0] };
    plain.chain([codes]).filter(move |_| target == Target::Sm90a)
}

impl AttentionLatentIndexFew {
    /// Rows of a row tile.
    pub const ROWS: u32 = 16;
    /// CTAs per SM.
    pub const MIN_BLOCKS: u32 = 1;
    /// Keys of a step.
    pub const STEP_KEYS: u32 = 64;
    /// Most splits of a list.
    pub const MOST_SPLITS: u32 = 16;

    /// Whether the cache has rows of codes.
    pub const fn has_codes(&self) -> bool {
        matches!(self.types.kv, DType::U8)
    }

    /// Steps in the ring.
    const fn stages(&self) -> u32 {
        if self.has_codes() { 5 } else { 3 }
    }
}

impl Family for AttentionLatentIndexFew {
    fn source(&self) -> &'static str {
        "attention_latent_index_few_sm90a"
    }

    fn name(&self) -> String {
        let Self { types, head_dims } = self;
        let types = if self.has_codes() { "e4m3".into() } else { types.to_string() };
        format!("{types}_d{head_dims}_n{}_kv{}", Self::ROWS, Self::STEP_KEYS)
    }

    /// Two warpgroups compute, one copies.
    fn warps(&self) -> u32 {
        12
    }

    /// The ring; probabilities of two steps, times scales where a key has four; and what warps tell
    /// one another.
    fn smem_bytes(&self) -> u32 {
        let (row, scales) = match self.has_codes() {
            true => (AttentionLatent::CODE_ROW_BYTES, 4),
            false => (self.types.kv.size() * self.head_dims.qk, 1),
        };
        Self::STEP_KEYS * self.stages() * row as u32
            + 2 * Self::ROWS * Self::STEP_KEYS * 2 * scales
            + 2048
    }

    /// The splits of a list, which are combined with each other.
    fn most_in_cluster(&self) -> u32 {
        Self::MOST_SPLITS
    }

    fn waits_for_predecessor(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        // Products beside codes are in the type of the queries.
        define_types(define, ElementTypes::all(self.types.q));
        if self.has_codes() {
            define("VARIANT_CACHE_CODES", DType::E4M3 as u32);
        }
        define("VARIANT_LATENT_ROWS", Self::ROWS);
        define("VARIANT_LATENT_COLUMNS", self.head_dims.qk as u32);
        define("VARIANT_LATENT_VALUES", self.head_dims.v as u32);
        define("VARIANT_WARPS", self.warps());
        define("VARIANT_STAGES", self.stages());
        define("VARIANT_MIN_BLOCKS", Self::MIN_BLOCKS);
        define("VARIANT_INDEX", 1);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["HMMA", "LDGSTS", "LDSM", "MUFU", "UCGABAR_ARV", "USETMAXREG"]
    }

    fn supports(&self) -> Option<Support> {
        let [qk, v] = [self.head_dims.qk, self.head_dims.v].map(|columns| columns as u32);
        let size = Size::Latent { qk, v, codes: self.has_codes() };
        Some(Support { operation: "attention to listed keys", size, dtype: self.types.q })
    }
}

#[cfg(test)]
mod tests {
    use super::AttentionLatentIndexFew;
    use crate::manifest::{Variant, kernels};

    #[test]
    fn warps_have_64_columns_of_results_and_tiles_fit() {
        let mut count = 0;
        for kernel in kernels() {
            let Variant::AttentionLatentIndexFew(tile) = kernel.variant else { continue };
            count += 1;
            assert!(kernel.smem_bytes() <= kernel.target.smem_limit(), "{}", kernel.symbol());
            assert_eq!((kernel.family().warps() - 4) as usize * 64, tile.head_dims.v);
            assert_eq!(kernel.most_in_cluster(), Some(AttentionLatentIndexFew::MOST_SPLITS));
        }
        assert_eq!(count, 2 * 2 + 1);
    }
}
