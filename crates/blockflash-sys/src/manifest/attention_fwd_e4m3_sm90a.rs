use super::attention::{define_tile, support};
use super::family::{Family, Support};
use super::{AttentionTile, Lse};
use crate::{DType, ElementTypes, HeadDims, Target};

/// Tiles of `attention_fwd_e4m3_sm90a`: queries, keys and values are e4m3 with scales, and the
/// output has 16 bits. Persistent CTAs take tile after tile, each `64 · warpgroups` queries of one
/// head against all keys. A producer warpgroup loads, and transposes values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionFwdE4m3 {
    /// Element types of q, of k and v, and of o.
    pub types: ElementTypes,
    /// Head dimensions of the tile; smaller ones are padded with zeros on chip.
    pub head_dims: HeadDims,
    /// Keys per step of the main loop.
    pub block_kv: u32,
    /// Consumer warpgroups.
    pub warpgroups: u32,
    /// Pipeline stages of K in shared memory.
    pub stages: u32,
    /// Pipeline stages of V as it is in memory.
    pub loaded_stages: u32,
    /// Pipeline stages of V transposed.
    pub turned_stages: u32,
    /// Q tiles in shared memory per consumer warpgroup.
    pub q_stages: u32,
    /// Whether Q is multiplied from registers.
    pub q_in_registers: bool,
    /// CTAs that share an SM.
    pub blocks_per_multiprocessor: u32,
    /// Nanoseconds on an H200 of a key tile, where all CTAs of an SM are busy, and of the change
    /// from one tile of queries to the next. Selection compares them.
    pub cost_ns: [u32; 2],
}

/// `pairs` are queries and keys of a tile, `stages` those of K, of V as it is loaded, of V
/// transposed, and of Q.
const fn tile(
    head_dim: usize,
    pairs: [u32; 2],
    stages: [u32; 4],
    q_in_registers: bool,
    blocks_per_multiprocessor: u32,
    cost_ns: [u32; 2],
) -> AttentionFwdE4m3 {
    let [block_q, block_kv] = pairs;
    let [stages, loaded_stages, turned_stages, q_stages] = stages;
    AttentionFwdE4m3 {
        types: types(DType::BF16),
        head_dims: HeadDims::all(head_dim),
        block_kv,
        warpgroups: block_q / 64,
        stages,
        loaded_stages,
        turned_stages,
        q_stages,
        q_in_registers,
        blocks_per_multiprocessor,
        cost_ns,
    }
}

const fn types(o: DType) -> ElementTypes {
    ElementTypes { q: DType::E4M3, kv: DType::E4M3, o }
}

/// Tiles by head dimension. Those of 64 and 128 queries and keys serve block masks, and grids that
/// wider ones would not fill.
const TILES: &[AttentionFwdE4m3] = &[
    tile(64, [192, 128], [3, 2, 3, 2], false, 1, [1470, 1900]),
    tile(64, [128, 128], [3, 2, 3, 1], true, 1, [1150, 2100]),
    tile(64, [64, 64], [3, 2, 3, 1], true, 2, [790, 2500]),
    tile(128, [128, 128], [3, 2, 3, 1], true, 1, [1380, 3000]),
    tile(128, [64, 64], [3, 2, 3, 1], true, 2, [920, 3200]),
    tile(256, [128, 64], [3, 2, 3, 2], false, 1, [1360, 4300]),
    tile(256, [64, 64], [3, 2, 3, 1], false, 1, [1110, 2860]),
];

pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionFwdE4m3> {
    let of = |o| TILES.iter().map(move |&tile| AttentionFwdE4m3 { types: types(o), ..tile });
    [DType::F16, DType::BF16].into_iter().flat_map(of).filter(move |_| target == Target::Sm90a)
}

impl AttentionFwdE4m3 {
    /// Bytes for mbarriers, announced tiles and what else has no tile.
    const EXTRA_BYTES: u32 = 2048;

    /// The part that all attention kernels have.
    pub const fn tile(&self) -> AttentionTile {
        let Self { types, head_dims, block_kv, .. } = *self;
        AttentionTile {
            types,
            head_dims,
            block_q: self.block_q(),
            block_rows: 1,
            block_kv,
            heads: 1,
            lse: Lse::AsAsked,
            dense_only: false,
            block_masks: true,
            tensor_maps: true,
            terms: false,
            bits_only: false,
        }
    }

    /// Queries of a CTA.
    pub const fn block_q(&self) -> u32 {
        64 * self.warpgroups
    }

    /// Columns of a box of the tensor maps of q, k and v: bytes that a swizzle spans.
    pub const fn box_columns(&self) -> u32 {
        let head_dim = self.head_dims.max() as u32;
        if head_dim < 128 { head_dim } else { 128 }
    }
}

impl Family for AttentionFwdE4m3 {
    fn source(&self) -> &'static str {
        "attention_fwd_e4m3_sm90a"
    }

    /// With the type of the output; the source names the others.
    fn name(&self) -> String {
        let Self { types, head_dims, block_kv, stages, .. } = self;
        format!("{}_d{head_dims}_q{}_kv{block_kv}_s{stages}", types.o, self.block_q())
    }

    /// Four per consumer warpgroup, and the producer warpgroup.
    fn warps(&self) -> u32 {
        4 * (self.warpgroups + 1)
    }

    /// The Q tiles, a ring of K tiles, and two of V tiles.
    fn smem_bytes(&self) -> u32 {
        let row_bytes = self.head_dims.max() as u32;
        let q_rows = self.warpgroups * self.q_stages * 64;
        let kv_rows = (self.stages + self.loaded_stages + self.turned_stages) * self.block_kv;
        (q_rows + kv_rows) * row_bytes + Self::EXTRA_BYTES
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
        define("VARIANT_STAGES", self.stages);
        define("VARIANT_LOADED_STAGES", self.loaded_stages);
        define("VARIANT_TURNED_STAGES", self.turned_stages);
        define("VARIANT_Q_STAGES", self.q_stages);
        define("VARIANT_Q_IN_REGISTERS", self.q_in_registers.into());
        define("VARIANT_MIN_BLOCKS", self.blocks_per_multiprocessor);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["QGMMA", "UTMALDG", "MUFU", "F2FP", "LDSM", "STSM", "USETMAXREG"]
    }

    fn supports(&self) -> Option<Support> {
        Some(support("attention forward, 8 bits", self.types, self.head_dims))
    }

    /// Cases have an output of the default type.
    fn profile_case(&self) -> Option<String> {
        let HeadDims { qk, .. } = self.head_dims;
        let case = || format!("b4_s4096_h{}_d{qk}_full_{}", 2048 / qk, self.types.q);
        (self.types.o == DType::BF16).then(case)
    }
}

#[cfg(test)]
#[path = "attention_fwd_e4m3_sm90a_tests.rs"]
mod tests;
