use super::{BsrSddmmProblem, DenseLayout};
use crate::Result;
use crate::check::{is_tensor_map_stride, size_refusal, too_large};
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule};
use blockflash_safe::{CudaProperties, Major};
use blockflash_sys::manifest::BsrSddmmTile;
use blockflash_sys::{DType, Kernel};
use std::sync::LazyLock;

/// The kernel for a problem on a GPU. On Hopper there is one for each element type, larger block
/// size and pair of layouts that tensor maps describe; the portable one of an element type and
/// block size takes every layout, and is taken where there is no other.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) says what no kernel offers: the architecture,
/// the element type, the block size, or a memory layout that tensor maps cannot describe where
/// there is no portable kernel.
pub fn select(problem: &BsrSddmmProblem, gpu: &CudaProperties) -> Result<&'static Kernel> {
    selection::select(problem, gpu)
}

/// Whether this kernel can compute the problem on this GPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) says what does not fit.
pub fn accepts(kernel: &Kernel, problem: &BsrSddmmProblem, gpu: &CudaProperties) -> Result<()> {
    selection::accepts(kernel, problem, gpu)
}

impl Problem for BsrSddmmProblem {
    const OP: &'static str = "bsr_sddmm";
    const INPUTS: &'static str = "matrices";
    const RULES: &'static [Rule<Self>] = &[
        BLOCK_SIZE,
        MAJOR_OF_A,
        MAJOR_OF_B,
        Rule::shared_memory(Some(no_kernel)),
        SIZES,
        MAP_OF_A,
        MAP_OF_B,
        VALUES,
    ];

    type Tile = BsrSddmmTile;
    type Rank = ();

    fn tile(kernel: &Kernel) -> Option<BsrSddmmTile> {
        kernel.bsr_sddmm_tile()
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<BsrSddmmProblem> = LazyLock::new(selection::all::<BsrSddmmProblem>);
        &KERNELS
    }

    fn rank(_: &Candidate<'_, Self>) {}

    fn key(&self) -> (DType, usize) {
        (self.dtype, self.block_size)
    }

    fn key_of(tile: &BsrSddmmTile) -> (DType, usize) {
        (tile.dtype, tile.block_size as usize)
    }
}

/// Lines of the support table: the gradient of weights at each block size, and at one that no
/// kernel is made for.
pub(crate) fn support(dtype: DType) -> Vec<(String, BsrSddmmProblem)> {
    let problem = |block: usize| {
        BsrSddmmProblem::new(dtype, [block; 3], block, 1, [Major::Column, Major::Row])
    };
    selection::sizes::<BsrSddmmProblem>(|tile| tile.block_size)
        .into_iter()
        .map(|size| (format!("block {size}"), problem(size as usize)))
        .chain([("other block (24)".into(), problem(24))])
        .collect()
}

type SddmmRule = Rule<BsrSddmmProblem>;
type SddmmCandidate<'c> = Candidate<'c, BsrSddmmProblem>;

const BLOCK_SIZE: SddmmRule = Rule::block_size(|all| {
    let sizes = selection::ascending(all.iter().map(|c| c.tile.block_size));
    format!("block size {}: kernels take {sizes:?}", all[0].problem.block_size)
});

const MAJOR_OF_A: SddmmRule = Rule {
    holds: |c| c.tile.majors.is_none_or(|[a, _]| a == c.problem.a.major),
    refuses: |c| major_refusal("a", c.tile.majors.map(|[a, _]| a)),
    excludes_all: Some(no_kernel),
};

const MAJOR_OF_B: SddmmRule = Rule {
    holds: |c| c.tile.majors.is_none_or(|[_, b]| b == c.problem.b.major),
    refuses: |c| major_refusal("b", c.tile.majors.map(|[_, b]| b)),
    excludes_all: Some(no_kernel),
};

fn major_refusal(what: &str, kernel: Option<Major>) -> String {
    format!("the kernel takes a {}-major {what}", kernel.map_or("any", Major::name))
}

fn no_kernel(all: &[SddmmCandidate<'_>]) -> String {
    let (problem, bytes) = (all[0].problem, all[0].gpu.smem_per_block);
    let (a, b) = (problem.a.major.name(), problem.b.major.name());
    format!(
        "block size {} in {}, a {a}-major, b {b}-major: no kernel for this architecture and its \
         {bytes} bytes of shared memory",
        problem.block_size, problem.dtype
    )
}

const SIZES: SddmmRule = Rule {
    holds: |c| too_large(sizes(c)).is_none(),
    refuses: |c| size_refusal(sizes(c)),
    excludes_all: None,
};

fn sizes(c: &SddmmCandidate<'_>) -> [usize; 3] {
    [c.problem.m, c.problem.n, c.problem.k]
}

/// Kernels for given layouts read through tensor maps.
const MAP_OF_A: SddmmRule = Rule {
    holds: |c| has_map(c, c.problem.a),
    refuses: |c| map_refusal("a", c.problem.a),
    excludes_all: None,
};

const MAP_OF_B: SddmmRule = Rule {
    holds: |c| has_map(c, c.problem.b),
    refuses: |c| map_refusal("b", c.problem.b),
    excludes_all: None,
};

/// The map of a matrix without elements is never used.
fn has_map(c: &SddmmCandidate<'_>, DenseLayout { ld, aligned, .. }: DenseLayout) -> bool {
    c.tile.majors.is_none()
        || c.problem.k == 0
        || aligned && is_tensor_map_stride(ld, c.problem.dtype)
}

fn map_refusal(what: &str, DenseLayout { ld, .. }: DenseLayout) -> String {
    format!("{what} has no tensor map: lines of 16-byte aligned memory, {ld} elements apart")
}

const VALUES: SddmmRule = Rule {
    holds: |c| c.tile.majors.is_none() || c.problem.values_aligned,
    refuses: |_| "values do not start at a multiple of 16 bytes".into(),
    excludes_all: None,
};

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;
