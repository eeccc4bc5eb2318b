//! The steps of a call: what is verified, planned, launched and computed.

use super::lists::HostLists;
use super::plan::{Launches, United, plan};
use super::{
    IndexAttention, IndexAttentionOperands, IndexAttentionPlan, IndexAttentionProblem, cpu,
};
use crate::attention_decode::{AttentionDecode, AttentionDecodeWorkspace};
use crate::check::{Operand, aligned};
use crate::operation::Steps;
use crate::{Error, Result};
use blockflash_safe::{
    AttentionDecodeOperands, AttentionIndexOperands, CudaProperties, Device, Stream, ViewMut,
};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{
    AttentionIndex, AttentionLatentIndex, AttentionLatentIndexFew, AttentionLatentIndexHopper,
    Variant,
};

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

    /// Those of a launch, with the lists.
    fn operands<'s>(
        &'s self,
        attention: AttentionDecodeOperands<'s>,
    ) -> AttentionIndexOperands<'s> {
        AttentionIndexOperands {
            attention,
            entries: self.lists.entries,
            cu_seqlens_kv: self.packed_kv.map(|packed| packed.cu_seqlens),
        }
    }
}

impl Steps for IndexAttention<'_> {
    type Problem = IndexAttentionProblem;
    type Plan = IndexAttentionPlan;
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
        problem: &IndexAttentionProblem,
        gpu: &CudaProperties,
    ) -> Result<IndexAttentionPlan> {
        plan(kernel, problem, gpu)
    }

    fn kernels(kernel: &'static Kernel, plan: &IndexAttentionPlan) -> Vec<&'static Kernel> {
        match &plan.launches {
            Launches::Listed { .. } => vec![kernel],
            Launches::United { union, .. } => vec![union, kernel],
        }
    }

    fn launch(
        &self,
        kernel: &Kernel,
        plan: &IndexAttentionPlan,
        _: &IndexAttentionProblem,
        operands: IndexAttentionOperands<'_>,
        stream: &Stream,
    ) -> Result<()> {
        // Everything is checked before anything is queued.
        let needed = plan.workspace_bytes;
        let bytes = self.workspace.map_or(0, AttentionDecodeWorkspace::bytes);
        if bytes < needed {
            let expected = format!("[at least {needed}]");
            return Err(Error::Shape { what: "workspace", expected, found: vec![bytes] });
        }
        let IndexAttentionOperands { cache, mut o, mut lse } = operands;
        aligned("q", &self.q)?;
        aligned("cache.k", &cache.k)?;
        aligned("cache.v", &cache.v)?;
        aligned("o", &o.as_view())?;
        let cache = cache.views();
        // Of queries, cache and outputs it has the same operands.
        let decode = AttentionDecode {
            packed: self.packed,
            scores: self.scores,
            workspace: self.workspace,
            ..AttentionDecode::new(self.q)
        };
        match &plan.launches {
            Launches::Listed { plan, config } => {
                let operands = self.operands(decode.operands(cache, o, lse));
                match kernel.variant {
                    Variant::AttentionLatentIndex(_) => {
                        stream.launch::<AttentionLatentIndex>(kernel, config, plan, operands)
                    }
                    Variant::AttentionLatentIndexFew(_) => {
                        stream.launch::<AttentionLatentIndexFew>(kernel, config, plan, operands)
                    }
                    Variant::AttentionLatentIndexHopper(_) => {
                        stream.launch::<AttentionLatentIndexHopper>(kernel, config, plan, operands)
                    }
                    _ => stream.launch::<AttentionIndex>(kernel, config, plan, operands),
                }?;
            }
            Launches::United { union, pairs } => {
                for United { plan, configs: [first, second] } in pairs {
                    let (out, sums) = (o.reborrow(), lse.as_mut().map(ViewMut::reborrow));
                    let operands = self.operands(decode.operands(cache, out, sums));
                    stream.launch_united([union, kernel], [first, second], plan, &operands)?;
                }
            }
        }
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
