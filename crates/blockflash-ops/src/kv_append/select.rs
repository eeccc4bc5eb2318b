use super::AppendKvProblem;
use crate::Result;
use crate::kv_cache::CacheSizes;
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule};
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::{KvAppend, KvAppendCodes, Variant};
use blockflash_sys::{DType, HeadDims, Kernel, Target};
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
    const RULES: &'static [Rule<Self>] = &[TYPES, HEAD_DIM, PAGE_SIZE, STRIDES];

    /// The element type; `None` for codes.
    type Tile = Option<DType>;
    type Rank = ();

    fn tile(kernel: &Kernel) -> Option<Option<DType>> {
        match kernel.variant {
            Variant::KvAppend(KvAppend { dtype }) => Some(Some(dtype)),
            Variant::KvAppendCodes(KvAppendCodes) => Some(None),
            _ => None,
        }
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<AppendKvProblem> = LazyLock::new(selection::all::<AppendKvProblem>);
        &KERNELS
    }

    fn rank(_: &Candidate<'_, Self>) {}

    /// A kernel takes several types: see [`TYPES`].
    fn key(&self) -> (DType, usize) {
        (DType::F16, 0)
    }

    fn key_of(_: &Option<DType>) -> (DType, usize) {
        (DType::F16, 0)
    }
}

type AppendRule = Rule<AppendKvProblem>;

const TYPES: AppendRule = Rule {
    holds: |c| {
        let (of_new, of_cache) = types(c.problem);
        match *c.tile {
            Some(dtype) => of_cache == dtype,
            None => of_cache.is_code() && [DType::F16, DType::BF16].contains(&of_new),
        }
    },
    refuses: |c| {
        let (of_new, of_cache) = types(c.problem);
        let kernel = c.tile.map_or("codes of f16 and bf16".to_owned(), |dtype| dtype.to_string());
        format!("the kernel takes {kernel}, but new keys are {of_new} and the cache is {of_cache}")
    },
    excludes_all: Some(|all| {
        let (of_new, of_cache) = types(all[0].problem);
        format!("kernels take f16 and bf16, but new keys are {of_new} and the cache is {of_cache}")
    }),
};

/// Types of new keys and of the cache, with which turning queries alone has nothing to do.
fn types(problem: &AppendKvProblem) -> (DType, DType) {
    let of_cache = if problem.is_empty() { problem.dtype } else { problem.cache.dtype };
    (problem.dtype, of_cache)
}

/// Kernels read and write 16 bytes at a time.
const HEAD_DIM: AppendRule = Rule {
    holds: |c| {
        let HeadDims { qk, v } = c.problem.head_dims;
        let multiple = elements_of_chunk(c.problem);
        qk > 0 && qk.is_multiple_of(multiple) && v.is_multiple_of(multiple)
    },
    refuses: |c| {
        let (CacheSizes { head_dims, .. }, multiple) =
            (c.problem.cache, elements_of_chunk(c.problem));
        format!("head_dim {head_dims}: kernels take multiples of {multiple}")
    },
    excludes_all: None,
};

fn elements_of_chunk(problem: &AppendKvProblem) -> usize {
    16 / types(problem).1.size()
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
