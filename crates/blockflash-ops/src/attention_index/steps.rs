//! The steps of a call: what is verified, planned, launched and computed.

use super::lists::HostLists;
use super::{IndexAttention, IndexAttentionOperands, IndexAttentionProblem, cpu};
use crate::Result;
use crate::check::Operand;
use crate::operation::Steps;
use crate::selection::unsupported;
use blockflash_safe::{CudaProperties, Device, Stream};
use blockflash_sys::Kernel;

impl IndexAttention<'_> {
    /// Checks that every input is on this device.
    fn on(&self, device: &Device) -> Result<()> {
        let inputs = [
            ("q", Some(&self.q)),
            ("cu_seqlens.q", self.packed.as_ref().map(|packed| &packed.cu_seqlens)),
            ("packed_kv.cu_seqlens", self.packed_kv.as_ref().map(|packed| &packed.cu_seqlens)),
            ("lists.entries", Some(&self.lists.entries)),
        ];
        for (what, view) in inputs {
            view.map_or(Ok(()), |view| Operand::new(what, view).on(device))?;
        }
        self.scores.on(device)?;
        self.workspace.map_or(Ok(()), |workspace| workspace.on(device))
    }
}

impl Steps for IndexAttention<'_> {
    type Problem = IndexAttentionProblem;
    type Plan = ();
    type Out<'o> = IndexAttentionOperands<'o>;

    fn is_empty(problem: &IndexAttentionProblem) -> bool {
        problem.attention.is_empty()
    }

    fn checked(
        &self,
        operands: &IndexAttentionOperands<'_>,
        stream: &Stream,
    ) -> Result<IndexAttentionProblem> {
        let IndexAttentionOperands { cache, o, lse } = operands;
        let device = stream.device();
        let mut problem = self.problem(cache)?;
        problem.attention = problem.attention.with_outputs(o, lse.as_ref())?;
        self.on(device)?;
        cache.on(device)?;
        Operand::of_mut("o", o).on(device)?;
        lse.as_ref().map_or(Ok(()), |lse| Operand::of_mut("lse", lse).on(device))?;
        Ok(problem)
    }

    fn has_data(_: &IndexAttentionProblem) -> bool {
        true
    }

    fn verify(
        &self,
        problem: &IndexAttentionProblem,
        operands: &IndexAttentionOperands<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let cache = &operands.cache;
        let host = cpu::host_cache(self, problem, cache, stream)?;
        host.verify()?;
        host.verify_scales(cache, [false; 2], |_| 0, stream)?;
        let lists = HostLists::new(&self.lists, problem.lists, stream)?;
        let sequences = cpu::queries(self, problem, stream)?.into_iter().enumerate();
        for (entry, (rows, first)) in sequences {
            let length = host.length(entry);
            (first..first + rows.len()).try_for_each(|query| lists.verify(query, length))?;
        }
        Ok(())
    }

    fn plan(
        kernel: &'static Kernel,
        _: &IndexAttentionProblem,
        gpu: &CudaProperties,
    ) -> Result<()> {
        let what = format!("{}: this kernel computes something else", kernel.symbol());
        Err(unsupported::<IndexAttentionProblem>(&gpu.compute_capability, what))
    }

    fn launch(
        &self,
        _: &Kernel,
        (): &(),
        _: &IndexAttentionProblem,
        _: IndexAttentionOperands<'_>,
        _: &Stream,
    ) -> Result<()> {
        Ok(())
    }

    fn compute(
        &self,
        problem: &IndexAttentionProblem,
        operands: IndexAttentionOperands<'_>,
        stream: &Stream,
    ) -> Result<()> {
        cpu::forward(self, problem, operands, stream)
    }
}
