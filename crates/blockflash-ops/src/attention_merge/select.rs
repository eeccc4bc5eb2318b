use super::AttentionMergeProblem;
use crate::Result;
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule};
use blockflash_safe::CudaProperties;
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
    const RULES: &'static [Rule<Self>] = &[];

    /// The element type; no kernel is made yet.
    type Tile = DType;
    type Rank = ();

    fn tile(_: &Kernel) -> Option<DType> {
        None
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<AttentionMergeProblem> =
            LazyLock::new(selection::all::<AttentionMergeProblem>);
        &KERNELS
    }

    fn rank(_: &Candidate<'_, Self>) {}

    fn key(&self) -> (DType, usize) {
        (self.parts_dtype, 0)
    }

    fn key_of(tile: &DType) -> (DType, usize) {
        (*tile, 0)
    }
}
