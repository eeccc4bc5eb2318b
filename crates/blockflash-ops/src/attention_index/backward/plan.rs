use super::IndexAttentionBackwardProblem;
use super::select::{accepts, other};
use crate::Result;
use crate::attention_bwd::{AttentionBackwardPlan, statistics_alone};
use crate::check::to_i32;
use crate::selection::tile_of;
use blockflash_safe::{AttentionIndexBwdKernels, AttentionIndexBwdPlan, CudaProperties};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::AttentionIndexBwd;

/// The launches of a call.
#[derive(Clone, Debug)]
pub struct IndexAttentionBackwardPlan {
    /// What comes before: row statistics, zeros of packed rows of no sequence.
    pub statistics: AttentionBackwardPlan<'static>,
    /// The kernels of the passes.
    pub kernels: AttentionIndexBwdKernels<'static>,
    /// What the tensors do not say.
    pub plan: AttentionIndexBwdPlan,
    /// Bytes of workspace.
    pub workspace_bytes: usize,
}

/// Plans all launches around a kernel for keys, for a problem that it accepts on this GPU.
///
/// # Errors
/// [`Error::Misaligned`] for a stride that is not a multiple of 8 elements, [`Error::TooLarge`] for
/// sizes beyond 32 bits or the address space, [`Error::Unsupported`] if the kernel, or every kernel
/// of another step, does not compute this problem.
///
/// [`Error::Misaligned`]: crate::Error::Misaligned
/// [`Error::TooLarge`]: crate::Error::TooLarge
/// [`Error::Unsupported`]: crate::Error::Unsupported
pub fn plan(
    keys: &'static Kernel,
    problem: &IndexAttentionBackwardProblem,
    gpu: &CudaProperties,
) -> Result<IndexAttentionBackwardPlan> {
    let types = problem.dense.forward.types;
    let transpose = other(gpu, |kernel| matches!(kernel, AttentionIndexBwd::Transpose { .. }))?;
    let sums = other(gpu, |kernel| *kernel == AttentionIndexBwd::Sums { dtype: types.q })?;
    plan_with(AttentionIndexBwdKernels { transpose, keys, sums }, problem, gpu)
}

/// The same with kernels for all steps.
///
/// # Errors
/// As [`plan`].
pub fn plan_with(
    kernels: AttentionIndexBwdKernels<'static>,
    problem: &IndexAttentionBackwardProblem,
    gpu: &CudaProperties,
) -> Result<IndexAttentionBackwardPlan> {
    accepts(kernels.keys, problem, gpu)?;
    let tile = tile_of::<IndexAttentionBackwardProblem>(kernels.keys, &gpu.compute_capability)?;
    let statistics = statistics_alone(&problem.dense, gpu)?;
    let (sizes, workspace_bytes) = problem.sizes(&tile)?;
    let plan = AttentionIndexBwdPlan {
        bwd: statistics.plan,
        granularity_log2: problem.lists.granularity.ilog2() as i32,
        tile,
        pass_queries: to_i32("queries", sizes.pass_queries)?,
        item_visits: to_i32("item_visits", sizes.item_visits)?,
    };
    Ok(IndexAttentionBackwardPlan { statistics, kernels, plan, workspace_bytes })
}
