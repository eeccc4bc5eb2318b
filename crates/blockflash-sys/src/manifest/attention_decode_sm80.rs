use super::attention::{define_tile, support};
use super::family::{Family, Support, each_dtype};
use crate::{DType, ElementTypes, HeadDims, Target};

/// Tiles of `attention_decode_sm80`: a CTA computes items, each a split of the keys for up to
/// `rows` rows (queries times heads that share a key head).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionDecode {
    /// Element types of q, of k and v, and of o. Beside codes of k and v that of q and o is chosen
    /// at run time, f16 or bf16.
    pub types: ElementTypes,
    /// Head dimensions of the tile; smaller ones are padded with zeros on chip.
    pub head_dims: HeadDims,
    /// Rows of a row tile.
    pub rows: u32,
    /// Warps per CTA, each with keys of its own.
    pub warps: u32,
    /// Steps of 16 keys in the ring of a warp.
    pub stages: u32,
    /// CTAs per SM that the register allocation must allow.
    pub min_blocks: u32,
    /// Whether it computes score terms and the mask of the last keys.
    pub terms: bool,
}

/// Rows by head dimension, and whether with score terms. With 32 rows of head_dim 256, or 16 of
/// 512, the sums would not fit into registers. Score terms have one number of rows, and none at
/// 512, so that there are few images.
const ROWS: &[(usize, u32, bool)] = &[
    (64, 8, false),
    (64, 16, false),
    (64, 32, false),
    (128, 8, false),
    (128, 16, false),
    (128, 32, false),
    (256, 8, false),
    (256, 16, false),
    (512, 8, false),
    (64, 16, true),
    (128, 16, true),
    (256, 16, true),
];

/// The rings take what shared memory holds for two CTAs per SM, since the bytes in flight decide
/// how fast a cache is read. At head_dim 256 these have half as many warps: two items side by side
/// hide the ends of each other, where one item of four warps would have as many bytes in flight.
/// At 512 a stage has 32 KB, and a warp is a CTA.
const fn ring(target: Target, head_dim: usize) -> [u32; 3] {
    match (target, head_dim) {
        (Target::Sm90, 64) => [4, 6, 2],
        (Target::Sm90, 128) => [4, 3, 2],
        (Target::Sm90, 256) => [2, 3, 2],
        (Target::Sm90, _) => [1, 3, 2],
        (_, 64) => [4, 4, 2],
        (_, 128) => [4, 2, 2],
        (_, 256) => [2, 2, 1],
        _ => [1, 2, 2],
    }
}

/// Rows by head dimension beside codes: few and many, so that there are few images. Those of
/// [`HOPPER_ROWS`] do not fit into registers elsewhere, where codes take more instructions.
const CODE_ROWS: &[(usize, u32)] = &[(64, 8), (64, 32), (128, 8), (256, 8), (256, 16)];
const HOPPER_ROWS: (usize, u32) = (128, 32);
const OTHER_ROWS: (usize, u32) = (128, 16);

/// The types of k and v that are codes.
const CODES: [DType; 3] = [DType::E4M3, DType::E5M2, DType::I8];

impl AttentionDecode {
    /// Whether k and v are codes, which have scales.
    pub const fn has_codes(&self) -> bool {
        self.types.kv.is_code()
    }

    /// Bytes of a stage of a warp: 16 keys, their values, and, of codes, the scales of both.
    const fn stage_bytes(&self) -> u32 {
        let bytes = self.types.kv.size() * 16 * (self.head_dims.qk + self.head_dims.v);
        bytes as u32 + if self.has_codes() { 2 * 16 * 4 } else { 0 }
    }

    /// Bytes of a CTA beside the rings: the queries of two items, and what warps tell one another.
    const fn shared_bytes(&self) -> u32 {
        let queries = 2 * self.rows * self.head_dims.qk as u32 * 2;
        // Scales of an item, and a factor, references and denominators of each row.
        let codes = if self.has_codes() { 24 + 4 * self.rows * (1 + 2 * self.warps) } else { 0 };
        queries + 1024 + codes
    }

    /// A tile for codes: as many stages as fit beside the rest of two CTAs per SM, up to a number
    /// from which on more bytes on their way gain nothing.
    pub(super) fn of_codes(target: Target, dtype: DType, (head_dim, rows): (usize, u32)) -> Self {
        // Without few rows two warps side by side have more stages each.
        let warps = if head_dim == 256 && rows > 8 { 2 } else { 4 };
        let types = ElementTypes { q: DType::F16, kv: dtype, o: DType::F16 };
        let (head_dims, min_blocks) = (HeadDims::all(head_dim), 2);
        let tile = Self { types, head_dims, rows, warps, stages: 0, min_blocks, terms: false };
        let room = if target == Target::Sm90 { 115_712 } else { 82_944 };
        let stages = (room - tile.shared_bytes()) / (warps * tile.stage_bytes());
        Self { stages: stages.min(12), ..tile }
    }
}

/// Other targets run the machine code for sm_80, or PTX: reading a cache is the same everywhere.
pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionDecode> {
    let compiled = target.is_baseline();
    let plain =
        each_dtype(ROWS).filter(move |_| compiled).map(move |(dtype, (head_dim, rows, terms))| {
            let (types, head_dims) = (ElementTypes::all(dtype), HeadDims::all(head_dim));
            let [warps, stages, min_blocks] = ring(target, head_dim);
            AttentionDecode { types, head_dims, rows, warps, stages, min_blocks, terms }
        });
    let many = if target == Target::Sm90 { HOPPER_ROWS } else { OTHER_ROWS };
    let of_codes = CODES.into_iter().filter(move |_| compiled).flat_map(move |dtype| {
        // e5m2, which is rare, has tiles of few rows alone.
        CODE_ROWS
            .iter()
            .copied()
            .chain([many])
            .filter(move |&(_, rows)| rows <= 8 || dtype != DType::E5M2)
            .map(move |rows| AttentionDecode::of_codes(target, dtype, rows))
    });
    plain.chain(of_codes)
}

impl Family for AttentionDecode {
    fn source(&self) -> &'static str {
        "attention_decode_sm80"
    }

    fn name(&self) -> String {
        let Self { head_dims, rows, warps, stages, .. } = self;
        let types =
            if self.has_codes() { self.types.kv.to_string() } else { self.types.to_string() };
        let terms = if self.terms { "_terms" } else { "" };
        format!("{types}_d{head_dims}_n{rows}_w{warps}_s{stages}{terms}")
    }

    fn warps(&self) -> u32 {
        self.warps
    }

    fn smem_bytes(&self) -> u32 {
        self.warps * self.stages * self.stage_bytes() + self.shared_bytes()
    }

    /// The splits that are combined with each other. Results of up to eight rows take the place of
    /// the queries, and threads have four columns of whole rows.
    fn most_in_cluster(&self) -> u32 {
        let has_whole_rows = self.warps as usize * 32 * 4 >= self.head_dims.v;
        if self.rows <= 8 && has_whole_rows { 16 } else { 1 }
    }

    fn counts_tiles(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        // Products beside codes are in f16.
        let products = if self.has_codes() { ElementTypes::all(DType::F16) } else { self.types };
        define_tile(define, products, self.head_dims);
        if self.has_codes() {
            define("VARIANT_CACHE_CODES", self.types.kv as u32);
        }
        define("VARIANT_DECODE_ROWS", self.rows);
        define("VARIANT_WARPS", self.warps);
        define("VARIANT_STAGES", self.stages);
        define("VARIANT_MIN_BLOCKS", self.min_blocks);
        if self.terms {
            define("VARIANT_TERMS", 1);
        }
    }

    fn contains(&self) -> &'static [&'static str] {
        &["HMMA", "LDGSTS", "LDSM", "MOVM", "MUFU"]
    }

    fn supports(&self) -> Option<Support> {
        Some(support("attention over a cache", self.types, self.head_dims))
    }

    /// As many query heads for each head of keys as a row tile has rows.
    fn profile_case(&self) -> Option<String> {
        let Self { head_dims, types, rows, .. } = self;
        let heads = 8 * rows;
        Some(format!("decode_b64_q1_kv8192_h{heads}kv8_d{head_dims}_contiguous_full_{types}"))
    }
}

#[cfg(test)]
mod tests {
    use crate::manifest::{Variant, kernels};

    #[test]
    fn two_ctas_fit_where_registers_allow_them() {
        let of_sm = |limit: u32| (limit + 1024).next_multiple_of(4096);
        let mut count = 0;
        for kernel in kernels() {
            let Variant::AttentionDecode(tile) = kernel.variant else { continue };
            count += 1;
            let ctas = if kernel.target.smem_limit() < 100 * 1024 { 1 } else { tile.min_blocks };
            let room = of_sm(kernel.target.smem_limit());
            assert!(ctas * (kernel.smem_bytes() + 1024) <= room, "{}", kernel.image_name());
        }
        assert_eq!(count, 3 * 2 * 12 + 3 * (2 * 6 + 3));
    }
}
