use super::attention::{MLA, define_tile};
use super::family::{Family, Support, each_dtype};
use super::{AttentionTile, Lse};
use crate::{DType, ElementTypes, HeadDims, Target};

/// Tiles of `attention_fwd_sm90a`: persistent CTAs, one to three per SM, take tile after tile, each
/// `block_q` queries of `heads` heads against all keys. A producer warpgroup loads, each consumer
/// warpgroup computes 64 queries of one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionFwdHopper {
    /// Element types of q, of k and v, and of o.
    pub types: ElementTypes,
    /// Head dimensions of the tile; smaller ones are padded with zeros on chip.
    pub head_dims: HeadDims,
    /// Keys per step of the main loop; with two block rows a step has two such tiles.
    pub block_kv: u32,
    /// Consumer warpgroups.
    pub warpgroups: u32,
    /// Heads of q that share the keys of a tile: 1, or one per consumer warpgroup.
    pub heads: u32,
    /// Block rows of a CTA: 1, or one per consumer warpgroup. Each of them then computes the key
    /// tiles of its own list, and those that both lists have are loaded once.
    pub block_rows: u32,
    /// Pipeline stages of K and of V in shared memory; with two block rows V has two.
    pub stages: u32,
    /// Q tiles in shared memory per consumer warpgroup.
    pub q_stages: u32,
    /// Whether Q is multiplied from registers.
    pub q_in_registers: bool,
    /// CTAs that share an SM.
    pub blocks_per_multiprocessor: u32,
    /// Whether it computes the log-sum-exp, which takes a second sum of each row, of the unrounded
    /// probabilities. Separate kernels keep that cost away from calls that do not ask for it.
    pub lse: bool,
    /// Whether it computes score terms: a bias of its element type by a tensor map, ALiBi, and
    /// partial blocks where it takes block masks.
    pub terms: bool,
    /// Whether the only terms are partial blocks, which spares what the others take of shared
    /// memory, registers and time. For calls without the log-sum-exp.
    pub bits_only: bool,
    /// Nanoseconds on an H200 of a key tile, where all CTAs of an SM are busy, and of the change
    /// from one tile of queries to the next. Selection compares them.
    pub cost_ns: [u32; 2],
}

const fn tile(
    head_dim: usize,
    block_kv: u32,
    warpgroups: u32,
    [stages, q_stages]: [u32; 2],
    q_in_registers: bool,
    blocks_per_multiprocessor: u32,
    cost_ns: [u32; 2],
) -> AttentionFwdHopper {
    let (types, head_dims) = (ElementTypes::all(DType::F16), HeadDims::all(head_dim));
    let (heads, block_rows, [lse, terms, bits_only]) = (1, 1, [false; 3]);
    AttentionFwdHopper {
        types,
        head_dims,
        block_kv,
        warpgroups,
        heads,
        block_rows,
        stages,
        q_stages,
        q_in_registers,
        blocks_per_multiprocessor,
        lse,
        terms,
        bits_only,
        cost_ns,
    }
}

/// Tiles by head dimension. Three consumer warpgroups where registers allow it (outputs, scores and
/// probabilities take at most 132 of 160 per thread); with two or one, Q is in registers where some
/// are free. Tiles with fewer queries serve grids that would not fill the SMs. Tiles with 64 keys
/// serve block masks; at 192 and 256 they are the faster ones without a mask, too, as wider ones
/// straddle the diagonal of a causal mask. CTAs of 64 queries share an SM, since warpgroups with
/// lists of their own cannot share keys; three do at head_dim 64, where they change tiles of
/// queries at different times, which speeds up short causal sequences. Where heads of q share keys
/// and a block mask, two of them share a tile; where they do not, two block rows of 64 queries do
/// at head_dim 128, with steps of two key tiles, up to 2048 key tiles. Where values have 128
/// columns beside 192 of keys, 128 keys per step fit; 64 leave room for Q in registers and the
/// output in shared memory, so that queries change sooner.
const TILES: &[AttentionFwdHopper] = &[
    tile(64, 128, 3, [2, 2], false, 1, [1364, 1900]),
    tile(64, 128, 2, [2, 1], true, 1, [1073, 2100]),
    tile(64, 128, 1, [2, 1], true, 1, [737, 1700]),
    tile(64, 64, 2, [4, 1], true, 1, [583, 2100]),
    tile(64, 64, 1, [2, 1], true, 3, [774, 2500]),
    tile(96, 96, 3, [2, 1], false, 1, [1356, 3000]),
    tile(96, 128, 2, [2, 1], true, 1, [1310, 2800]),
    tile(128, 128, 2, [2, 1], true, 1, [1340, 3000]),
    tile(128, 128, 1, [2, 1], true, 1, [988, 2200]),
    tile(128, 64, 2, [3, 1], true, 1, [729, 2800]),
    tile(128, 64, 1, [2, 1], true, 2, [794, 3200]),
    AttentionFwdHopper { block_rows: 2, ..tile(128, 64, 2, [3, 1], true, 1, [740, 2800]) },
    AttentionFwdHopper { heads: 2, ..tile(128, 64, 2, [3, 1], true, 1, [729, 2800]) },
    AttentionFwdHopper { head_dims: MLA, ..tile(192, 128, 2, [2, 1], false, 1, [1658, 3900]) },
    AttentionFwdHopper { head_dims: MLA, ..tile(192, 64, 2, [3, 1], true, 1, [853, 3000]) },
    tile(192, 64, 2, [3, 1], false, 1, [983, 4000]),
    tile(256, 64, 2, [2, 1], false, 1, [1300, 4300]),
    tile(256, 64, 1, [2, 1], false, 1, [851, 2860]),
];

/// The tiles with score terms: head dimension, queries and keys. Others are padded, and all of them
/// compute the log-sum-exp, and store it where it is asked for. The widest one at 64 is for dense
/// problems; the others serve blocks of 64 and 128, too.
const WITH_TERMS: [(usize, [u32; 2]); 7] = [
    (64, [192, 128]),
    (64, [128, 128]),
    (64, [64, 64]),
    (128, [128, 128]),
    (128, [64, 64]),
    (256, [128, 64]),
    (256, [64, 64]),
];

pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionFwdHopper> {
    each_dtype(TILES).filter(move |_| target == Target::Sm90a).flat_map(|(dtype, tile)| {
        let tile = AttentionFwdHopper { types: ElementTypes::all(dtype), ..tile };
        let sizes = (tile.head_dims.max(), [tile.block_q(), tile.block_kv]);
        let has_terms = tile.heads * tile.block_rows == 1 && WITH_TERMS.contains(&sizes);
        let has_bits = has_terms && tile.block_q() <= 128 && tile.head_dims.max() <= 128;
        let of = |lse, terms, bits_only| AttentionFwdHopper { lse, terms, bits_only, ..tile };
        [of(false, false, false), of(true, false, false)]
            .into_iter()
            .chain(has_bits.then_some(of(false, true, true)))
            .chain(has_terms.then_some(of(true, true, false)))
            .collect::<Vec<_>>()
    })
}

impl AttentionFwdHopper {
    /// Bytes of a row of a panel in shared memory: the span of the swizzle, 64 elements.
    const PANEL_ROW_BYTES: u32 = 128;
    /// Bytes of 64 × 64 elements of a bias.
    const BOX_BYTES: u32 = 8192;
    /// Bytes for mbarriers and the announced tiles, and a page of zeros. With two block rows also
    /// the ring of steps, a bit per key tile and row, and what is read behind the last bit.
    const fn extra_bytes(&self) -> u32 {
        let steps = if self.block_rows > 1 { 4 * 2048 + 2 * 2048 / 8 } else { 0 };
        2048 + steps
    }

    /// The part that all attention kernels have.
    pub const fn tile(&self) -> AttentionTile {
        let Self { types, head_dims, block_kv, heads, block_rows, terms, bits_only, .. } = *self;
        let lse = match (self.adds_terms(), self.lse) {
            (true, _) => Lse::AsAsked,
            (false, true) => Lse::Always,
            (false, false) => Lse::Never,
        };
        AttentionTile {
            types,
            head_dims,
            block_q: self.block_q(),
            block_rows,
            block_kv,
            heads,
            lse,
            dense_only: false,
            block_masks: true,
            tensor_maps: true,
            terms,
            bits_only,
        }
    }

    /// Whether it adds a bias and ALiBi to scores.
    const fn adds_terms(&self) -> bool {
        self.terms && !self.bits_only
    }

    /// Bytes of the output on its way to global memory, where there is room. In the largest tiles
    /// that is where a bias is.
    pub(super) fn staging_bytes(&self) -> u32 {
        let staged = (self.q_in_registers || self.q_stages == 2)
            && self.blocks_per_multiprocessor == 1
            && self.block_rows == 1
            && !(self.head_dims.qk != self.head_dims.v && self.stages == 2)
            && !(self.adds_terms() && (self.head_dims.v == 128 || self.warpgroups == 3));
        let panels = self.head_dims.v.div_ceil(64) as u32;
        u32::from(staged) * self.warpgroups * 64 * panels * Self::PANEL_ROW_BYTES
    }

    /// Queries that visit the same keys: of a CTA, or of one of its block rows.
    pub const fn block_q(&self) -> u32 {
        64 * self.warpgroups / (self.heads * self.block_rows)
    }
}

impl Family for AttentionFwdHopper {
    fn source(&self) -> &'static str {
        "attention_fwd_sm90a"
    }

    fn name(&self) -> String {
        let Self { types, head_dims, block_kv, heads, block_rows, stages, .. } = self;
        let heads = if *heads > 1 { format!("_h{heads}") } else { String::new() };
        let rows = if *block_rows > 1 { format!("_r{block_rows}") } else { String::new() };
        let suffix = match (self.terms, self.bits_only, self.lse) {
            (true, true, _) => "_bits",
            (true, false, _) => "_terms",
            (false, _, true) => "_lse",
            (false, _, false) => "",
        };
        let block_q = self.block_q();
        format!("{types}_d{head_dims}_q{block_q}_kv{block_kv}_s{stages}{heads}{rows}{suffix}")
    }

    /// Four per consumer warpgroup, and the producer warpgroup.
    fn warps(&self) -> u32 {
        4 * (self.warpgroups + 1)
    }

    /// The Q tiles, a ring of K tiles and of V tiles, and per stage a panel with the ones whose
    /// product with the probabilities is the denominator. V has columns to spare for them in some
    /// tiles, and at 256 none would fit. With score terms boxes of the bias, for each consumer
    /// warpgroup one more than a step takes.
    fn smem_bytes(&self) -> u32 {
        let [qk, v] = [self.head_dims.qk, self.head_dims.v].map(|d| d.div_ceil(64) as u32);
        let ones = self.head_dims.v.is_multiple_of(64) && self.head_dims.v < 256;
        let q_rows = self.warpgroups * self.q_stages * 64 * qk;
        let ones = u32::from(ones);
        let unequal = qk != v && self.stages == 2;
        let kv_panels = if self.block_rows > 1 || self.adds_terms() || unequal {
            // Two stages of V, which share the ones.
            self.stages * qk + 2 * v + ones
        } else {
            self.stages * (qk + v + ones)
        };
        let kv_rows = kv_panels * self.block_kv * self.block_rows;
        let boxes = match self.adds_terms() {
            true => self.warpgroups * (self.block_kv / 64 + 1),
            false => 0,
        };
        (q_rows + kv_rows) * Self::PANEL_ROW_BYTES
            + self.staging_bytes()
            + boxes * Self::BOX_BYTES
            + self.extra_bytes()
    }

    fn counts_tiles(&self) -> bool {
        true
    }

    fn blocks_per_multiprocessor(&self) -> u32 {
        self.blocks_per_multiprocessor
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define_tile(define, self.types, self.head_dims);
        define("VARIANT_BLOCK_KV", self.block_kv);
        define("VARIANT_WARPGROUPS", self.warpgroups);
        define("VARIANT_HEADS", self.heads);
        define("VARIANT_BLOCK_ROWS", self.block_rows);
        define("VARIANT_STAGES", self.stages);
        define("VARIANT_Q_STAGES", self.q_stages);
        define("VARIANT_Q_IN_REGISTERS", self.q_in_registers.into());
        define("VARIANT_LSE", self.lse.into());
        define("VARIANT_CACHE", 0);
        define("VARIANT_MIN_BLOCKS", self.blocks_per_multiprocessor);
        if self.terms {
            define("VARIANT_TERMS", 1);
        }
        if self.bits_only {
            define("VARIANT_BITS_ONLY", 1);
        }
    }

    fn contains(&self) -> &'static [&'static str] {
        &["HGMMA", "UTMALDG", "MUFU", "VIMNMX3", "USETMAXREG"]
    }

    fn supports(&self) -> Option<Support> {
        Some(self.tile().support())
    }

    fn profile_case(&self) -> Option<String> {
        Some(self.tile().profile_case())
    }
}

#[cfg(test)]
#[path = "attention_fwd_sm90a_tests.rs"]
mod tests;
