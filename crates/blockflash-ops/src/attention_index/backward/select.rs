use super::IndexAttentionBackwardProblem;
use crate::Result;
use crate::attention::Rows;
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule, preference, unsupported};
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::{AttentionIndexBwd, AttentionIndexBwdTile, Variant, kernels};
use blockflash_sys::{DType, Kernel};
use std::sync::LazyLock;

/// Tokens of a block that kernels take.
const GRANULARITIES: [usize; 3] = [16, 64, 128];

/// The kernel that computes dk and dv, and parts of dq, of a problem on a GPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) names what no kernel offers.
pub fn select(
    problem: &IndexAttentionBackwardProblem,
    gpu: &CudaProperties,
) -> Result<&'static Kernel> {
    selection::select(problem, gpu)
}

/// Whether this kernel can compute the problem on this GPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) says what does not fit.
pub fn accepts(
    kernel: &Kernel,
    problem: &IndexAttentionBackwardProblem,
    gpu: &CudaProperties,
) -> Result<()> {
    selection::accepts(kernel, problem, gpu)
}

/// The first kernel of another step that this GPU runs.
pub(super) fn other(
    gpu: &CudaProperties,
    fits: impl Fn(&AttentionIndexBwd) -> bool,
) -> Result<&'static Kernel> {
    let of_step = |kernel: &&Kernel| match &kernel.variant {
        Variant::AttentionIndexBwd(variant) => fits(variant),
        _ => false,
    };
    let runs = |kernel: &&Kernel| kernel.target.runs_on(gpu.compute_capability);
    let all = kernels().iter().filter(of_step).filter(runs);
    all.min_by_key(|kernel| preference(kernel.target)).ok_or_else(|| {
        let what = "no kernel for another step is compiled for this GPU".into();
        unsupported::<IndexAttentionBackwardProblem>(&gpu.compute_capability, what)
    })
}

impl Problem for IndexAttentionBackwardProblem {
    const OP: &'static str = "attention_index_bwd";
    const RULES: &'static [Rule<Self>] = &[HEAD_DIM, SHARED_MEMORY, GRANULARITY, HEADS];

    type Tile = AttentionIndexBwdTile;
    type Rank = ();

    fn tile(kernel: &Kernel) -> Option<AttentionIndexBwdTile> {
        match kernel.variant {
            Variant::AttentionIndexBwd(AttentionIndexBwd::Keys(tile)) => Some(tile),
            _ => None,
        }
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<IndexAttentionBackwardProblem> =
            LazyLock::new(selection::all::<IndexAttentionBackwardProblem>);
        &KERNELS
    }

    fn order(kernel: &Kernel, tile: &AttentionIndexBwdTile) -> [usize; 2] {
        [preference(kernel.target), tile.head_dims.sum()]
    }

    /// The first one in the table.
    fn rank(_: &Candidate<'_, Self>) {}

    fn key(&self) -> (DType, usize) {
        (self.dense.forward.types.q, 0)
    }

    fn key_of(tile: &AttentionIndexBwdTile) -> (DType, usize) {
        (tile.types.q, 0)
    }
}

fn rows(tile: &AttentionIndexBwdTile) -> Rows {
    Rows { types: tile.types, head_dims: tile.head_dims }
}

const HEAD_DIM: Rule<IndexAttentionBackwardProblem> = Rule {
    holds: |c| Rows::from(&c.problem.dense.forward).fit(rows(c.tile)),
    refuses: |c| Rows::from(&c.problem.dense.forward).refusal(rows(c.tile)),
    excludes_all: Some(|all| {
        let widest = all.iter().map(|c| c.tile.head_dims.max()).max().unwrap_or(0);
        Rows::from(&all[0].problem.dense.forward).refusal_of_all(widest)
    }),
};

const SHARED_MEMORY: Rule<IndexAttentionBackwardProblem> = Rule::shared_memory(None);

const GRANULARITY: Rule<IndexAttentionBackwardProblem> = Rule {
    holds: |c| GRANULARITIES.contains(&c.problem.lists.granularity),
    refuses: |c| {
        let granularity = c.problem.lists.granularity;
        format!("blocks have {granularity} tokens, expected one of {GRANULARITIES:?}")
    },
    excludes_all: None,
};

const HEADS: Rule<IndexAttentionBackwardProblem> = Rule {
    holds: |c| c.problem.dense.forward.num_heads_q > 0 && c.problem.lists.groups > 0,
    refuses: |_| "there are no heads of q".into(),
    excludes_all: None,
};
