use super::cost::relative_time;
use super::head_dims::Rows;
use super::{AttentionProblem, BlockMaskSizes, Strides};
use crate::Result;
use crate::check::is_tensor_map_stride;
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule, preference};
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::{AttentionTile, Lse};
use blockflash_sys::{DType, ElementTypes, HeadDims, Kernel};
use std::cmp::Reverse;
use std::sync::LazyLock;

/// The kernel for a problem on a GPU. Among the usable kernels it prefers machine code over PTX,
/// then the tile with the fewest columns of k and v that fits, then the grid that is estimated to
/// finish first. Under a block mask tiles must divide its blocks, and the largest such tiles are
/// taken.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) names what no kernel offers: the element type,
/// the head dimension, the blocks of the mask, the architecture or its shared memory.
pub fn select(problem: &AttentionProblem, gpu: &CudaProperties) -> Result<&'static Kernel> {
    selection::select(problem, gpu)
}

/// Whether this kernel can compute the problem on this GPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) says what does not fit.
pub fn accepts(kernel: &Kernel, problem: &AttentionProblem, gpu: &CudaProperties) -> Result<()> {
    selection::accepts(kernel, problem, gpu)
}

impl Problem for AttentionProblem {
    const OP: &'static str = "attention";
    const RULES: &'static [Rule<Self>] = &[
        HEAD_DIM,
        LOG_SUM_EXP,
        SHARED_MEMORY,
        BLOCKS,
        HEADS,
        EVEN,
        KEYS,
        TENSOR_MAPS,
        TERMS,
        BIAS,
    ];

    fn instead(dtype: DType) -> Option<&'static str> {
        match dtype {
            DType::E4M3 => Some(
                ", which the kernels of Hopper take: convert them to f16 or bf16, or attend to a \
                 cache of 8 bits",
            ),
            DType::E5M2 | DType::I8 => Some(
                ", which only the CPU takes: convert them to f16 or bf16, for Hopper also to e4m3, \
                 or attend to a cache of 8 bits",
            ),
            _ => None,
        }
    }

    type Tile = AttentionTile;
    type Rank = (Option<Reverse<(u32, u32)>>, u64);

    fn tile(kernel: &Kernel) -> Option<AttentionTile> {
        kernel.attention_tile()
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<AttentionProblem> =
            LazyLock::new(selection::all::<AttentionProblem>);
        &KERNELS
    }

    fn order(kernel: &Kernel, tile: &AttentionTile) -> [usize; 2] {
        [preference(kernel.target), tile.head_dims.sum()]
    }

    fn rank(c: &Candidate<'_, Self>) -> Self::Rank {
        let largest =
            c.problem.block_mask.is_some().then_some(Reverse((c.tile.block_q, c.tile.block_kv)));
        // The bit patterns of non-negative floats are ordered like their values.
        (largest, relative_time(c).to_bits())
    }

    fn key(&self) -> (DType, usize) {
        (self.types.q, 0)
    }

    fn key_of(tile: &AttentionTile) -> (DType, usize) {
        (tile.types.q, 0)
    }
}

/// Lines of the support table: each tile's range of head dimensions with and without a block mask,
/// and a head dimension that no kernel supports, but for codes.
pub(crate) fn support(dtype: DType) -> Vec<(String, AttentionProblem)> {
    let mut lines = Vec::new();
    // Codes have an output of the default type.
    let o = if dtype.is_code() { DType::BF16 } else { dtype };
    let types = ElementTypes { o, ..ElementTypes::all(dtype) };
    let dense =
        |head_dim| AttentionProblem::contiguous(types, [1; 3], [1; 2], HeadDims::all(head_dim));
    // Types without kernels have lines, too.
    let of_tiles = if dtype.is_code() { dtype } else { DType::F16 };
    let tiles = AttentionProblem::kernels().iter().flat_map(|peers| &peers.kernels);
    let tiles = tiles.filter(|(_, tile)| tile.types.q == of_tiles);
    let tiles = selection::ascending(tiles.map(|(_, tile)| tile.head_dims.max() as u32));
    let multiple = Rows::from(&dense(0)).multiple() as u32;
    let mut start = multiple;
    for tile in tiles {
        let size = format!("head_dim {start}..={tile} by {multiple}");
        let problem = dense(tile as usize);
        start = tile + multiple;
        lines.push((size.clone(), problem));
        for block in [64, 128] {
            let [block_q, block_kv] = [block; 2];
            let mask = BlockMaskSizes {
                block_q,
                block_kv,
                batch: 1,
                heads: 1,
                packed_rows: None,
                bits: false,
            };
            let problem = AttentionProblem { block_mask: Some(mask), ..problem };
            lines.push((format!("{size}, blocks of {block} × {block}"), problem));
        }
    }
    if !dtype.is_code() {
        lines.push(("other head_dim (59)".into(), dense(59)));
    }
    lines
}

type AttentionRule = Rule<AttentionProblem>;

const HEAD_DIM: AttentionRule = Rule {
    holds: |c| Rows::from(c.problem).fit(c.tile.into()),
    refuses: |c| Rows::from(c.problem).refusal(c.tile.into()),
    excludes_all: Some(|all| {
        let rows = Rows::from(all[0].problem);
        let widest = all.iter().map(|c| c.tile.head_dims.max()).max().unwrap_or(0);
        let kernels = rows.refusal_of_all(widest);
        match rows.head_dims.single() {
            Some(head_dim) if head_dim <= widest && head_dim % rows.multiple() != 0 => format!(
                "{kernels}; it runs with q, k and v zero-padded to {} and the softmax_scale of \
                 {head_dim}",
                head_dim.next_multiple_of(rows.multiple())
            ),
            _ => kernels,
        }
    }),
};

const LOG_SUM_EXP: AttentionRule = Rule {
    holds: |c| c.tile.lse.suits(c.problem.lse.is_some()),
    refuses: |c| match c.tile.lse {
        Lse::Never => "it computes no lse".into(),
        Lse::Always | Lse::AsAsked => "it always computes lse, which is not asked for".into(),
    },
    excludes_all: None,
};

const SHARED_MEMORY: AttentionRule = Rule::shared_memory(Some(|all| {
    let Candidate { problem, gpu, .. } = all[0];
    let (head_dim, dtype, bytes) = (problem.head_dims, problem.types, gpu.smem_per_block);
    format!("head_dim {head_dim} in {dtype}: no kernel fits into {bytes} bytes of shared memory")
}));

const BLOCKS: AttentionRule = Rule {
    holds: |c| {
        let fits = |mask: BlockMaskSizes| c.tile.takes_block_masks() && mask.divides_into(c.tile);
        c.tile.dense_only || c.problem.block_mask.is_none_or(fits)
    },
    refuses: |c| {
        if !c.tile.block_masks {
            return "block_mask is given, and it takes none".into();
        }
        let [block_q, block_kv] = blocks(c);
        format!(
            "tiles of {} × {} do not divide the blocks of the mask, {block_q} × {block_kv}",
            c.tile.block_q, c.tile.block_kv
        )
    },
    excludes_all: Some(|all| {
        let ([block_q, block_kv], head_dim) = (blocks(&all[0]), all[0].problem.head_dims);
        format!(
            "head_dim {head_dim}: no kernel has tiles that divide blocks of {block_q} × {block_kv}"
        )
    }),
};

/// Queries and keys per block of the mask.
fn blocks(c: &Candidate<'_, AttentionProblem>) -> [u32; 2] {
    c.problem.block_mask.map_or([0; 2], |mask| [mask.block_q, mask.block_kv])
}

/// Query heads that share a tile must share their keys and their block mask.
const HEADS: AttentionRule = Rule {
    holds: |c| {
        let shared = |groups: usize| {
            groups > 0 && (c.problem.num_heads_q / groups).is_multiple_of(c.tile.heads as usize)
        };
        shared(c.problem.num_heads_kv)
            && c.problem.block_mask.is_none_or(|mask| shared(mask.heads as usize))
    },
    refuses: |c| format!("{} heads of q share a tile, but not keys and a block mask", c.tile.heads),
    excludes_all: None,
};

/// CTAs of two block rows have a bit per key tile.
const KEYS: AttentionRule = Rule {
    holds: |c| c.problem.seqlen_kv <= c.tile.most_keys() as usize,
    refuses: |c| format!("it takes at most {} keys", c.tile.most_keys()),
    excludes_all: None,
};

/// The kernels for small grids compute all tiles of a rectangle of queries and keys.
const EVEN: AttentionRule = Rule {
    holds: |c| !c.tile.dense_only || c.problem.packed.is_none() && c.problem.block_mask.is_none(),
    refuses: |c| {
        let given = if c.problem.packed.is_some() { "cu_seqlens" } else { "block_mask" };
        format!("{given} is given, and it takes neither packed sequences nor block masks")
    },
    excludes_all: None,
};

/// Tensor maps describe q, k and v of the persistent kernels, so their strides must be positive and
/// not too large.
const TENSOR_MAPS: AttentionRule = Rule {
    holds: |c| !c.tile.tensor_maps || without_tensor_map(c.problem).is_none(),
    refuses: |c| {
        let (what, dim, stride) = without_tensor_map(c.problem).unwrap_or_default();
        format!("the {dim} stride of {what} is {stride} elements, which a tensor map cannot have")
    },
    excludes_all: None,
};

/// What is added to scores has kernels of its own, which take nothing else: those of other problems
/// are faster.
const TERMS: AttentionRule = Rule {
    holds: |c| {
        let adds = c.problem.scores.bias.is_some() || c.problem.scores.alibi;
        c.tile.terms == c.problem.terms().is_some() && !(c.tile.bits_only && adds)
    },
    refuses: |c| refusal_of_terms(c.problem),
    excludes_all: Some(|all| {
        let problem = all[0].problem;
        format!("head_dim {}: {}", problem.head_dims, refusal_of_terms(problem))
    }),
};

/// Why a kernel does not compute what is added to the scores of a problem, or needs such.
pub(crate) fn refusal_of_terms(problem: &AttentionProblem) -> String {
    match problem.terms() {
        Some(term) => format!("{term} is given, and it takes none"),
        None => "it is for scores with a bias, alibi or partial blocks".into(),
    }
}

/// The kernels for Hopper with score terms read a bias by a tensor map.
const BIAS: AttentionRule = Rule {
    holds: |c| {
        c.problem.scores.bias.is_none_or(|bias| {
            let pairs = bias.mapped && bias.broadcast[2..] == [false; 2];
            !c.tile.tensor_maps || pairs && bias.dtype == c.tile.types.q
        })
    },
    refuses: |c| {
        format!(
            "it takes a bias in {} with contiguous keys, at multiples of 16 bytes, and all queries",
            c.tile.types.q
        )
    },
    excludes_all: None,
};

/// The first stride that a tensor map cannot have: operand, dimension, stride in elements.
fn without_tensor_map(problem: &AttentionProblem) -> Option<(&'static str, &'static str, usize)> {
    let [batch, rows_q, rows_kv] = match problem.packed {
        Some(packed) => [1, packed.total_q, packed.total_kv],
        None => [problem.batch, problem.seqlen_q, problem.seqlen_kv],
    };
    let (queries, keys) =
        ([batch, rows_q, problem.num_heads_q], [batch, rows_kv, problem.num_heads_kv]);
    let operands = [("q", problem.q, queries), ("k", problem.k, keys), ("v", problem.v, keys)];
    first_without_tensor_map(&operands, problem.types.q)
}

/// The first stride of these operands that a tensor map cannot have: operand, dimension, stride in
/// elements. An operand has a name, strides, and its batch entries, rows and heads.
pub(crate) fn first_without_tensor_map(
    operands: &[(&'static str, Strides, [usize; 3])],
    dtype: DType,
) -> Option<(&'static str, &'static str, usize)> {
    // The map of a tensor without elements is never used.
    for &(what, strides, extents) in operands.iter().filter(|(.., extents)| !extents.contains(&0)) {
        let dims = [("batch", strides.batch), ("sequence", strides.seq), ("head", strides.head)];
        for ((dim, stride), extent) in dims.into_iter().zip(extents) {
            if extent > 1 && !is_tensor_map_stride(stride, dtype) {
                return Some((what, dim, stride));
            }
        }
    }
    None
}

#[cfg(test)]
#[path = "e4m3_tests.rs"]
mod e4m3_tests;

#[cfg(test)]
#[path = "hopper_tests.rs"]
mod hopper_tests;

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "unequal_tests.rs"]
mod unequal_tests;
