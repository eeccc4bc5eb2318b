//! Operands of the backward pass of attention.

use super::attention_operands::AttentionOperands;
use super::operands::{Operands, normal};
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
    outputs: Outputs,
    /// o, lse and d_o, for the oracle.
    host: [Array; 3],
    prepared: Option<PreparedAttentionBackward>,
}

#[derive(Debug)]
struct Outputs {
    gradients: AttentionGradients,
    /// Enough for every kernel.
    workspace: Tensor,
}

impl Outputs {
    fn views(&mut self) -> (AttentionGradientsMut<'_>, Option<ViewMut<'_>>) {
        (self.gradients.view_mut(), Some(self.workspace.view_mut()))
    }
}

fn call<'a>(forward: &'a AttentionOperands, d_o: &'a Tensor) -> Result<AttentionBackward<'a>> {
    Ok(AttentionBackward {
        attention: forward.call()?,
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
        let gradients =
            AttentionGradients { dq: like(q)?, dk: like(k)?, dv: like(v)?, d_sink: None };
        let workspace = Tensor::empty(stream, DType::U8, &[bytes])?;
        let outputs = Outputs { gradients, workspace };
        Ok(Self { forward, d_o, outputs, host, prepared: None })
    }

    fn call(&self) -> Result<AttentionBackward<'_>> {
        call(&self.forward, &self.d_o)
    }

    fn problem(&mut self) -> Result<AttentionBackwardProblem> {
        let bytes = self.outputs.workspace.shape()[0];
        let problem = self.call()?.problem()?.with_workspace(bytes);
        Ok(problem.with_gradients(&self.outputs.gradients.view_mut())?)
    }
}

/// Bytes that suffice for every kernel, also those that the library does not select.
fn workspace(problem: &AttentionBackwardProblem, stream: &Stream) -> Result<usize> {
    let mut most = 0;
    if !stream.device().is_cpu() {
        let kernels = manifest::kernels().iter();
        for kernel in kernels.filter(|kernel| kernel.attention_bwd_tile().is_some()) {
            most = attention_bwd::workspace_bytes(kernel, problem)?.max(most);
        }
    }
    Ok(most)
}

impl Operands for BackwardOperands {
    fn select(&mut self, gpu: &CudaProperties) -> Result<&'static Kernel> {
        Ok(attention_bwd::select(&self.problem()?, gpu)?)
    }

    /// Also whether there are kernels for the other steps of its scheme.
    fn accepts(&mut self, kernel: &Kernel, gpu: &CudaProperties) -> Result<bool> {
        Ok(attention_bwd::plan(kernel, &self.problem()?, gpu).is_ok())
    }

    fn launch(&mut self, kernel: Option<&'static Kernel>, stream: &Stream) -> Result<()> {
        let call = call(&self.forward, &self.d_o)?;
        match kernel {
            None => call.run(self.outputs.views(), stream)?,
            Some(kernel) => call.run_with(kernel, self.outputs.views(), stream)?,
        }
        Ok(())
    }

    fn prepare(&mut self, stream: &Stream) -> Result<bool> {
        let call = call(&self.forward, &self.d_o)?;
        self.prepared = Some(call.prepare(&self.outputs.views(), stream)?);
        Ok(true)
    }

    fn launch_prepared(&mut self, stream: &Stream) -> Result<()> {
        let Some(prepared) = &self.prepared else { return self.launch(None, stream) };
        let call = call(&self.forward, &self.d_o)?;
        Ok(call.run_prepared(prepared, self.outputs.views(), stream)?)
    }

    fn outputs(&mut self, _kernel: Option<&Kernel>) -> Vec<(&'static str, &mut Tensor)> {
        let AttentionGradients { dq, dk, dv, .. } = &mut self.outputs.gradients;
        vec![("dq", dq), ("dk", dk), ("dv", dv)]
    }

    fn compare(
        &self,
        outputs: &[Array],
        seed: u64,
        progress: &(dyn Fn(f64) + Sync),
    ) -> Result<Vec<Comparison>> {
        let [o, lse, d_o] = &self.host;
        let case = AttentionBackwardCase { attention: self.forward.for_oracle()?, o, lse, d_o };
        let [dq, dk, dv] = outputs else { return Ok(Vec::new()) }; // these are always all there
        let gradients: [&dyn Elements; 3] = [dq, dk, dv];
        Ok(oracle::attention_backward(&case, gradients, seed, progress)?.to_vec())
    }
}
