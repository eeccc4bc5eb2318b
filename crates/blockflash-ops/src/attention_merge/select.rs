use super::AttentionMergeProblem;
use crate::Result;
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule};
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::{AttentionMerge as AttentionMergeTile, Variant};
use blockflash_sys::{DType, Kernel};
use std::sync::LazyLock;

/// The kernel for a merge on a GPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) names what no kernel offers.
pub fn select(problem: &AttentionMergeProblem, gpu: &CudaProperties) -> Result<&'static Kernel> {
    selection::select(problem, gpu)
}

/// Whether this kernel can merge on this GPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) says what does not fit.
pub fn accepts(
    kernel: &Kernel,
    problem: &AttentionMergeProblem,
    gpu: &CudaProperties,
) -> Result<()> {
    selection::accepts(kernel, problem, gpu)
}

impl Problem for AttentionMergeProblem {
    const OP: &'static str = "attention_merge";
    const RULES: &'static [Rule<Self>] = &[HEAD_DIM, PARTS];

    /// Columns of o per thread. Kernels take every element type.
    type Tile = u32;
    type Rank = ();

    fn tile(kernel: &Kernel) -> Option<u32> {
        match kernel.variant {
            Variant::AttentionMerge(AttentionMergeTile { columns }) => Some(columns),
            _ => None,
        }
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<AttentionMergeProblem> =
            LazyLock::new(selection::all::<AttentionMergeProblem>);
        &KERNELS
    }

    fn rank(_: &Candidate<'_, Self>) {}

    fn key(&self) -> (DType, usize) {
        (DType::F32, 0)
    }

    fn key_of(_: &u32) -> (DType, usize) {
        (DType::F32, 0)
    }
}

const HEAD_DIM: Rule<AttentionMergeProblem> = Rule {
    holds: |c| c.problem.head_dim.is_multiple_of(8),
    refuses: |c| format!("head_dim {} is not a multiple of 8", c.problem.head_dim),
    excludes_all: None,
};

const PARTS: Rule<AttentionMergeProblem> = Rule {
    holds: |c| c.problem.parts > 0,
    refuses: |_| "there are 0 parts, expected at least 1".into(),
    excludes_all: None,
};
