use super::attention::define_types;
use super::attention_latent_sm80::LATENT_HEAD_DIMS;
use super::family::{Family, Size, Support, each_dtype};
use crate::{ElementTypes, HeadDims, Target};

/// Tiles of `attention_latent_index_few_sm90a`: attention of few heads of each query to the rows of
/// a latent cache that its list names. A CTA has one split of a list, for up to
/// [`ROWS`](Self::ROWS) heads of the query; the splits of a list are a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionLatentIndexFew {
    /// Element types of q, of k and v, and of o.
    pub types: ElementTypes,
    /// Head dimensions, of which it takes no others.
    pub head_dims: HeadDims,
}

pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionLatentIndexFew> {
    each_dtype(LATENT_HEAD_DIMS).filter(move |_| target == Target::Sm90a).map(
        |(dtype, head_dims)| AttentionLatentIndexFew { types: ElementTypes::all(dtype), head_dims },
    )
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
    const STAGES: u32 = 3;
}

impl Family for AttentionLatentIndexFew {
    fn source(&self) -> &'static str {
        "attention_latent_index_few_sm90a"
    }

    fn name(&self) -> String {
        let Self { types, head_dims } = self;
        format!("{types}_d{head_dims}_n{}_kv{}", Self::ROWS, Self::STEP_KEYS)
    }

    /// Each has the scores of 8 keys of a step.
    fn warps(&self) -> u32 {
        8
    }

    /// The ring, and what warps tell one another.
    fn smem_bytes(&self) -> u32 {
        let row = (self.types.kv.size() * self.head_dims.qk) as u32;
        Self::STEP_KEYS * Self::STAGES * row + 4096
    }

    /// The splits of a list, which are combined with each other.
    fn most_in_cluster(&self) -> u32 {
        Self::MOST_SPLITS
    }

    fn waits_for_predecessor(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define_types(define, self.types);
        define("VARIANT_LATENT_ROWS", Self::ROWS);
        define("VARIANT_LATENT_COLUMNS", self.head_dims.qk as u32);
        define("VARIANT_LATENT_VALUES", self.head_dims.v as u32);
        define("VARIANT_WARPS", self.warps());
        define("VARIANT_STAGES", Self::STAGES);
        define("VARIANT_MIN_BLOCKS", Self::MIN_BLOCKS);
        define("VARIANT_INDEX", 1);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["HMMA", "LDGSTS", "LDSM", "MUFU", "UCGABAR_ARV"]
    }

    fn supports(&self) -> Option<Support> {
        let [qk, v] = [self.head_dims.qk, self.head_dims.v].map(|columns| columns as u32);
        let size = Size::Latent { qk, v, codes: false };
        Some(Support { operation: "attention to listed keys", size, dtype: self.types.q })
    }
}

#[cfg(test)]
mod tests {
    use super::AttentionLatentIndexFew;
    use crate::manifest::{Variant, kernels};

    #[test]
    fn a_row_of_results_has_a_thread_for_four_columns_and_tiles_fit() {
        let mut count = 0;
        for kernel in kernels() {
            let Variant::AttentionLatentIndexFew(tile) = kernel.variant else { continue };
            count += 1;
            assert!(kernel.smem_bytes() <= kernel.target.smem_limit(), "{}", kernel.symbol());
            assert_eq!(kernel.threads() as usize % (tile.head_dims.v / 4), 0);
            assert_eq!(kernel.most_in_cluster(), Some(AttentionLatentIndexFew::MOST_SPLITS));
        }
        assert_eq!(count, 2 * 2);
    }
}
