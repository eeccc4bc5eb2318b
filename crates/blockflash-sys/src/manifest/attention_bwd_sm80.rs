use super::AttentionBwdStep::{Bias, Keys, Queries, Sinks, Statistics, Zeros};
use super::attention::{compiles_terms, define_head_dims, define_types, row_bytes};
use super::family::{Family, Support, each_dtype};
use super::{AttentionBwdStep, AttentionBwdTile};
use crate::{DType, ElementTypes, HeadDims, Target};

/// Tiles of the portable kernels of the attention backward: `attention_bwd_delta_sm80` for the
/// steps over rows, `attention_bwd_q_sm80`, `attention_bwd_kv_sm80` and `attention_bwd_bias_sm80`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionBwd {
    /// What it computes.
    pub step: AttentionBwdStep,
    /// Element types of q, of k and v, and of o, and of their gradients.
    pub types: ElementTypes,
    /// Head dimensions of the tile; smaller ones are padded with zeros on chip.
    pub head_dims: HeadDims,
    /// Queries per CTA or per step of the main loop.
    pub block_q: u32,
    /// Keys per CTA or per step of the main loop.
    pub block_kv: u32,
    /// Warps per CTA.
    pub warps: u32,
    /// Warps that share their queries or keys and divide the columns of the gradient.
    pub warps_d: u32,
    /// Pipeline stages of the tiles that pass through shared memory.
    pub stages: u32,
    /// CTAs per SM that the register allocation must allow.
    pub min_blocks: u32,
    /// Whether it computes score terms.
    pub terms: bool,
}

const fn tile(
    step: AttentionBwdStep,
    head_dim: usize,
    [block_q, block_kv]: [u32; 2],
    [warps, warps_d]: [u32; 2],
    [stages, min_blocks]: [u32; 2],
) -> AttentionBwd {
    let (types, head_dims) = (ElementTypes::all(DType::F16), HeadDims::all(head_dim));
    let terms = false;
    AttentionBwd {
        step,
        types,
        head_dims,
        block_q,
        block_kv,
        warps,
        warps_d,
        stages,
        min_blocks,
        terms,
    }
}

/// The same with score terms.
const fn with_terms(
    step: AttentionBwdStep,
    head_dim: usize,
    blocks: [u32; 2],
    warps: [u32; 2],
    rest: [u32; 2],
) -> AttentionBwd {
    AttentionBwd { terms: true, ..tile(step, head_dim, blocks, warps, rest) }
}

/// Tiles by head dimension. Of the tiles for queries, the narrower ones of 64 and 128 serve block
/// masks with 64 queries per block; dense problems take the first tile. The kernels for keys hold
/// two accumulators of the head dimension, so their tiles are smaller, and beyond 128 pairs of
/// warps divide it; at 512 so do those for queries, and four warps those for keys. All fit into
/// 99 KB of shared memory. Tiles with score terms are inside 64 × 64 bits; for their size there are
/// four of each step.
const TILES: &[AttentionBwd] = &[
    tile(Zeros, 512, [64, 0], [8, 1], [1, 1]),
    tile(Statistics, 512, [64, 0], [8, 1], [1, 1]),
    tile(Sinks, 512, [64, 0], [8, 1], [1, 1]),
    tile(Queries, 64, [128, 32], [4, 1], [2, 2]),
    tile(Queries, 64, [64, 64], [4, 1], [2, 2]),
    tile(Queries, 96, [64, 64], [4, 1], [1, 2]),
    tile(Queries, 128, [128, 32], [4, 1], [1, 1]),
    tile(Queries, 128, [64, 64], [4, 1], [1, 2]),
    tile(Queries, 192, [64, 32], [4, 1], [1, 2]),
    tile(Queries, 256, [64, 32], [4, 1], [1, 1]),
    tile(Queries, 512, [32, 16], [4, 2], [1, 1]),
    tile(Keys, 64, [64, 64], [4, 1], [2, 2]),
    tile(Keys, 64, [32, 64], [4, 1], [2, 2]),
    tile(Keys, 96, [32, 64], [4, 1], [2, 2]),
    tile(Keys, 128, [32, 64], [4, 1], [2, 2]),
    tile(Keys, 192, [32, 64], [8, 2], [1, 1]),
    tile(Keys, 256, [32, 32], [4, 2], [1, 1]),
    tile(Keys, 512, [16, 32], [8, 4], [1, 1]),
    with_terms(Queries, 64, [64, 64], [4, 1], [2, 2]),
    with_terms(Queries, 128, [64, 64], [4, 1], [1, 2]),
    with_terms(Queries, 256, [64, 32], [4, 1], [1, 1]),
    with_terms(Queries, 512, [32, 16], [4, 2], [1, 1]),
    with_terms(Keys, 64, [32, 64], [4, 1], [2, 2]),
    with_terms(Keys, 128, [32, 64], [4, 1], [2, 2]),
    with_terms(Keys, 256, [32, 32], [4, 2], [1, 1]),
    with_terms(Keys, 512, [16, 32], [8, 4], [1, 1]),
    with_terms(Bias, 64, [64, 64], [4, 1], [1, 2]),
    with_terms(Bias, 128, [64, 64], [4, 1], [1, 2]),
    with_terms(Bias, 256, [64, 32], [4, 1], [1, 1]),
    with_terms(Bias, 512, [32, 16], [2, 1], [1, 1]),
];

/// With 128 queries of head_dim 128 one CTA fits where shared memory has 100 KB, two where it has
/// 164 KB. With 64 queries of head_dim 64 the kernel for keys spills on sm_120, and unknown GPUs
/// take what it takes. Hopper has kernels of its own for narrow blocks; what no tensor map can
/// describe takes the tile for a larger head_dim there. It has none for the gradient of the bias.
/// The tiles of 512 are in machine code for few GPUs.
fn is_compiled(tile: &AttentionBwd, target: Target) -> bool {
    let newest = matches!(target, Target::Sm120 | Target::Ptx80);
    target.is_portable()
        && match (tile.step, tile.head_dims.max(), tile.block_q) {
            (Bias, ..) => compiles_terms(target) || target == Target::Sm90,
            _ if tile.terms => compiles_terms(target),
            (Queries | Keys, 512, _) => target.is_baseline(),
            (Queries, 128, 128) => target.smem_limit() >= 163 * 1024,
            (Queries, 64 | 128, 64) => target != Target::Sm90,
            (Keys, 64, 64) => !newest,
            (Keys, 64, 32) => newest,
            _ => true,
        }
}

pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionBwd> {
    each_dtype(TILES)
        .filter(move |(_, tile)| is_compiled(tile, target))
        .map(|(dtype, tile)| AttentionBwd { types: ElementTypes::all(dtype), ..tile })
}

impl AttentionBwd {
    /// The part that all kernels of the attention backward have.
    pub const fn tile(&self) -> AttentionBwdTile {
        let Self { step, types, head_dims, block_q, block_kv, terms, .. } = *self;
        let (tensor_maps, splits_heads) = (false, false);
        AttentionBwdTile {
            step,
            types,
            head_dims,
            block_q,
            block_kv,
            tensor_maps,
            splits_heads,
            terms,
        }
    }
}

impl Family for AttentionBwd {
    fn source(&self) -> &'static str {
        match self.step {
            Queries => "attention_bwd_q_sm80",
            Keys => "attention_bwd_kv_sm80",
            Bias => "attention_bwd_bias_sm80",
            _ => "attention_bwd_delta_sm80",
        }
    }

    fn name(&self) -> String {
        let Self { step, types, head_dims, block_q, block_kv, warps, warps_d, stages, .. } = self;
        let terms = if self.terms { "_terms" } else { "" };
        let of = |warps: String| {
            format!("{types}_d{head_dims}_q{block_q}_kv{block_kv}_w{warps}_s{stages}{terms}")
        };
        match step {
            Queries | Bias if *warps_d == 1 => of(warps.to_string()),
            Queries | Bias | Keys => of(format!("{}x{warps_d}", warps / warps_d)),
            _ => format!("{types}_{step:?}").to_lowercase(),
        }
    }

    fn warps(&self) -> u32 {
        self.warps
    }

    /// For queries and for the bias: the tiles of Q and dO, and a ring of K and V. For keys: the
    /// tiles of K and V, a ring of Q and dO with their row statistics, and two tiles of scores that
    /// warps exchange.
    fn smem_bytes(&self) -> u32 {
        let [q, k, v] = row_bytes(self.types, self.head_dims);
        let size = self.types.q.size() as u32;
        let [of_q, of_kv] = [self.block_q * (q + v), self.block_kv * (k + v)];
        match self.step {
            Queries | Bias => of_q + self.stages * of_kv,
            Keys => {
                let exchange = 2 * self.block_q * self.block_kv * size;
                // Each needs 16 queries of its own.
                let exchanges = self.warps_d > 1 && self.block_q / 16 >= self.warps_d;
                let exchanged = if exchanges { exchange } else { 0 };
                of_kv + self.stages * (of_q + 2 * self.block_q * 4) + exchanged
            }
            _ => 0,
        }
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define_types(define, self.types);
        define("VARIANT_MIN_BLOCKS", self.min_blocks);
        match self.step {
            Statistics => return define("VARIANT_STEP", 0),
            Sinks => return define("VARIANT_STEP", 1),
            Zeros => return define("VARIANT_STEP", 2),
            Keys => define("VARIANT_WARPS_D", self.warps_d),
            Queries => define("VARIANT_SPLIT", self.warps_d),
            _ => {}
        }
        define_head_dims(define, self.head_dims);
        define("VARIANT_BLOCK_Q", self.block_q);
        define("VARIANT_BLOCK_KV", self.block_kv);
        define("VARIANT_WARPS", self.warps);
        define("VARIANT_STAGES", self.stages);
        if self.terms {
            define("VARIANT_TERMS", 1);
        }
    }

    fn contains(&self) -> &'static [&'static str] {
        match self.step {
            Statistics => &["SHFL", "FFMA"],
            Sinks => &["MUFU"],
            Zeros => &["STG"],
            _ => &["HMMA", "LDGSTS", "LDSM", "MUFU"],
        }
    }

    fn supports(&self) -> Option<Support> {
        self.tile().support()
    }

    fn profile_case(&self) -> Option<String> {
        self.tile().profile_case()
    }
}
