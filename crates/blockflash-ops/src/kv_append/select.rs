use super::AppendKvProblem;
use crate::Result;
use crate::attention::Rows;
use crate::kv_cache::CacheSizes;
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule};
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::{KvAppend, Variant};
use blockflash_sys::{DType, ElementTypes, HeadDims, Kernel, Target};
use std::sync::LazyLock;

/// The kernel for an append on a GPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) names what no kernel offers: the element type,
/// the head dimension, the page size, the architecture.
pub fn select(problem: &AppendKvProblem, gpu: &CudaProperties) -> Result<&'static Kernel> {
    selection::select(problem, gpu)
}

/// The kernel for an append that is compiled for this target.
pub(crate) fn select_for(
    target: Target,
    problem: &AppendKvProblem,
    gpu: &CudaProperties,
) -> Result<&'static Kernel> {
    let kernels = AppendKvProblem::kernels().iter().flat_map(|peers| &peers.kernels);
    let of_target = kernels.map(|&(kernel, _)| kernel).filter(|kernel| kernel.target == target);
    let found = of_target.into_iter().find(|kernel| accepts(kernel, problem, gpu).is_ok());
    found.map_or_else(|| select(problem, gpu), Ok)
}

/// Whether this kernel can do the append on this GPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) says what does not fit.
pub fn accepts(kernel: &Kernel, problem: &AppendKvProblem, gpu: &CudaProperties) -> Result<()> {
    selection::accepts(kernel, problem, gpu)
}

impl Problem for AppendKvProblem {
    const OP: &'static str = "kv_append";
    const INPUTS: &'static str = "new keys and the cache";
    const RULES: &'static [Rule<Self>] = &[HEAD_DIM, PAGE_SIZE, STRIDES];

    /// The element type.
    type Tile = DType;
    type Rank = ();

    fn tile(kernel: &Kernel) -> Option<DType> {
        match kernel.variant {
            Variant::KvAppend(KvAppend { dtype }) => Some(dtype),
            _ => None,
        }
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<AppendKvProblem> = LazyLock::new(selection::all::<AppendKvProblem>);
        &KERNELS
    }

    fn rank(_: &Candidate<'_, Self>) {}

    fn key(&self) -> (DType, usize) {
        // Turning queries alone has nothing to do with the type of the cache.
        (if self.is_empty() { self.dtype } else { self.cache.dtype }, 0)
    }

    fn key_of(tile: &DType) -> (DType, usize) {
        (*tile, 0)
    }
}

type AppendRule = Rule<AppendKvProblem>;

const HEAD_DIM: AppendRule = Rule {
    holds: |c| rows(c).fit(any_width(c)),
    refuses: |c| rows(c).not_multiples(),
    excludes_all: None,
};

fn rows(c: &Candidate<'_, AppendKvProblem>) -> Rows {
    let CacheSizes { dtype, head_dims, .. } = c.problem.cache;
    Rows { types: ElementTypes::all(dtype), head_dims }
}

fn any_width(c: &Candidate<'_, AppendKvProblem>) -> Rows {
    Rows { head_dims: HeadDims::all(usize::MAX), ..rows(c) }
}

/// What attention over the cache takes.
const PAGE_SIZE: AppendRule = Rule {
    holds: |c| c.problem.cache.has_whole_steps(),
    refuses: |c| format!("pages of {} slots, not of a multiple of 16", c.problem.cache.page_size),
    excludes_all: None,
};

const STRIDES: AppendRule = Rule {
    holds: |c| c.problem.cache.has_near_slots(),
    refuses: |c| c.problem.cache.far_slots(),
    excludes_all: None,
};
