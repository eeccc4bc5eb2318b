use super::IndexAttentionProblem;
use crate::Result;
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule};
use blockflash_safe::{CudaProperties, Device};
use blockflash_sys::{DType, Kernel};
use std::sync::LazyLock;

/// The kernel for attention by an index on a GPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) names what no kernel offers.
pub fn select(problem: &IndexAttentionProblem, gpu: &CudaProperties) -> Result<&'static Kernel> {
    selection::select(problem, gpu)
}

/// Whether this kernel can compute the problem on this GPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) says what does not fit.
pub fn accepts(
    kernel: &Kernel,
    problem: &IndexAttentionProblem,
    gpu: &CudaProperties,
) -> Result<()> {
    selection::accepts(kernel, problem, gpu)
}

impl Problem for IndexAttentionProblem {
    const OP: &'static str = "attention_index";
    const INPUTS: &'static str = "queries and the cache";
    const RULES: &'static [Rule<Self>] = &[];

    type Tile = DType;
    type Rank = ();

    fn tile(_: &Kernel) -> Option<DType> {
        None
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<IndexAttentionProblem> =
            LazyLock::new(selection::all::<IndexAttentionProblem>);
        &KERNELS
    }

    fn rank(_: &Candidate<'_, Self>) {}

    fn key(&self) -> (DType, usize) {
        (self.attention.types.q, 0)
    }

    fn key_of(tile: &DType) -> (DType, usize) {
        (*tile, 0)
    }
}

impl IndexAttentionProblem {
    /// Bytes of workspace on a device.
    pub(super) fn workspace_bytes(&self, device: &Device) -> Result<usize> {
        match device.cuda_properties() {
            Some(gpu) if !self.attention.is_empty() => select(self, gpu).map(|_| 0),
            _ => Ok(0),
        }
    }
}
