use super::{IndexRows, IndexScoresProblem, TopKProblem};
use crate::Result;
use crate::attention::{Align, Mask};
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule};
use blockflash_safe::Device;
use blockflash_sys::{DType, Kernel};
use std::sync::LazyLock;

/// The widest head of an index that kernels take.
const WIDEST: usize = 128;
/// Longest list that kernels choose.
const MOST: usize = 2048;
/// Most blocks that kernels choose among.
const COLUMNS: usize = 1 << 20;
/// Tokens of a block that kernels take.
const GRANULARITIES: [usize; 5] = [1, 4, 16, 64, 128];

/// The problems about blocks of keys that queries see.
pub trait OfRows {
    /// Queries and what they see.
    fn rows(&self) -> &IndexRows;
}

impl OfRows for IndexScoresProblem {
    fn rows(&self) -> &IndexRows {
        &self.rows
    }
}

impl OfRows for TopKProblem {
    fn rows(&self) -> &IndexRows {
        &self.rows
    }
}

impl<P: Problem + OfRows> Rule<P> {
    const GRANULARITY: Self = Self {
        holds: |c| GRANULARITIES.contains(&c.problem.rows().granularity),
        refuses: |c| {
            let granularity = c.problem.rows().granularity;
            format!("blocks of {granularity} tokens, expected one of {GRANULARITIES:?}")
        },
        excludes_all: None,
    };

    const ALIGN: Self = Self {
        holds: |c| {
            !matches!(
                c.problem.rows().mask,
                Mask::Causal { align: Align::TopLeft }
                    | Mask::Window { align: Align::TopLeft, .. }
            )
        },
        refuses: |_| "a mask that is aligned top-left".into(),
        excludes_all: None,
    };
}

const HEAD_DIM: Rule<IndexScoresProblem> = Rule {
    holds: |c| {
        let head_dim = c.problem.cache.head_dims.qk;
        head_dim <= WIDEST && head_dim.is_multiple_of(8)
    },
    refuses: |c| {
        let head_dim = c.problem.cache.head_dims.qk;
        format!("head_dim {head_dim} is not a multiple of 8 up to {WIDEST}")
    },
    excludes_all: None,
};

const PAGE_SIZE: Rule<IndexScoresProblem> = Rule {
    holds: |c| c.problem.cache.has_whole_steps(),
    refuses: |c| {
        let slots = c.problem.cache.page_size;
        format!("pages of {slots} slots, not of a multiple of 16")
    },
    excludes_all: None,
};

const STRIDES: Rule<IndexScoresProblem> = Rule {
    holds: |c| c.problem.cache.has_near_slots(),
    refuses: |c| c.problem.cache.far_slots(),
    excludes_all: None,
};

const LIST: Rule<TopKProblem> = Rule {
    holds: |c| c.problem.k <= MOST,
    refuses: |c| format!("lists of {} blocks, the limit is {MOST}", c.problem.k),
    excludes_all: None,
};

const BLOCKS: Rule<TopKProblem> = Rule {
    holds: |c| c.problem.rows.blocks() <= COLUMNS,
    refuses: |c| format!("{} blocks, the limit is {COLUMNS}", c.problem.rows.blocks()),
    excludes_all: None,
};

/// Implements selection for one of the two problems.
macro_rules! selected {
    ($problem:ty, $op:literal, $inputs:literal, $rules:expr, $dtype:expr) => {
        impl Problem for $problem {
            const OP: &'static str = $op;
            const INPUTS: &'static str = $inputs;
            const RULES: &'static [Rule<Self>] = $rules;
            /// The element type.
            type Tile = DType;
            type Rank = ();

            fn tile(_: &Kernel) -> Option<DType> {
                None
            }

            fn kernels() -> &'static [Peers<'static, Self>] {
                static KERNELS: Kernels<$problem> = LazyLock::new(selection::all::<$problem>);
                &KERNELS
            }

            fn rank(_: &Candidate<'_, Self>) {}

            fn key(&self) -> (DType, usize) {
                ($dtype(self), 0)
            }

            fn key_of(tile: &DType) -> (DType, usize) {
                (*tile, 0)
            }
        }
    };
}

selected!(
    IndexScoresProblem,
    "index_scores",
    "queries and the cache",
    &[HEAD_DIM, Rule::GRANULARITY, Rule::ALIGN, PAGE_SIZE, STRIDES],
    |problem: &IndexScoresProblem| problem.cache.dtype
);
selected!(
    TopKProblem,
    "top_k",
    "scores",
    &[LIST, BLOCKS, Rule::GRANULARITY, Rule::ALIGN],
    |_| DType::F32
);

impl TopKProblem {
    /// Bytes of workspace on a device.
    pub(super) fn workspace_bytes(&self, device: &Device) -> Result<usize> {
        match device.cuda_properties() {
            Some(gpu) if !self.is_empty() => selection::select(self, gpu).map(|_| 0),
            _ => Ok(0),
        }
    }
}
