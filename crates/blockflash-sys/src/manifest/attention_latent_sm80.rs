use super::attention::define_types;
use super::family::{Family, Size, Support, each_dtype};
use crate::{DType, ElementTypes, HeadDims, Target};

/// Tiles of `attention_latent_sm80`: attention over a cache whose values are the first columns of
/// its keys. A CTA computes items, each a split of the keys for up to [`ROWS`](Self::ROWS) rows
/// (queries times heads).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionLatent {
    /// Element types of q, of k and v, and of o. A cache of u8 has [rows of
    /// codes](Self::CODE_ROW_BYTES).
    pub types: ElementTypes,
    /// Head dimensions, of which it takes no others.
    pub head_dims: HeadDims,
    /// Steps of 16 keys in the ring.
    pub stages: u32,
}

/// Those of absorbed MLA with and without a rotary part beside the latent one.
pub(super) const LATENT_HEAD_DIMS: &[HeadDims] =
    &[HeadDims { qk: 576, v: 512 }, HeadDims { qk: 512, v: 512 }];

/// Other targets run the machine code for sm_80, or PTX. The ring takes what shared memory holds
/// for two CTAs per SM on Hopper and on an A100; other GPUs have room for one.
pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionLatent> {
    let [stages, of_codes] = if target == Target::Sm90 { [6, 10] } else { [4, 7] };
    let plain = each_dtype(LATENT_HEAD_DIMS).map(move |(dtype, head_dims)| {
        let types = ElementTypes::all(dtype);
        AttentionLatent { types, head_dims, stages }
    });
    let types = ElementTypes { kv: DType::U8, ..ElementTypes::all(DType::BF16) };
    let codes = AttentionLatent { types, head_dims: LATENT_HEAD_DIMS[0], stages: of_codes };
    plain.chain([codes]).filter(move |_| target.is_baseline())
}

impl AttentionLatent {
    /// Rows of a row tile.
    pub const ROWS: u32 = 16;
    /// CTAs per SM that the register allocation must allow.
    pub const MIN_BLOCKS: u32 = 2;
    /// Bytes of a row of codes: 512 of e4m3, which are the values, an f32 scale for each 128 of
    /// them, and 64 elements of bf16 behind them.
    pub const CODE_ROW_BYTES: usize = 512 + 4 * 4 + 64 * 2;

    /// Whether the cache has rows of codes.
    pub const fn has_codes(&self) -> bool {
        matches!(self.types.kv, DType::U8)
    }
}

impl Family for AttentionLatent {
    fn source(&self) -> &'static str {
        "attention_latent_sm80"
    }

    fn name(&self) -> String {
        let Self { head_dims, stages, .. } = self;
        let types = if self.has_codes() { "e4m3".into() } else { self.types.to_string() };
        format!("{types}_d{head_dims}_n{}_w{}_s{stages}", Self::ROWS, self.warps())
    }

    fn warps(&self) -> u32 {
        4
    }

    /// The ring, the scores of two steps, and what warps tell one another.
    fn smem_bytes(&self) -> u32 {
        let row = match self.has_codes() {
            true => Self::CODE_ROW_BYTES,
            false => self.types.kv.size() * self.head_dims.qk,
        };
        16 * self.stages * row as u32 + 2 * 16 * Self::ROWS * 2 * 4 + 1024
    }

    fn counts_tiles(&self) -> bool {
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
        define("VARIANT_STAGES", self.stages);
        define("VARIANT_MIN_BLOCKS", Self::MIN_BLOCKS);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["HMMA", "LDGSTS", "LDSM", "MUFU"]
    }

    fn supports(&self) -> Option<Support> {
        let [qk, v] = [self.head_dims.qk, self.head_dims.v].map(|columns| columns as u32);
        let size = Size::Latent { qk, v, codes: self.has_codes() };
        Some(Support { operation: "attention over a cache", size, dtype: self.types.q })
    }

    /// As many heads as a row tile has rows.
    fn profile_case(&self) -> Option<String> {
        let Self { head_dims, types, .. } = self;
        let heads = Self::ROWS;
        (!self.has_codes()).then(|| {
            format!("decode_b64_q1_kv8192_h{heads}kv1_d{head_dims}_contiguous_full_latent_{types}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::AttentionLatent;
    use crate::manifest::{Variant, kernels};

    #[test]
    fn two_ctas_fit_where_there_is_room_and_one_elsewhere() {
        let of_sm = |limit: u32| (limit + 1024).next_multiple_of(4096);
        let mut count = 0;
        for kernel in kernels() {
            let Variant::AttentionLatent(_) = kernel.variant else { continue };
            count += 1;
            let limit = kernel.target.smem_limit();
            let ctas = if limit < 100 * 1024 { 1 } else { AttentionLatent::MIN_BLOCKS };
            let fits = ctas * (kernel.smem_bytes() + 1024) <= of_sm(limit);
            assert!(fits, "{}", kernel.image_name());
        }
        assert_eq!(count, 3 * (2 * 2 + 1));
    }
}
