use super::{ChoosePagesProblem, SummarizePagesProblem, SummarySizes};
use crate::kv_cache::{CacheSizes, TableSizes};
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule};
use blockflash_sys::manifest::{PageKernel, Variant};
use blockflash_sys::{DType, Kernel};
use std::sync::LazyLock;

/// The widest head that kernels take.
const WIDEST: usize = 256;

/// The problems about summaries of pages.
pub trait OfPages {
    /// The summaries.
    fn summaries(&self) -> &SummarySizes;
}

impl OfPages for SummarizePagesProblem {
    fn summaries(&self) -> &SummarySizes {
        &self.summaries
    }
}

impl OfPages for ChoosePagesProblem {
    fn summaries(&self) -> &SummarySizes {
        &self.summaries
    }
}

/// What kernels ask of a cache, as those of attention to it do.
impl<P: Problem + OfPages> Rule<P> {
    const HEAD_DIM: Self = Self {
        holds: |c| {
            let head_dim = c.problem.summaries().cache.head_dims.qk;
            head_dim <= WIDEST && head_dim.is_multiple_of(8)
        },
        refuses: |c| {
            let head_dim = c.problem.summaries().cache.head_dims.qk;
            format!("head_dim {head_dim} is not a multiple of 8 up to {WIDEST}")
        },
        excludes_all: None,
    };

    const PAGE_SIZE: Self = Self {
        holds: |c| {
            let cache = &c.problem.summaries().cache;
            let of_one_page = cache.table.is_none_or(|table| table.max_pages <= 1);
            of_one_page || cache.page_size.is_multiple_of(16)
        },
        refuses: |c| {
            let slots = c.problem.summaries().cache.page_size;
            format!("pages of {slots} slots, not of a multiple of 16")
        },
        excludes_all: None,
    };

    const SLOTS: Self = Self {
        holds: |c| c.problem.summaries().cache.capacity > 0,
        refuses: |c| c.problem.summaries().cache.no_slots(),
        excludes_all: None,
    };

    const STRIDES: Self = Self {
        holds: |c| c.problem.summaries().cache.has_near_slots(),
        refuses: |c| c.problem.summaries().cache.far_slots(),
        excludes_all: None,
    };
}

/// Implements selection for one of the two problems, which differ in their kernels alone.
macro_rules! selected {
    ($problem:ty, $op:literal, $kernel:ident) => {
        impl Problem for $problem {
            const OP: &'static str = $op;
            const INPUTS: &'static str = "cache and its summaries";
            const RULES: &'static [Rule<Self>] =
                &[Rule::HEAD_DIM, Rule::PAGE_SIZE, Rule::SLOTS, Rule::STRIDES];
            /// The element type.
            type Tile = DType;
            type Rank = ();

            fn tile(kernel: &Kernel) -> Option<DType> {
                match kernel.variant {
                    Variant::PageChoice(PageKernel::$kernel { dtype, .. }) => Some(dtype),
                    _ => None,
                }
            }

            fn kernels() -> &'static [Peers<'static, Self>] {
                static KERNELS: Kernels<$problem> = LazyLock::new(selection::all::<$problem>);
                &KERNELS
            }

            fn rank(_: &Candidate<'_, Self>) {}

            fn key(&self) -> (DType, usize) {
                (self.summaries.cache.dtype, 0)
            }

            fn key_of(tile: &DType) -> (DType, usize) {
                (*tile, 0)
            }
        }
    };
}

selected!(SummarizePagesProblem, "page_summaries", Summaries);
selected!(ChoosePagesProblem, "page_choice", Choice);

/// Lines of the support table: the head dimensions that kernels take, and one that none takes.
fn lines<P>(dtype: DType, problem: impl Fn(SummarySizes) -> P) -> Vec<(String, P)> {
    let of = |head_dim| {
        let cache = CacheSizes {
            table: Some(TableSizes { max_pages: 4, stride: 4 }),
            capacity: 64,
            ..CacheSizes::contiguous(dtype, [4, 16], 1, head_dim)
        };
        problem(SummarySizes { cache, statistics: 1, strides: [head_dim; 3] })
    };
    vec![
        (format!("head_dim 8..={WIDEST} by 8"), of(WIDEST)),
        ("other head_dim (59)".into(), of(59)),
    ]
}

/// See [`lines`].
pub(crate) fn support_of_summaries(dtype: DType) -> Vec<(String, SummarizePagesProblem)> {
    lines(dtype, |summaries| SummarizePagesProblem { summaries, tokens: 1 })
}

/// See [`lines`].
pub(crate) fn support_of_choice(dtype: DType) -> Vec<(String, ChoosePagesProblem)> {
    lines(dtype, |summaries| {
        let q = summaries.cache.k;
        let (seqlen_q, num_heads_q, capacity) = (1, 1, 2);
        ChoosePagesProblem { summaries, seqlen_q, total_q: None, num_heads_q, q, capacity }
    })
}
