//! The steps of both calls: what is verified, planned, launched and computed.

use super::plan::{IndexScoresLaunch, TopKLaunch, plan_scores, plan_top_k};
use super::{IndexScores, IndexScoresProblem, TopK, TopKProblem, cpu};
use crate::attention_decode::AttentionDecodeWorkspace;
use crate::check::{Operand, aligned};
use crate::kv_cache::{HostCache, KvCache, PackedTokens};
use crate::operation::Steps;
use crate::{Error, Result};
use blockflash_safe::{
    CudaProperties, Device, IndexOffsets, IndexScoresOperands, KvCacheViews, Stream, TopKOperands,
    View, ViewMut,
};
use blockflash_sys::Kernel;

/// Checks that the inputs that are there are on this device.
fn inputs_on<const N: usize>(
    device: &Device,
    inputs: [(&'static str, Option<&View<'_>>); N],
) -> Result<()> {
    inputs.into_iter().try_for_each(|(what, view)| {
        view.map_or(Ok(()), |view| Operand::new(what, view).on(device))
    })
}

impl IndexScores<'_> {
    fn offsets(&self) -> IndexOffsets<'_> {
        let [q, kv] = [&self.packed, &self.packed_kv].map(|x| x.map(|packed| packed.cu_seqlens));
        IndexOffsets { q, kv }
    }
}

impl TopK<'_> {
    fn offsets(&self) -> IndexOffsets<'_> {
        let [q, kv] = [&self.packed, &self.packed_kv].map(|x| x.map(|packed| packed.cu_seqlens));
        IndexOffsets { q, kv }
    }
}

fn offsets<'v>(packed: Option<&'v PackedTokens<'_>>) -> Option<&'v View<'v>> {
    packed.map(|packed| &packed.cu_seqlens)
}

impl Steps for IndexScores<'_> {
    type Problem = IndexScoresProblem;
    type Plan = IndexScoresLaunch;
    type Out<'o> = ViewMut<'o>;

    fn is_empty(problem: &IndexScoresProblem) -> bool {
        problem.is_empty()
    }

    fn checked(&self, scores: &ViewMut<'_>, stream: &Stream) -> Result<IndexScoresProblem> {
        let (problem, device) = (self.problem(scores)?, stream.device());
        self.cache.on(device)?;
        inputs_on(
            device,
            [
                ("q", Some(&self.q)),
                ("cu_seqlens.q", offsets(self.packed.as_ref())),
                ("packed_kv.cu_seqlens", offsets(self.packed_kv.as_ref())),
                ("weights", self.weights.as_ref()),
            ],
        )?;
        Operand::of_mut("scores", scores).on(device)?;
        Ok(problem)
    }

    fn has_data(problem: &IndexScoresProblem) -> bool {
        problem.rows.has_data() || HostCache::has_data(&problem.cache)
    }

    fn verify(&self, problem: &IndexScoresProblem, _: &ViewMut<'_>, stream: &Stream) -> Result<()> {
        cpu::host_cache(self, problem, stream)?.verify()?;
        cpu::ranges(&problem.rows, self.packed.as_ref(), stream).map(drop)
    }

    fn plan(
        kernel: &'static Kernel,
        problem: &IndexScoresProblem,
        gpu: &CudaProperties,
    ) -> Result<IndexScoresLaunch> {
        plan_scores(kernel, problem, gpu)
    }

    fn launch(
        &self,
        kernel: &Kernel,
        IndexScoresLaunch { plan, config }: &IndexScoresLaunch,
        _: &IndexScoresProblem,
        scores: ViewMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let KvCache { k, v, block_table, seqused_kv: seqused, .. } = self.cache;
        for (what, view) in [("q", &self.q), ("cache.k", &k), ("cache.v", &v)] {
            aligned(what, view)?;
        }
        let operands = IndexScoresOperands {
            q: self.q,
            offsets: self.offsets(),
            cache: KvCacheViews { k, v, block_table, seqused, scales: [None; 2] },
            weights: self.weights,
            scores,
        };
        Ok(stream.launch::<blockflash_safe::IndexScores>(kernel, config, plan, operands)?)
    }

    fn compute(
        &self,
        problem: &IndexScoresProblem,
        scores: ViewMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        cpu::scores(self, problem, scores, stream)
    }
}

impl Steps for TopK<'_> {
    type Problem = TopKProblem;
    type Plan = TopKLaunch;
    type Out<'o> = ViewMut<'o>;

    fn is_empty(problem: &TopKProblem) -> bool {
        problem.is_empty()
    }

    fn checked(&self, chosen: &ViewMut<'_>, stream: &Stream) -> Result<TopKProblem> {
        let (problem, device) = (self.problem(chosen)?, stream.device());
        inputs_on(
            device,
            [
                ("scores", Some(&self.scores)),
                ("cu_seqlens.q", offsets(self.packed.as_ref())),
                ("packed_kv.cu_seqlens", offsets(self.packed_kv.as_ref())),
                ("seqused_kv", self.seqused_kv.as_ref()),
            ],
        )?;
        Operand::of_mut("chosen", chosen).on(device)?;
        self.workspace.map_or(Ok(()), |workspace| workspace.on(device))?;
        Ok(problem)
    }

    fn has_data(problem: &TopKProblem) -> bool {
        problem.rows.has_data()
    }

    fn verify(&self, problem: &TopKProblem, _: &ViewMut<'_>, stream: &Stream) -> Result<()> {
        cpu::ranges(&problem.rows, self.packed.as_ref(), stream)?;
        let capacity = problem.rows.capacity as i64;
        for (entry, length) in cpu::lengths(self, problem, stream)?.into_iter().enumerate() {
            if !(0..=capacity).contains(&length) {
                let what = if self.packed_kv.is_some() { "packed_kv" } else { "seqused_kv" };
                let problem = format!("a length is from 0 to the capacity, which is {capacity}");
                return Err(Error::InvalidData {
                    what,
                    index: vec![entry],
                    value: length as i32,
                    problem,
                });
            }
        }
        Ok(())
    }

    fn plan(
        kernel: &'static Kernel,
        problem: &TopKProblem,
        gpu: &CudaProperties,
    ) -> Result<TopKLaunch> {
        plan_top_k(kernel, problem, gpu)
    }

    fn launch(
        &self,
        kernel: &Kernel,
        TopKLaunch { plan, config }: &TopKLaunch,
        problem: &TopKProblem,
        chosen: ViewMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let needed = problem.workspace_bytes(stream.device())?;
        let bytes = self.workspace.map_or(0, AttentionDecodeWorkspace::bytes);
        if plan.parts > 1 && bytes < needed {
            let expected = format!("[at least {needed}]");
            return Err(Error::Shape { what: "workspace", expected, found: vec![bytes] });
        }
        let operands = TopKOperands {
            scores: self.scores,
            offsets: self.offsets(),
            seqused: self.seqused_kv,
            chosen,
            workspace: self.workspace.filter(|_| plan.parts > 1).map(|of| of.memory()),
        };
        Ok(stream.launch::<blockflash_safe::TopK>(kernel, config, plan, operands)?)
    }

    fn compute(&self, problem: &TopKProblem, chosen: ViewMut<'_>, stream: &Stream) -> Result<()> {
        cpu::choose(self, problem, chosen, stream)
    }
}
