use super::AppendKvProblem;
use crate::Result;
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule};
use blockflash_safe::CudaProperties;
use blockflash_sys::{DType, Kernel};
use std::sync::LazyLock;

/// The kernel for an append on a GPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) names what no kernel offers.
pub fn select(problem: &AppendKvProblem, gpu: &CudaProperties) -> Result<&'static Kernel> {
    selection::select(problem, gpu)
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
    const RULES: &'static [Rule<Self>] = &[];

    /// The element type; no kernel is made yet.
    type Tile = DType;
    type Rank = ();

    fn tile(_: &Kernel) -> Option<DType> {
        None
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<AppendKvProblem> = LazyLock::new(selection::all::<AppendKvProblem>);
        &KERNELS
    }

    fn rank(_: &Candidate<'_, Self>) {}

    fn key(&self) -> (DType, usize) {
        (self.cache.dtype, 0)
    }

    fn key_of(tile: &DType) -> (DType, usize) {
        (*tile, 0)
    }
}
