//! The steps of both calls: what is verified, planned, launched and computed.

use super::choose::workspace_bytes;
use super::plan::{
    ChoosePagesPlan, SummarizePagesPlan, check_addresses, plan_choice, plan_summaries,
};
use super::{ChoosePages, ChoosePagesProblem, SummarizePages, SummarizePagesProblem, cpu, views};
use crate::attention_decode::AttentionDecodeWorkspace;
use crate::check::Operand;
use crate::kv_cache::{HostCache, token_ranges};
use crate::operation::Steps;
use crate::{Error, Result};
use blockflash_safe::{
    CudaProperties, PageChoice, PageChoiceOperands, PageSummaries, PageSummariesOperands, Stream,
    ViewMut,
};
use blockflash_sys::Kernel;

impl Steps for SummarizePages<'_> {
    type Problem = SummarizePagesProblem;
    type Plan = SummarizePagesPlan;
    type Out<'o> = ViewMut<'o>;

    fn is_empty(problem: &SummarizePagesProblem) -> bool {
        let cache = &problem.summaries.cache;
        [problem.tokens, cache.batch, cache.capacity, cache.num_heads_kv].contains(&0)
    }

    fn checked(&self, summaries: &ViewMut<'_>, stream: &Stream) -> Result<SummarizePagesProblem> {
        let problem = self.problem(summaries)?;
        self.cache.on(stream.device())?;
        Operand::of_mut("summaries", summaries).on(stream.device())?;
        Ok(problem)
    }

    fn has_data(problem: &SummarizePagesProblem) -> bool {
        HostCache::has_data(&problem.summaries.cache)
    }

    fn verify(
        &self,
        problem: &SummarizePagesProblem,
        _: &ViewMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        HostCache::new(&self.cache, problem.summaries.cache, stream)?.verify()
    }

    fn plan(
        kernel: &'static Kernel,
        problem: &SummarizePagesProblem,
        gpu: &CudaProperties,
    ) -> Result<SummarizePagesPlan> {
        plan_summaries(kernel, problem, gpu)
    }

    fn launch(
        &self,
        kernel: &Kernel,
        SummarizePagesPlan { plan, config }: &SummarizePagesPlan,
        _: &SummarizePagesProblem,
        summaries: ViewMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let cache = views(&self.cache);
        check_addresses(&[
            ("cache.k", cache.k.is_aligned(16)),
            ("cache.v", cache.v.is_aligned(16)),
            ("summaries", summaries.is_aligned(16)),
        ])?;
        let operands = PageSummariesOperands { cache, summaries };
        stream.launch::<PageSummaries>(kernel, config, plan, operands)?;
        Ok(())
    }

    fn compute(
        &self,
        problem: &SummarizePagesProblem,
        summaries: ViewMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        cpu::summarize(self, problem, summaries, stream)
    }
}

impl Steps for ChoosePages<'_> {
    type Problem = ChoosePagesProblem;
    type Plan = ChoosePagesPlan;
    type Out<'o> = (ViewMut<'o>, ViewMut<'o>);

    fn is_empty(problem: &ChoosePagesProblem) -> bool {
        problem.summaries.cache.batch == 0
    }

    fn checked(
        &self,
        (lists, counts): &Self::Out<'_>,
        stream: &Stream,
    ) -> Result<ChoosePagesProblem> {
        let problem = self.problem(lists, counts)?;
        let device = stream.device();
        self.cache.on(device)?;
        Operand::new("q", &self.q).on(device)?;
        Operand::new("summaries", &self.summaries).on(device)?;
        if let Some(packed) = &self.packed {
            Operand::new("cu_seqlens.q", &packed.cu_seqlens).on(device)?;
        }
        Operand::of_mut("lists", lists).on(device)?;
        Operand::of_mut("counts", counts).on(device)?;
        self.workspace.map_or(Ok(()), |workspace| workspace.on(device))?;
        Ok(problem)
    }

    fn has_data(problem: &ChoosePagesProblem) -> bool {
        problem.total_q.is_some() || HostCache::has_data(&problem.summaries.cache)
    }

    fn verify(
        &self,
        problem: &ChoosePagesProblem,
        _: &Self::Out<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let cache = problem.summaries.cache;
        HostCache::new(&self.cache, cache, stream)?.verify()?;
        let sizes = [cache.batch, problem.seqlen_q];
        token_ranges(self.packed.as_ref(), sizes, problem.total_q, stream)?;
        Ok(())
    }

    fn plan(
        kernel: &'static Kernel,
        problem: &ChoosePagesProblem,
        gpu: &CudaProperties,
    ) -> Result<ChoosePagesPlan> {
        plan_choice(kernel, problem, gpu)
    }

    fn launch(
        &self,
        kernel: &Kernel,
        ChoosePagesPlan { plan, config }: &ChoosePagesPlan,
        problem: &ChoosePagesProblem,
        (lists, counts): Self::Out<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let needed = workspace_bytes(&problem.summaries)?;
        let workspace = self.workspace.filter(|workspace| workspace.bytes() >= needed);
        let Some(workspace) = workspace else {
            let bytes = self.workspace.map_or(0, AttentionDecodeWorkspace::bytes);
            let expected = format!("[at least {needed}]");
            return Err(Error::Shape { what: "workspace", expected, found: vec![bytes] });
        };
        let cache = views(&self.cache);
        check_addresses(&[
            ("q", self.q.is_aligned(16) || self.q.layout().is_empty()),
            ("cache.k", cache.k.is_aligned(16)),
            ("cache.v", cache.v.is_aligned(16)),
            ("summaries", self.summaries.is_aligned(16)),
        ])?;
        let operands = PageChoiceOperands {
            q: self.q,
            cu_seqlens_q: self.packed.map(|packed| packed.cu_seqlens),
            cache,
            summaries: self.summaries,
            lists,
            counts,
            workspace: workspace.memory(),
        };
        stream.launch::<PageChoice>(kernel, config, plan, operands)?;
        Ok(())
    }

    fn compute(
        &self,
        problem: &ChoosePagesProblem,
        (lists, counts): Self::Out<'_>,
        stream: &Stream,
    ) -> Result<()> {
        cpu::choose(self, problem, lists, counts, stream)
    }
}
