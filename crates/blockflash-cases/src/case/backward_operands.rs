//! Operands of the backward pass of attention.

use super::attention_operands::AttentionOperands;
use super::operands::{Operands, Progress, launched, normal};
use crate::error::Result;
use crate::io::Array;
use blockflash_ops::{
    Attention, AttentionBackward, AttentionBackwardProblem, AttentionGradients,
    AttentionGradientsMut, CudaProperties, DType, Kernel, Operation, PreparedAttentionBackward,
    Stream, Tensor, View, ViewMut, attention_bwd,
};
use blockflash_oracle::{self as oracle, AttentionBackwardCase, Comparison, Elements};
use blockflash_sys::manifest;

/// What the forward pass has read and made, and the gradients.
#[derive(Debug)]
pub(super) struct BackwardOperands {
    forward: AttentionOperands,
    d_o: Tensor,
    gradients: AttentionGradients,
    /// Enough for every kernel.
    workspace: Tensor,
    /// o, lse and d_o, for the oracle.
    host: [Array; 3],
    prepared: Option<PreparedAttentionBackward>,
}

/// The gradients, and the workspace.
type Written<'a> = (AttentionGradientsMut<'a>, Option<ViewMut<'a>>);

fn call<'a>(forward: &'a AttentionOperands, d_o: &'a Tensor) -> Result<AttentionBackward<'a>> {
    Ok(AttentionBackward {
        attention: forward.attention()?,
        o: forward.o.view(),
        lse: forward.lse.view(),
        d_o: d_o.view(),
    })
}

impl BackwardOperands {
    /// Runs the forward pass and allocates the gradients.
    pub(super) fn new(mut forward: AttentionOperands, stream: &Stream, seed: u64) -> Result<Self> {
        forward.with_lse(stream)?;
        let d_o = normal(forward.o.shape(), forward.o.dtype(), seed, 3)?;
        let host = [
            Array::download(&forward.o, stream)?,
            Array::download(&forward.lse, stream)?,
            d_o.clone(),
        ];
        let d_o = d_o.upload(stream)?;
        let call = call(&forward, &d_o)?;
        let bytes = workspace(&call.problem()?, stream)?;
        let like = |view: View<'_>| Tensor::empty(stream, view.dtype(), view.shape());
        let Attention { q, k, v, .. } = call.attention;
        let gradients = AttentionGradients::new(like(q)?, like(k)?, like(v)?);
        let workspace = Tensor::empty(stream, DType::U8, &[bytes])?;
        Ok(Self { forward, d_o, gradients, workspace, host, prepared: None })
    }

    fn call(&mut self, _: Option<&Kernel>) -> Result<(AttentionBackward<'_>, Written<'_>)> {
        let written = (self.gradients.view_mut(), Some(self.workspace.view_mut()));
        Ok((call(&self.forward, &self.d_o)?, written))
    }

    fn problem(&mut self, _: Option<&Kernel>) -> Result<AttentionBackwardProblem> {
        let bytes = self.workspace.shape()[0];
        let (call, (gradients, _)) = self.call(None)?;
        Ok(call.problem()?.with_workspace(bytes).with_gradients(&gradients)?)
    }
}

/// Bytes that suffice for every kernel, also those that the library does not select.
fn workspace(problem: &AttentionBackwardProblem, stream: &Stream) -> Result<usize> {
    let mut most = 0;
    if let Some(gpu) = stream.device().cuda_properties() {
        let kernels = manifest::kernels().iter();
        for kernel in kernels.filter(|kernel| kernel.attention_bwd_tile().is_some()) {
            most = attention_bwd::workspace_bytes(kernel, problem, gpu)?.max(most);
        }
    }
    Ok(most)
}

impl Operands for BackwardOperands {
    // A plan also needs kernels for the other steps of a scheme.
    launched!(attention_bwd::plan);

    fn outputs(&mut self, _kernel: Option<&Kernel>) -> Vec<(&'static str, &mut Tensor)> {
        let AttentionGradients { dq, dk, dv, .. } = &mut self.gradients;
        vec![("dq", dq), ("dk", dk), ("dv", dv)]
    }

    fn compare(
        &self,
        outputs: &[Array],
        seed: u64,
        progress: Progress<'_>,
    ) -> Result<Vec<Comparison>> {
        let [o, lse, d_o] = &self.host;
        let case = AttentionBackwardCase { attention: self.forward.for_oracle()?, o, lse, d_o };
        let [dq, dk, dv] = outputs else { return Ok(Vec::new()) }; // these are always all there
        let gradients: [&dyn Elements; 3] = [dq, dk, dv];
        Ok(oracle::attention_backward(&case, gradients, seed, progress)?.to_vec())
    }
}
