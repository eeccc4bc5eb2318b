use super::AttentionBwdStep::{Keys, KeysAndSums, Queries, Sums};
use super::attention::{MLA, define_head_dims, define_types};
use super::family::{Family, Support, each_dtype};
use super::{AttentionBwdStep, AttentionBwdTile};
use crate::{DType, ElementTypes, HeadDims, Target};

/// Tiles of the Hopper kernels of the attention backward: `attention_bwd_q_sm90a`,
/// `attention_bwd_kv_sm90a` with and without sums of dq, and `attention_bwd_dq_sm90a`, which
/// rounds the sums. A CTA keeps a pair of tiles of one side and pairs of the other side pass
/// through shared memory; a producer warpgroup loads, one or two consumer warpgroups compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionBwdHopper {
    /// What it computes.
    pub step: AttentionBwdStep,
    /// Element types of q, of k and v, and of o, and of their gradients.
    pub types: ElementTypes,
    /// Head dimensions of the tile; smaller ones are padded with zeros on chip.
    pub head_dims: HeadDims,
    /// Rows of the tiles that a CTA keeps: keys, or queries where it computes dq.
    pub resident_rows: u32,
    /// Rows of the tiles that pass through.
    pub stream_rows: u32,
    /// Pipeline stages: of Q and of dO, or of K and of V.
    pub stages: [u32; 2],
    /// Consumer warpgroups: two, or one where two CTAs share an SM.
    pub warpgroups: u32,
    /// Whether it computes score terms, but for a bias.
    pub terms: bool,
}

const fn tile(
    step: AttentionBwdStep,
    head_dim: usize,
    [resident_rows, stream_rows]: [u32; 2],
    stages: [u32; 2],
) -> AttentionBwdHopper {
    let (types, head_dims) = (ElementTypes::all(DType::F16), HeadDims::all(head_dim));
    let (warpgroups, terms) = (2, false);
    AttentionBwdHopper {
        step,
        types,
        head_dims,
        resident_rows,
        stream_rows,
        stages,
        warpgroups,
        terms,
    }
}

/// For block masks with 64 queries and 64 keys per block. CTAs have lists of their own, so they
/// cannot share what passes through, but two of them share an SM: one loads its first tiles or
/// stores its gradients while the other one computes.
const fn narrow(step: AttentionBwdStep, head_dim: usize, stages: [u32; 2]) -> AttentionBwdHopper {
    AttentionBwdHopper { warpgroups: 1, ..tile(step, head_dim, [64, 64], stages) }
}

/// The same with ALiBi and bits of partial blocks.
const fn with_terms(tile: AttentionBwdHopper) -> AttentionBwdHopper {
    AttentionBwdHopper { terms: true, ..tile }
}

/// Tiles by head dimension. The sums of dq need 96 KB at a head_dim of 128, and registers for a
/// third accumulator. At 64 tiles of 128 queries come first, and those of 64 take what has capped
/// scores. At 192, in bf16 only, the two warpgroups share 96 keys, with one stage of dO and one
/// staged tile of dq, also beside values of 128. There are no sums of dq at 256, only of parts of
/// dk and dv. Where dq has a kernel of its own warpgroups share 64 keys beyond 128. Narrow tiles
/// come after the others, so only block masks take them. Beside score terms dq has a kernel of its
/// own; a bias and head dimensions beyond 128 have portable kernels.
const TILES: &[AttentionBwdHopper] = &[
    tile(Queries, 64, [128, 128], [2, 2]),
    tile(Queries, 96, [128, 128], [2, 2]),
    tile(Queries, 128, [128, 128], [2, 2]),
    tile(Queries, 192, [128, 64], [2, 2]),
    tile(Queries, 256, [128, 64], [2, 1]),
    narrow(Queries, 64, [3, 3]),
    narrow(Queries, 128, [2, 2]),
    tile(Keys, 64, [128, 64], [2, 2]),
    tile(Keys, 96, [128, 64], [2, 2]),
    tile(Keys, 128, [128, 64], [2, 2]),
    tile(Keys, 192, [64, 64], [2, 2]),
    tile(Keys, 256, [64, 64], [2, 2]),
    narrow(Keys, 64, [3, 3]),
    narrow(Keys, 128, [2, 2]),
    tile(KeysAndSums, 64, [128, 128], [2, 2]),
    tile(KeysAndSums, 64, [128, 64], [2, 2]),
    tile(KeysAndSums, 96, [128, 64], [2, 2]),
    tile(KeysAndSums, 128, [128, 64], [2, 2]),
    AttentionBwdHopper { head_dims: MLA, ..tile(KeysAndSums, 192, [96, 64], [2, 1]) },
    tile(KeysAndSums, 192, [96, 64], [2, 1]),
    with_terms(tile(Queries, 64, [128, 128], [2, 2])),
    with_terms(tile(Queries, 128, [128, 128], [2, 2])),
    with_terms(narrow(Queries, 64, [3, 3])),
    with_terms(narrow(Queries, 128, [2, 2])),
    with_terms(tile(Keys, 64, [128, 64], [2, 2])),
    with_terms(tile(Keys, 128, [128, 64], [2, 2])),
    with_terms(narrow(Keys, 64, [3, 3])),
    with_terms(narrow(Keys, 128, [2, 2])),
    tile(Sums, 64, [64, 0], [0, 0]),
    tile(Sums, 96, [64, 0], [0, 0]),
    tile(Sums, 128, [64, 0], [0, 0]),
    tile(Sums, 192, [64, 0], [0, 0]),
    tile(Sums, 256, [64, 0], [0, 0]),
];

pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionBwdHopper> {
    each_dtype(TILES)
        .filter(move |_| target == Target::Sm90a)
        .map(|(dtype, tile)| AttentionBwdHopper { types: ElementTypes::all(dtype), ..tile })
        .filter(|tile| tile.types.q == DType::BF16 || !tile.rounds_probabilities())
}

impl AttentionBwdHopper {
    /// Bytes of a row of a panel in shared memory: the span of the swizzle, 64 elements.
    const PANEL_ROW_BYTES: u32 = 128;
    /// Bytes for row statistics, announced tiles and mbarriers.
    const PAGE_BYTES: u32 = 2048;

    /// Whether the gradients of scores come from rounded probabilities, small ones of which f16
    /// does not represent well enough.
    const fn rounds_probabilities(&self) -> bool {
        matches!(self.step, KeysAndSums) && self.head_dims.max() > 128
    }

    /// Whether a kernel of this tile's head dimension sums dq beside dk and dv.
    pub const fn has_sums_of_dq(&self) -> bool {
        let width = self.head_dims.max();
        width <= 128 || width <= 192 && matches!(self.types.q, DType::BF16)
    }

    /// Where warpgroups share keys beside sums of dq, gradients are transposed on their way out.
    const fn splits_heads(&self) -> bool {
        matches!(self.step, Keys) || matches!(self.step, KeysAndSums) && self.head_dims.max() <= 128
    }

    /// The part that all kernels of the attention backward have.
    pub const fn tile(&self) -> AttentionBwdTile {
        let Self { step, types, head_dims, resident_rows, stream_rows, terms, .. } = *self;
        let [block_q, block_kv] = match step {
            Keys | KeysAndSums => [stream_rows, resident_rows],
            _ => [resident_rows, stream_rows],
        };
        let (tensor_maps, splits_heads) = (!matches!(step, Sums), self.splits_heads());
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

impl Family for AttentionBwdHopper {
    fn source(&self) -> &'static str {
        match self.step {
            Queries => "attention_bwd_q_sm90a",
            Sums => "attention_bwd_dq_sm90a",
            _ => "attention_bwd_kv_sm90a",
        }
    }

    fn name(&self) -> String {
        let Self { step, types, head_dims, stages: [first, second], .. } = self;
        let AttentionBwdTile { block_q, block_kv, .. } = self.tile();
        let sums = if *step == KeysAndSums { "_sums" } else { "" };
        let suffix = if self.terms { "_terms" } else { sums };
        match step {
            Sums => format!("{types}_d{head_dims}"),
            _ => format!("{types}_d{head_dims}_q{block_q}_kv{block_kv}_s{first}x{second}{suffix}"),
        }
    }

    /// The consumer warpgroups and the producer warpgroup; eight warps that round the sums.
    fn warps(&self) -> u32 {
        if self.step == Sums { 8 } else { 4 * (self.warpgroups + 1) }
    }

    /// The resident tiles, the two rings, the scores that warpgroups exchange, the staged sums of
    /// dq, and a page of small things.
    fn smem_bytes(&self) -> u32 {
        let rows = |side: usize| self.resident_rows + self.stages[side] * self.stream_rows;
        let [qk, v] = [self.head_dims.qk, self.head_dims.v].map(|d| d.div_ceil(64) as u32);
        let tiles = (rows(0) * qk + rows(1) * v) * Self::PANEL_ROW_BYTES;
        let scores = 2 * self.resident_rows * self.stream_rows * 2;
        let more = match self.step {
            Sums => return 0,
            Keys if self.resident_rows < 64 * self.warpgroups => scores,
            KeysAndSums => {
                scores + self.stages[1] * self.stream_rows * self.head_dims.qk as u32 * 4
            }
            _ => 0,
        };
        tiles + more + Self::PAGE_BYTES
    }

    /// The counter gives blocks of keys their place in the order of sums.
    fn counts_tiles(&self) -> bool {
        self.step == KeysAndSums
    }

    /// Beyond a head_dim of 128 gradients are stored by way of the resident tiles, which have no
    /// second place for those of the next block.
    fn is_persistent(&self) -> bool {
        self.step == KeysAndSums && self.head_dims.max() <= 128
    }

    /// For dk and dv it starts beside the statistics, for dq beside dk and dv.
    fn waits_for_predecessor(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define_types(define, self.types);
        define("VARIANT_MIN_BLOCKS", if self.warpgroups == 1 { 2 } else { 1 });
        if self.step == Sums {
            return define("VARIANT_SUMS_HEAD_DIM", self.head_dims.qk as u32);
        }
        define_head_dims(define, self.head_dims);
        define("VARIANT_RESIDENT_ROWS", self.resident_rows);
        define("VARIANT_STREAM_ROWS", self.stream_rows);
        define("VARIANT_STAGES", self.stages[0]);
        define("VARIANT_SECOND_STAGES", self.stages[1]);
        define("VARIANT_DQ", u32::from(self.step == KeysAndSums));
        if self.terms {
            define("VARIANT_TERMS", 1);
        }
    }

    fn contains(&self) -> &'static [&'static str] {
        match self.step {
            Sums => &["F2FP", "ACQBULK"],
            KeysAndSums => {
                &["HGMMA", "UTMALDG", "UBLKCP", "UBLKRED", "MUFU", "USETMAXREG", "ACQBULK"]
            }
            _ => &["HGMMA", "UTMALDG", "MUFU", "USETMAXREG", "ACQBULK"],
        }
    }

    fn supports(&self) -> Option<Support> {
        self.tile().support()
    }

    fn profile_case(&self) -> Option<String> {
        self.tile().profile_case()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{self, Variant};

    #[test]
    fn tiles_fit() {
        let kernels = manifest::kernels().iter().filter_map(|kernel| {
            Some((kernel, kernel.attention_bwd_tile()?)).filter(|(kernel, _)| {
                matches!(kernel.variant, Variant::AttentionBwd(_) | Variant::AttentionBwdHopper(_))
            })
        });
        let mut steps = std::collections::HashSet::new();
        for (kernel, tile) in kernels {
            let symbol = kernel.symbol();
            assert!(kernel.smem_bytes() <= kernel.target.smem_limit(), "{symbol}");
            assert_eq!(kernel.family().counts_tiles(), tile.step == KeysAndSums, "{symbol}");
            // Masks have blocks of 64 or multiples, but none where dq is summed.
            let dense = tile.step == KeysAndSums;
            let divides = |rows: u32| rows == 0 || 128 % rows == 0 || dense;
            assert!(divides(tile.block_q) && divides(tile.block_kv), "{symbol}");
            steps.insert(tile.step);
        }
        assert_eq!(steps.len(), 8, "every step has kernels");
    }

    #[test]
    fn sums_are_rounded_by_kernels_of_the_same_width() {
        let all: Vec<_> = tiles(Target::Sm90a).collect();
        let of = |step| all.iter().filter(move |tile| tile.step == step);
        for sums in of(Sums) {
            let same = |tile: &&AttentionBwdHopper| {
                (tile.head_dims, tile.types) == (sums.head_dims, sums.types)
            };
            assert_eq!(sums.has_sums_of_dq(), of(KeysAndSums).any(|tile| same(&tile)), "{sums:?}");
            assert!(of(Keys).any(|tile| same(&tile) && tile.tile().splits_heads), "{sums:?}");
        }
        for leaves in of(Keys).chain(of(KeysAndSums)) {
            let rounds = |tile: &AttentionBwdHopper| {
                (tile.head_dims.qk, tile.types) == (leaves.head_dims.qk, leaves.types)
            };
            assert!(of(Sums).any(rounds), "{leaves:?}");
        }
    }

    #[test]
    fn shared_memory() {
        let bytes = |step, head_dim| {
            let same = |tile: &AttentionBwdHopper| {
                (tile.step, tile.head_dims) == (step, HeadDims::all(head_dim))
            };
            tiles(Target::Sm90a).find(same).unwrap().smem_bytes()
        };
        let narrow_values = tiles(Target::Sm90a).find(|tile| tile.head_dims == MLA).unwrap();
        assert_eq!(narrow_values.smem_bytes(), 202_752);
        assert_eq!(bytes(KeysAndSums, 96), 215_040);
        assert_eq!(bytes(KeysAndSums, 128), 231_424);
        assert_eq!(bytes(KeysAndSums, 192), 223_232);
        assert_eq!(bytes(Keys, 128), 133_120);
        assert_eq!(bytes(Keys, 256), 215_040);
        assert_eq!(bytes(Queries, 256), 231_424);
        let narrow = |tile: &AttentionBwdHopper| tile.warpgroups == 1;
        for tile in tiles(Target::Sm90a).filter(narrow) {
            // Of the 228 KB of an SM every CTA takes one more, and one for its work.
            assert!(2 * (tile.smem_bytes() + 2048) <= 228 * 1024, "{tile:?}");
        }
    }
}
