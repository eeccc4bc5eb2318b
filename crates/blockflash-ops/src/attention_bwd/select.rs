use super::AttentionBackwardProblem;
use super::plan::workspace;
use crate::Result;
use crate::attention::{
    AttentionProblem, BlockMaskSizes, Rows, first_without_tensor_map, refusal_of_terms,
};
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule, preference};
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::{AttentionBwdStep as Step, AttentionBwdTile, Variant};
use blockflash_sys::{DType, Kernel};
use std::sync::LazyLock;

/// Fewest keys for which dq is summed beside dk and dv: shorter sequences do not make up for what a
/// block of keys costs beside its tiles of queries. A persistent CTA hides most of that, and more
/// of it where it takes many blocks.
const SUMS_FROM_KEYS: usize = 1024;
const PERSISTENT_SUMS_FROM_KEYS: usize = 512;
const MANY_BLOCKS_SUMS_FROM_KEYS: usize = 192;
/// Blocks of keys of a persistent CTA that are many. Measured on an H200 with 96 to 441 keys: with
/// 6 to 15 blocks sums are 7 to 19 % faster, with 4 as fast, and with 1 or 2 slower by 3 to 22 %.
const MANY_BLOCKS: usize = 4;

/// The kernel that computes dk and dv of a problem on a GPU, and with it the scheme: either sums of
/// dq beside them, or a kernel of its own for dq. The kernels of the other steps follow from it.
///
/// Sums are taken on Hopper for a dense mask and a head_dim up to 128 from 512 keys on, or from 192
/// where each SM has several blocks of keys, and for 129 to 192 of bf16 without softcap from 1024
/// on, if the workspace has room for them.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) names what no kernel offers: the element type,
/// the head dimension, the blocks of the mask or its transpose, the architecture.
pub fn select(problem: &AttentionBackwardProblem, gpu: &CudaProperties) -> Result<&'static Kernel> {
    selection::select(&problem.led(gpu), gpu)
}

/// Whether this kernel can compute its step of the problem on this GPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) says what does not fit.
pub fn accepts(
    kernel: &Kernel,
    problem: &AttentionBackwardProblem,
    gpu: &CudaProperties,
) -> Result<()> {
    selection::accepts(kernel, problem, gpu)
}

impl AttentionBackwardProblem {
    /// The problem whose kernel is the one of the step that decides about the scheme.
    pub(super) fn led(self, gpu: &CudaProperties) -> Self {
        let kernel = |step| selection::select(&self.at(step), gpu).ok();
        let sums = match [Step::KeysAndSums, Step::Keys].map(kernel) {
            [Some(sums), Some(keys)] => {
                let width =
                    |kernel: &Kernel| kernel.attention_bwd_tile().map(|tile| tile.head_dims.max());
                let fewest = match sums.family().is_persistent() {
                    true if self.has_many_blocks(sums, gpu) => MANY_BLOCKS_SUMS_FROM_KEYS,
                    true => PERSISTENT_SUMS_FROM_KEYS,
                    false => SUMS_FROM_KEYS,
                };
                width(sums) <= width(keys) && self.forward.seqlen_kv >= fewest
            }
            _ => false,
        };
        self.at(if sums { Step::KeysAndSums } else { Step::Keys })
    }

    fn has_many_blocks(&self, kernel: &Kernel, gpu: &CudaProperties) -> bool {
        let forward = &self.forward;
        let keys = kernel.attention_bwd_tile().map_or(1, |tile| tile.block_kv as usize);
        let blocks = forward.seqlen_kv.div_ceil(keys.max(1));
        let all = blocks.saturating_mul(forward.batch).saturating_mul(forward.num_heads_kv);
        all >= MANY_BLOCKS * gpu.multiprocessors as usize
    }

    /// The same problem, for which a kernel of this step is selected.
    pub(super) fn at(self, step: Step) -> Self {
        Self { step, ..self }
    }
}

impl Problem for AttentionBackwardProblem {
    const OP: &'static str = "attention_bwd";
    const RULES: &'static [Rule<Self>] = &[
        STEP,
        HEAD_DIM,
        WIDTH,
        SHARED_MEMORY,
        TRANSPOSE,
        BLOCKS,
        TENSOR_MAPS,
        SUMS,
        SOFTCAP,
        TERMS,
    ];

    type Tile = AttentionBwdTile;
    type Rank = ();

    fn tile(kernel: &Kernel) -> Option<AttentionBwdTile> {
        kernel.attention_bwd_tile()
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<AttentionBackwardProblem> =
            LazyLock::new(selection::all::<AttentionBackwardProblem>);
        &KERNELS
    }

    fn order(kernel: &Kernel, tile: &AttentionBwdTile) -> [usize; 2] {
        [preference(kernel.target), tile.head_dims.sum()]
    }

    fn is_explained(&self, tile: &AttentionBwdTile) -> bool {
        tile.step == self.step
    }

    /// The first one in the table.
    fn rank(_: &Candidate<'_, Self>) {}

    fn key(&self) -> (DType, usize) {
        (self.forward.types.q, self.step as usize)
    }

    fn key_of(tile: &AttentionBwdTile) -> (DType, usize) {
        (tile.types.q, tile.step as usize)
    }
}

/// Lines of the support table, as for the forward pass.
pub(crate) fn support(dtype: DType) -> Vec<(String, AttentionBackwardProblem)> {
    let mut lines = Vec::new();
    let dense = |head_dim| AttentionProblem::dense(dtype, [1; 3], [1; 2], head_dim);
    let mut start = 8;
    for widest in selection::sizes::<AttentionBackwardProblem>(|tile| tile.head_dims.max() as u32) {
        let (forward, size) = (dense(widest as usize), format!("head_dim {start}..={widest} by 8"));
        start = widest + 8;
        lines.push((size.clone(), AttentionBackwardProblem::of(forward)));
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
            let forward = AttentionProblem { block_mask: Some(mask), ..forward };
            let size = format!("{size}, blocks of {block} × {block}");
            lines.push((size, AttentionBackwardProblem::of(forward)));
        }
    }
    lines.push(("other head_dim (59)".into(), AttentionBackwardProblem::of(dense(59))));
    lines
}

type BackwardRule = Rule<AttentionBackwardProblem>;
type Backward<'c> = Candidate<'c, AttentionBackwardProblem>;

/// Steps that not every problem has.
const STEP: BackwardRule = Rule {
    holds: |c| match c.tile.step {
        Step::Zeros => c.problem.forward.packed.is_some(),
        Step::Sinks => c.problem.d_sink,
        Step::Bias => c.problem.dbias.is_some(),
        _ => true,
    },
    refuses: |c| match c.tile.step {
        Step::Zeros => "every row belongs to a sequence".into(),
        Step::Bias => "no gradient of a bias is asked for".into(),
        _ => "no gradient of a sink is asked for".into(),
    },
    excludes_all: None,
};

const HEAD_DIM: BackwardRule = Rule {
    holds: |c| Rows::from(&c.problem.forward).fit(c.tile.into()),
    refuses: |c| Rows::from(&c.problem.forward).refusal(c.tile.into()),
    excludes_all: Some(|all| {
        let widest = all.iter().map(|c| c.tile.head_dims.max()).max().unwrap_or(0);
        Rows::from(&all[0].problem.forward).refusal_of_all(widest)
    }),
};

/// The Hopper tiles beyond 128 also divide narrow blocks, but for a small head_dim they are slower
/// than the portable kernels.
const WIDTH: BackwardRule = Rule {
    holds: |c| {
        c.kernel.target.is_portable()
            || c.tile.head_dims.min() <= 128
            || c.problem.forward.head_dims.max() > 128
    },
    refuses: |c| format!("head_dim {} is not above 128", c.problem.forward.head_dims),
    excludes_all: None,
};

const SHARED_MEMORY: BackwardRule = Rule::shared_memory(None);

const TRANSPOSE: BackwardRule = Rule {
    holds: |c| {
        let known = c.problem.forward.block_mask.is_none() || c.problem.transpose.is_some();
        known || !c.tile.step.visits()
    },
    refuses: |_| {
        "the block mask has no transpose: `with_transpose` of `BlockMask` or `BlockMaskBuffer` \
         makes it"
            .into()
    },
    excludes_all: None,
};

const BLOCKS: BackwardRule = Rule {
    holds: |c| {
        let divides = |block: u32, tile: u32| block > 0 && block.is_multiple_of(tile);
        !c.tile.step.visits()
            || c.problem.forward.block_mask.is_none_or(|mask| {
                divides(mask.block_q, c.tile.block_q) && divides(mask.block_kv, c.tile.block_kv)
            })
    },
    refuses: |c| {
        let [block_q, block_kv] = blocks(c);
        let AttentionBwdTile { block_q: tile_q, block_kv: tile_kv, .. } = c.tile;
        format!(
            "tiles of {tile_q} × {tile_kv} do not divide the blocks of the mask, {block_q} × \
             {block_kv}"
        )
    },
    excludes_all: Some(|all| {
        let ([block_q, block_kv], head_dim) = (blocks(&all[0]), all[0].problem.forward.head_dims);
        format!(
            "head_dim {head_dim}: no kernel has tiles that divide blocks of {block_q} × {block_kv}"
        )
    }),
};

/// Queries and keys per block of the mask.
fn blocks(c: &Backward<'_>) -> [u32; 2] {
    c.problem.forward.block_mask.map_or([0; 2], |mask| [mask.block_q, mask.block_kv])
}

/// Tensor maps describe q, k, v and d_o, so their strides must be positive and not too large.
const TENSOR_MAPS: BackwardRule = Rule {
    holds: |c| !c.tile.tensor_maps || without_tensor_map(c.problem).is_none(),
    refuses: |c| {
        let (what, dim, stride) = without_tensor_map(c.problem).unwrap_or_default();
        format!("the {dim} stride of {what} is {stride} elements, which a tensor map cannot have")
    },
    excludes_all: None,
};

/// The first stride that a tensor map cannot have: operand, dimension, stride in elements.
fn without_tensor_map(
    problem: &AttentionBackwardProblem,
) -> Option<(&'static str, &'static str, usize)> {
    let forward = &problem.forward;
    let [batch, rows_q, rows_kv] = match forward.packed {
        Some(packed) => [1, packed.total_q, packed.total_kv],
        None => [forward.batch, forward.seqlen_q, forward.seqlen_kv],
    };
    let [queries, keys] =
        [[batch, rows_q, forward.num_heads_q], [batch, rows_kv, forward.num_heads_kv]];
    let operands = [
        ("q", forward.q, queries),
        ("d_o", problem.d_o, queries),
        ("k", forward.k, keys),
        ("v", forward.v, keys),
    ];
    first_without_tensor_map(&operands, forward.types.q)
}

const SUMS: BackwardRule = Rule {
    holds: |c| match c.tile.step {
        Step::KeysAndSums | Step::Sums if c.problem.forward.block_mask.is_some() => false,
        Step::Sums if !has_sums_of_dq(c) => true,
        Step::KeysAndSums | Step::Sums => {
            workspace(c.kernel, c.problem, None).is_ok_and(|bytes| bytes <= c.problem.workspace)
        }
        _ => true,
    },
    refuses: |c| match c.problem.forward.block_mask {
        Some(_) => "dq is not summed under a block mask".into(),
        None => format!("the workspace of {} bytes has no room for dq", c.problem.workspace),
    },
    excludes_all: None,
};

/// At some widths there are only sums of parts of dk and dv.
fn has_sums_of_dq(c: &Backward<'_>) -> bool {
    matches!(c.kernel.variant, Variant::AttentionBwdHopper(hopper) if hopper.has_sums_of_dq())
}

const SOFTCAP: BackwardRule = Rule {
    holds: |c| c.problem.forward.scores.softcap.is_none() || c.tile.takes_softcap(),
    refuses: |c| format!("tiles of {} queries take no softcap", c.tile.block_q),
    excludes_all: None,
};

/// As for the forward pass.
const TERMS: BackwardRule = Rule {
    holds: |c| {
        let forward = &c.problem.forward;
        !c.tile.step.visits()
            || c.tile.terms == forward.terms().is_some()
                && (forward.scores.bias.is_none() || c.tile.takes_bias())
    },
    refuses: |c| refusal_of_terms(&c.problem.forward),
    excludes_all: None,
};

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;
