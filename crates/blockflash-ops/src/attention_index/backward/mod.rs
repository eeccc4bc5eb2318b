//! Gradients of attention by an index.

mod cpu;
mod plan;
mod problem;
mod select;

pub use plan::{IndexAttentionBackwardPlan, plan, plan_with};
pub use problem::IndexAttentionBackwardProblem;
pub use select::{accepts, select};

use super::IndexAttention;
use super::lists::HostLists;
use crate::attention::AttentionOutput;
use crate::attention_bwd::{AttentionGradients, AttentionGradientsMut, check_alignment};
use crate::check::Operand;
use crate::kv_cache::KvCache;
use crate::operation::{Operation, Prepared, Steps};
use crate::{Error, Result};
use blockflash_safe::{
    AttentionIndexBwdKernels, AttentionIndexBwdOperands, CudaProperties, Device, Stream, Tensor,
    View, ViewMut,
};
use blockflash_sys::manifest::AttentionBwd;
use blockflash_sys::{DType, ElementTypes, Kernel};

/// The gradients of a scalar with respect to q, keys and values of [`IndexAttention`], given its
/// gradient with respect to `o`.
///
/// Lists have no gradient. A block that is listed twice counts twice, as in the forward pass. What
/// [`AttentionBackward`](crate::AttentionBackward) promises about elements that nothing contributes
/// to, about precision and about equal bits in every run holds here. A pair that is not listed or
/// that the mask hides contributes exactly nothing as long as all tensors are finite; a NaN or an
/// infinity may reach the gradients of queries and keys of the same 64 or 128 keys.
///
/// Keys and values are those of a contiguous cache whose sequences fill it, or packed beside packed
/// queries. A GPU takes f16 and bf16 with a `head_dim` of any multiple of 8 up to 256, and
/// granularities of 16, 64 and 128 tokens; the CPU takes every granularity and f32, too.
#[derive(Clone, Copy, Debug)]
pub struct IndexAttentionBackward<'a> {
    /// The call whose gradients are wanted.
    pub attention: IndexAttention<'a>,
    /// Its keys and values, without a block table, without lengths and without scales.
    pub cache: KvCache<'a>,
    /// The output of that call, in the shape of q with the `head_dim` of v.
    pub o: View<'a>,
    /// The log-sum-exp of that call, f32 `[batch, num_heads_q, seqlen_q]`, or
    /// `[num_heads_q, total_q]`.
    pub lse: View<'a>,
    /// The gradient with respect to `o`, in its shape and element type.
    pub d_o: View<'a>,
}

/// See [`Operation::prepare`].
pub type PreparedIndexAttentionBackward = Prepared<IndexAttentionBackwardProblem>;

impl IndexAttention<'_> {
    /// The gradients, given the output of [`forward`](Self::forward) of this call and the gradient
    /// with respect to its `o`. Those of packed keys are `[total_kv, num_heads_kv, head_dim]`. For
    /// other strides, for memory of the caller, or to capture a graph see
    /// [`IndexAttentionBackward`].
    ///
    /// # Errors
    /// As [`IndexAttentionBackward::backward`].
    pub fn backward(
        &self,
        cache: KvCache<'_>,
        output: &AttentionOutput,
        d_o: View<'_>,
        stream: &Stream,
    ) -> Result<AttentionGradients> {
        let (o, lse) = (output.o.view(), output.lse.view());
        IndexAttentionBackward { attention: *self, cache, o, lse, d_o }.backward(stream)
    }
}

impl IndexAttentionBackward<'_> {
    /// Computes into the caller's tensors. On a GPU nothing is allocated and the stream is not
    /// synchronised, so a graph can capture the call, and its replays follow lists and offsets. On
    /// the CPU it returns when the result is there.
    ///
    /// `workspace` is u8 memory without gaps, whose content neither matters before nor has a
    /// meaning after the call. Each visit of a query leaves its part of dq there, so queries are
    /// computed in as few passes as it has room for; [`workspace_bytes`](Self::workspace_bytes) are
    /// enough for a few of them, [`least_workspace_bytes`](Self::least_workspace_bytes) for many.
    /// The number of passes decides about roundings. It may be `None` on the CPU.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem) and `select`; [`Error::Shape`] for a workspace
    /// that is too small; [`Error::DeviceMismatch`] if an operand is not on the stream's device.
    pub fn backward_into(
        &self,
        gradients: AttentionGradientsMut<'_>,
        workspace: Option<ViewMut<'_>>,
        stream: &Stream,
    ) -> Result<()> {
        self.run((gradients, workspace), stream)
    }

    /// Allocates the gradients and the workspace, and computes.
    ///
    /// # Errors
    /// As [`backward_into`](Self::backward_into), and out of memory.
    pub fn backward(&self, stream: &Stream) -> Result<AttentionGradients> {
        let problem = self.problem()?.dense;
        let forward = &problem.forward;
        let new = |dtype, shape: &[usize]| Tensor::empty(stream, dtype, shape);
        let ElementTypes { q, kv, .. } = forward.types;
        let mut gradients = AttentionGradients::new(
            new(q, &forward.q_shape())?,
            new(kv, &forward.k_shape())?,
            new(kv, &forward.v_shape())?,
        );
        if problem.d_sink {
            gradients.d_sink = Some(new(DType::F32, &[forward.num_heads_q])?);
        }
        let mut workspace = match self.workspace_bytes(stream.device())? {
            0 => None,
            bytes => Some(new(DType::U8, &[bytes])?),
        };
        let workspace = workspace.as_mut().map(Tensor::view_mut);
        self.backward_into(gradients.view_mut(), workspace, stream)?;
        Ok(gradients)
    }

    /// Bytes of workspace for the fewest passes whose workspace is a small part of the memory of a
    /// device; 0 on the CPU.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem) and `select`.
    pub fn workspace_bytes(&self, device: &Device) -> Result<usize> {
        let problem = self.problem()?;
        bytes_of(problem, device, |gpu| problem.usual_workspace(gpu))
    }

    /// Fewest bytes of workspace that [`backward_into`](Self::backward_into) takes on a device; 0
    /// on the CPU.
    ///
    /// # Errors
    /// As [`workspace_bytes`](Self::workspace_bytes).
    pub fn least_workspace_bytes(&self, device: &Device) -> Result<usize> {
        bytes_of(self.problem()?, device, |_| 0)
    }

    /// Like [`run`](Operation::run) with these kernels: for tests and measurements.
    ///
    /// # Errors
    /// Also [`Error::Unsupported`] if a kernel cannot compute this problem on this device.
    #[doc(hidden)]
    pub fn run_with_kernels(
        &self,
        kernels: AttentionIndexBwdKernels<'static>,
        out: <Self as Steps>::Out<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let problem = self.checked(&out, stream)?;
        let Some(gpu) = stream.device().cuda_properties() else {
            return Err(Error::Unsupported {
                op: "attention_index_bwd",
                arch: "cpu".into(),
                what: format!("{} runs on a GPU", kernels.keys.symbol()),
            });
        };
        if problem.dense.is_empty() {
            return Ok(());
        }
        let plan = plan_with(kernels, &problem, gpu)?;
        self.launch(kernels.keys, &plan, &problem, out, stream)
    }
}

/// Bytes of the selected kernels with this limit.
fn bytes_of(
    problem: IndexAttentionBackwardProblem,
    device: &Device,
    limit: impl Fn(&CudaProperties) -> usize,
) -> Result<usize> {
    match device.cuda_properties() {
        Some(gpu) if !problem.dense.is_empty() => {
            let problem = problem.with_workspace(limit(gpu));
            Ok(plan(select(&problem, gpu)?, &problem, gpu)?.workspace_bytes)
        }
        _ => Ok(0),
    }
}

impl Steps for IndexAttentionBackward<'_> {
    type Problem = IndexAttentionBackwardProblem;
    type Plan = IndexAttentionBackwardPlan;
    type Out<'o> = (AttentionGradientsMut<'o>, Option<ViewMut<'o>>);

    fn is_empty(problem: &IndexAttentionBackwardProblem) -> bool {
        problem.dense.is_empty()
    }

    fn checked(
        &self,
        out: &Self::Out<'_>,
        stream: &Stream,
    ) -> Result<IndexAttentionBackwardProblem> {
        let problem = self.problem()?;
        let dense = self.dense()?.checked(out, stream)?;
        Operand::new("lists.entries", &self.attention.lists.entries).on(stream.device())?;
        Ok(IndexAttentionBackwardProblem { dense, ..problem })
    }

    fn has_data(_: &IndexAttentionBackwardProblem) -> bool {
        true
    }

    fn verify(
        &self,
        problem: &IndexAttentionBackwardProblem,
        _: &Self::Out<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let lists = HostLists::new(&self.attention.lists, problem.lists, stream)?;
        for sequence in self.sequences(problem, stream)? {
            let first = problem.first_query(&sequence);
            let mut queries = first..first + sequence.seqlen_q;
            queries.try_for_each(|query| lists.verify(query, sequence.seqlen_kv))?;
        }
        Ok(())
    }

    fn plan(
        kernel: &'static Kernel,
        problem: &IndexAttentionBackwardProblem,
        gpu: &CudaProperties,
    ) -> Result<IndexAttentionBackwardPlan> {
        plan(kernel, problem, gpu)
    }

    fn kernels(_: &'static Kernel, plan: &Self::Plan) -> Vec<&'static Kernel> {
        let AttentionIndexBwdKernels { transpose, keys, sums } = plan.kernels;
        let others = plan.statistics.launches.iter().map(|&(kernel, _)| kernel);
        others.chain([transpose, keys, sums]).collect()
    }

    fn launch(
        &self,
        _: &Kernel,
        plan: &Self::Plan,
        problem: &IndexAttentionBackwardProblem,
        (gradients, workspace): Self::Out<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let (needed, lent) = (plan.workspace_bytes, problem.dense.workspace);
        if lent < needed {
            let expected = format!("[at least {needed}]");
            return Err(Error::Shape { what: "workspace", expected, found: vec![lent] });
        }
        let dense = self.dense()?;
        let mut attention = dense.operands(gradients, workspace);
        check_alignment(&attention)?;
        for (kernel, config) in &plan.statistics.launches {
            let operands = attention.reborrow();
            stream.launch::<AttentionBwd>(kernel, config, &plan.statistics.plan, operands)?;
        }
        let entries = self.attention.lists.entries;
        let operands = AttentionIndexBwdOperands { attention, entries };
        Ok(stream.launch_index_backward(&plan.kernels, &plan.plan, operands)?)
    }

    fn compute(
        &self,
        problem: &IndexAttentionBackwardProblem,
        (gradients, _): Self::Out<'_>,
        stream: &Stream,
    ) -> Result<()> {
        cpu::backward(self, problem, gradients, stream)
    }
}

#[cfg(test)]
mod tests;
