use super::attention::define_types;
use super::attention_latent_sm80::LATENT_HEAD_DIMS;
use super::family::{Family, Size, Support, each_dtype};
use crate::{ElementTypes, HeadDims, Target};

/// Tiles of `attention_latent_sm90a`: attention over a cache whose values are the first columns of
/// its keys, with the instructions of Hopper. A CTA computes items, each a split of the keys for up
/// to [`ROWS`](Self::ROWS) rows (queries times heads).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionLatentHopper {
    /// Element types of q, of k and v, and of o.
    pub types: ElementTypes,
    /// Head dimensions, of which it takes no others.
    pub head_dims: HeadDims,
}

pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionLatentHopper> {
    each_dtype(LATENT_HEAD_DIMS).filter(move |_| target == Target::Sm90a).map(
        |(dtype, head_dims)| AttentionLatentHopper { types: ElementTypes::all(dtype), head_dims },
    )
}

impl AttentionLatentHopper {
    /// Rows of a row tile, as many as a warpgroup multiplies at once.
    pub const ROWS: u32 = 64;
    /// CTAs per SM.
    pub const MIN_BLOCKS: u32 = 1;
    /// Keys of a tile. Boxes of a tensor map have as many slots, or a part of them.
    pub const TILE_KEYS: u32 = 64;
}

impl Family for AttentionLatentHopper {
    fn source(&self) -> &'static str {
        "attention_latent_sm90a"
    }

    fn name(&self) -> String {
        let Self { types, head_dims } = self;
        format!("{types}_d{head_dims}_n{}", Self::ROWS)
    }

    /// Two warpgroups compute, one loads.
    fn warps(&self) -> u32 {
        12
    }

    /// Two tiles of keys and the queries; probabilities of two tiles where no columns of keys have
    /// room for them; and what warps tell one another.
    fn smem_bytes(&self) -> u32 {
        let row = (self.types.kv.size() * self.head_dims.qk) as u32;
        let probabilities = if self.head_dims.qk > self.head_dims.v { 0 } else { 2 };
        (2 * Self::TILE_KEYS + Self::ROWS) * row
            + probabilities * Self::TILE_KEYS * Self::ROWS * 2
            + 2048
    }

    fn counts_tiles(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define_types(define, self.types);
        define("VARIANT_RUN_ROWS", Self::ROWS);
        define("VARIANT_RUN_COLUMNS", self.head_dims.qk as u32);
        define("VARIANT_RUN_VALUES", self.head_dims.v as u32);
        define("VARIANT_WARPS", self.warps());
        define("VARIANT_MIN_BLOCKS", Self::MIN_BLOCKS);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["HGMMA", "UTMALDG", "MUFU", "USETMAXREG"]
    }

    fn supports(&self) -> Option<Support> {
        let [qk, v] = [self.head_dims.qk, self.head_dims.v].map(|columns| columns as u32);
        let size = Size::Latent { qk, v, codes: false };
        Some(Support { operation: "attention over a cache", size, dtype: self.types.q })
    }

    /// As many heads as a row tile has rows.
    fn profile_case(&self) -> Option<String> {
        let Self { head_dims, types, .. } = self;
        let heads = Self::ROWS;
        Some(format!(
            "decode_b64_q1_kv8192_h{heads}kv1_d{head_dims}_contiguous_full_latent_{types}"
        ))
    }
}
