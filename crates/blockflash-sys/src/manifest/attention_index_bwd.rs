use super::attention::{define_head_dims, define_types, row_bytes, support};
use super::family::{Family, Support};
use crate::{DType, ElementTypes, HeadDims, Target};

/// The kernels of the gradients of attention by lists, with their compile-time parameters. Row
/// statistics come from `attention_bwd_delta_sm80`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionIndexBwd {
    /// `index_transpose_sm80`: for each bin of keys the queries that visit it.
    Transpose {
        /// Bins that a CTA lists.
        list_bins: u32,
    },
    /// `attention_index_bwd_kv_sm80`: dk and dv, and parts of dq.
    Keys(AttentionIndexBwdTile),
    /// `attention_index_bwd_sums_sm80`: dq from its parts, and dk and dv from theirs.
    Sums {
        /// Element type of the gradients.
        dtype: DType,
    },
}

/// A CTA has `keys` keys of a bin and visits rows, pairs of a query and a head, `rows` at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionIndexBwdTile {
    /// Element types of q, of k and v, and of o, and of their gradients.
    pub types: ElementTypes,
    /// Head dimensions of the tile; smaller ones are padded with zeros on chip.
    pub head_dims: HeadDims,
    /// Rows of a step of the main loop.
    pub rows: u32,
    /// Keys of a CTA, a divisor of 64.
    pub keys: u32,
    /// Warps that divide the columns of the gradients, of pairs of them that divide rows or keys.
    pub warps_columns: u32,
    /// CTAs per SM that the register allocation must allow.
    pub min_blocks: u32,
}

/// Stages of the tiles of Q.
const STAGES: u32 = 2;

const fn tile(
    dtype: DType,
    head_dim: usize,
    [rows, keys]: [u32; 2],
    min_blocks: u32,
) -> AttentionIndexBwd {
    AttentionIndexBwd::Keys(AttentionIndexBwdTile {
        types: ElementTypes::all(dtype),
        head_dims: HeadDims::all(head_dim),
        rows,
        keys,
        warps_columns: 2,
        min_blocks,
    })
}

/// Hopper has room for three CTAs of the narrowest tile.
fn kernels_of(target: Target, dtype: DType) -> [AttentionIndexBwd; 4] {
    [
        tile(dtype, 64, [64, 64], if target == Target::Sm90 { 3 } else { 2 }),
        tile(dtype, 128, [64, 64], 2),
        tile(dtype, 256, [32, 32], 2),
        AttentionIndexBwd::Sums { dtype },
    ]
}

/// Other targets run the machine code for sm_80, or PTX.
pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionIndexBwd> {
    let transpose = [AttentionIndexBwd::Transpose { list_bins: 1024 }];
    let of_types = [DType::F16, DType::BF16].into_iter();
    let all = transpose.into_iter().chain(of_types.flat_map(move |t| kernels_of(target, t)));
    all.filter(move |_| target.is_baseline())
}

impl AttentionIndexBwdTile {
    /// Equal parts of the columns of dq, each of which has a factor of its own in the workspace.
    pub const fn dq_columns(&self) -> u32 {
        self.warps_columns
    }
}

impl Family for AttentionIndexBwd {
    fn source(&self) -> &'static str {
        match self {
            Self::Transpose { .. } => "index_transpose_sm80",
            Self::Keys(_) => "attention_index_bwd_kv_sm80",
            Self::Sums { .. } => "attention_index_bwd_sums_sm80",
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Transpose { list_bins } => format!("b{list_bins}"),
            Self::Keys(AttentionIndexBwdTile { types, head_dims, rows, keys, .. }) => {
                format!("{types}_d{head_dims}_r{rows}_kv{keys}")
            }
            Self::Sums { dtype } => dtype.to_string(),
        }
    }

    fn warps(&self) -> u32 {
        match self {
            Self::Keys(tile) => 2 * tile.warps_columns,
            _ => 8,
        }
    }

    /// The tiles of K and V, the stages of Q with tables and statistics, dO, and two tiles of
    /// scores.
    fn smem_bytes(&self) -> u32 {
        let Self::Keys(AttentionIndexBwdTile { types, head_dims, rows, keys, .. }) = *self else {
            return 0;
        };
        let [q, k, v] = row_bytes(types, head_dims);
        let scores = 2 * rows * keys * types.q.size() as u32;
        keys * (k + v) + STAGES * rows * (q + 16) + rows * v + scores
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        match *self {
            Self::Transpose { list_bins } => {
                define("VARIANT_LIST_BINS", list_bins);
                define("VARIANT_MIN_BLOCKS", 3);
            }
            Self::Keys(tile) => {
                define_types(define, tile.types);
                define_head_dims(define, tile.head_dims);
                define("VARIANT_BLOCK_Q", tile.rows);
                define("VARIANT_BLOCK_KV", tile.keys);
                define("VARIANT_WARPS", self.warps());
                define("VARIANT_WARPS_D", tile.warps_columns);
                define("VARIANT_STAGES", STAGES);
                define("VARIANT_MIN_BLOCKS", tile.min_blocks);
            }
            Self::Sums { dtype } => {
                define_types(define, ElementTypes::all(dtype));
                define("VARIANT_MIN_BLOCKS", 4);
            }
        }
    }

    fn contains(&self) -> &'static [&'static str] {
        match self {
            Self::Transpose { .. } => &["ATOMS", "MATCH", "POPC"],
            Self::Keys(_) => &["HMMA", "LDGSTS", "LDSM", "MUFU"],
            Self::Sums { .. } => &["LDG", "FFMA"],
        }
    }

    fn supports(&self) -> Option<Support> {
        match self {
            Self::Keys(tile) => {
                Some(support("gradients of attention by lists", tile.types, tile.head_dims))
            }
            _ => None,
        }
    }
}
