use super::attention::{compiles_terms, define_tile, row_bytes};
use super::family::{Family, Support, each_dtype};
use super::{AttentionTile, Lse};
use crate::{DType, ElementTypes, HeadDims, Target};

/// Tiles of `attention_fwd_sm80`: a CTA computes `block_q` queries of one head against all keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionFwd {
    /// Element types of q, of k and v, and of o.
    pub types: ElementTypes,
    /// Head dimensions of the tile; smaller ones are padded with zeros on chip.
    pub head_dims: HeadDims,
    /// Queries per CTA.
    pub block_q: u32,
    /// Keys per step of the main loop.
    pub block_kv: u32,
    /// Warps per CTA.
    pub warps: u32,
    /// Warps that share query rows: each has the scores of a part of the keys of a step, and the
    /// output in a part of the head dimension. A warp has `block_q * split / warps` rows.
    pub split: u32,
    /// Pipeline stages of K and of V in shared memory.
    pub stages: u32,
    /// CTAs per SM that the register allocation must allow.
    pub min_blocks: u32,
    /// Whether it computes score terms.
    pub terms: bool,
}

/// The targets that a tile is compiled for.
type CompiledFor = fn(Target) -> bool;

/// At least 163 KB of shared memory per CTA.
fn large_smem(target: Target) -> bool {
    target.is_portable() && target.smem_limit() >= 163 * 1024
}

/// 99 KB of shared memory per CTA, and GPUs that are not known yet.
fn small_smem(target: Target) -> bool {
    target.is_portable() && !large_smem(target)
}

const fn tile(
    head_dim: usize,
    [block_q, block_kv]: [u32; 2],
    [warps, stages, min_blocks]: [u32; 3],
) -> AttentionFwd {
    let (types, head_dims) = (ElementTypes::all(DType::F16), HeadDims::all(head_dim));
    let (split, terms) = (1, false);
    AttentionFwd { types, head_dims, block_q, block_kv, warps, split, stages, min_blocks, terms }
}

/// The same with pairs of warps that share 32 rows.
const fn pairs(head_dim: usize, block: [u32; 2], rest: [u32; 3]) -> AttentionFwd {
    AttentionFwd { split: 2, ..tile(head_dim, block, rest) }
}

/// The same with score terms.
const fn with_terms(tile: AttentionFwd) -> AttentionFwd {
    AttentionFwd { terms: true, ..tile }
}

/// Tiles by head dimension. With 32 query rows per warp each fragment of K and V feeds two MMAs,
/// which halves the shared-memory reads; the accumulators fit into registers up to head_dim 128. At
/// 192 and 256 two warps share the rows, where shared memory has room for what they tell each
/// other. At 128 the tile that is fastest on Hopper leaves room for one CTA per SM where shared
/// memory has 100 KB, so those GPUs take half the keys per step and run two CTAs. Two stages, at
/// 64, hide the way of the tiles. The narrower tiles of 64 and 128 serve block masks with blocks of
/// 64 queries: dense problems take wide ones. At 512 a pair of warps shares 16 rows, and 99 KB hold
/// 32 queries beside 32 keys and values; other targets take the machine code for sm_80, or PTX.
/// Tiles with score terms are inside 64 × 64 bits; for their size there are four.
const TILES: &[(CompiledFor, AttentionFwd)] = &[
    (large_smem, tile(64, [128, 64], [4, 2, 2])),
    (small_smem, tile(64, [128, 64], [4, 1, 2])),
    (large_smem, tile(64, [64, 64], [4, 2, 2])),
    (small_smem, tile(64, [64, 64], [4, 1, 2])),
    (Target::is_portable, tile(96, [128, 64], [4, 1, 2])),
    (large_smem, tile(128, [128, 64], [4, 1, 2])),
    (small_smem, tile(128, [128, 32], [4, 1, 2])),
    (Target::is_portable, tile(128, [64, 64], [4, 1, 2])),
    (Target::is_portable, pairs(192, [64, 64], [4, 1, 2])),
    (large_smem, pairs(256, [64, 64], [4, 1, 2])),
    (small_smem, tile(256, [64, 64], [4, 1, 2])),
    (Target::is_baseline, pairs(512, [32, 32], [4, 1, 2])),
    (compiles_terms, with_terms(tile(64, [64, 64], [4, 2, 2]))),
    (compiles_terms, with_terms(tile(128, [64, 64], [4, 1, 2]))),
    (compiles_terms, with_terms(tile(256, [64, 64], [4, 1, 2]))),
    (compiles_terms, with_terms(pairs(512, [32, 32], [4, 1, 2]))),
];

pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionFwd> {
    each_dtype(TILES)
        .filter(move |(_, (compiled_for, _))| compiled_for(target))
        .map(|(dtype, (_, tile))| AttentionFwd { types: ElementTypes::all(dtype), ..tile })
}

impl AttentionFwd {
    /// The part that all attention kernels have.
    pub const fn tile(&self) -> AttentionTile {
        let Self { types, head_dims, block_q, block_kv, terms, .. } = *self;
        AttentionTile {
            types,
            head_dims,
            block_q,
            block_rows: 1,
            block_kv,
            heads: 1,
            lse: Lse::AsAsked,
            dense_only: false,
            block_masks: true,
            tensor_maps: false,
            terms,
            bits_only: false,
        }
    }
}

impl Family for AttentionFwd {
    fn source(&self) -> &'static str {
        "attention_fwd_sm80"
    }

    fn name(&self) -> String {
        let Self { types, head_dims, block_q, block_kv, warps, split, stages, .. } = self;
        let warps = match split {
            1 => warps.to_string(),
            _ => format!("{}x{split}", warps / split),
        };
        let terms = if self.terms { "_terms" } else { "" };
        format!("{types}_d{head_dims}_q{block_q}_kv{block_kv}_w{warps}_s{stages}{terms}")
    }

    fn warps(&self) -> u32 {
        self.warps
    }

    /// The Q tile, a ring of K tiles and of V tiles, and the probabilities that warps with the same
    /// rows give each other.
    fn smem_bytes(&self) -> u32 {
        let Self { types, head_dims, block_q, block_kv, split, stages, .. } = *self;
        let [q, k, v] = row_bytes(types, head_dims);
        let shared = if split == 1 { 0 } else { block_q * block_kv * types.q.size() as u32 };
        block_q * q + stages * block_kv * (k + v) + shared
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define_tile(define, self.types, self.head_dims);
        define("VARIANT_BLOCK_Q", self.block_q);
        define("VARIANT_BLOCK_KV", self.block_kv);
        define("VARIANT_WARPS", self.warps);
        define("VARIANT_SPLIT", self.split);
        define("VARIANT_STAGES", self.stages);
        define("VARIANT_MIN_BLOCKS", self.min_blocks);
        if self.terms {
            define("VARIANT_TERMS", 1);
        }
    }

    fn contains(&self) -> &'static [&'static str] {
        &["HMMA", "LDGSTS", "LDSM", "MUFU"]
    }

    fn supports(&self) -> Option<Support> {
        Some(self.tile().support())
    }

    fn profile_case(&self) -> Option<String> {
        Some(self.tile().profile_case())
    }
}
