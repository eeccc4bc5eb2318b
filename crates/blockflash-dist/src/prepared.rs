use crate::agree::agree;
use crate::gathered::{Gather, Offer};
use crate::pattern::Pattern;
use crate::plan::Plan;
use crate::problem::{ARGUMENTS, Problem};
use crate::{Communicator, DistributedAttention, Pass, Result};
use blockflash_ops::AttentionProblem;
use std::sync::Arc;

/// A call whose arguments all ranks have compared: see [`DistributedAttention::prepare`].
#[derive(Clone, Debug)]
pub struct PreparedAttention {
    pub(crate) problem: Problem,
    pub(crate) plans: Arc<[Plan]>,
    /// Whether the forward pass gathers keys, which all ranks have decided.
    pub(crate) gather: Option<Gather>,
}

impl PreparedAttention {
    /// Bytes that this rank sends to others in a pass.
    pub fn sent_bytes(&self, pass: Pass) -> usize {
        let AttentionProblem { batch, dtype, .. } = self.problem.local;
        if let (Some(gather), Pass::Forward) = (self.gather, pass) {
            let others = self.problem.grid.shard.world() - 1;
            return batch * others * gather.bytes(dtype.size());
        }
        let mut rows = [0; 2];
        for plan in self.plans.iter().cycle().take(batch) {
            rows = std::array::from_fn(|at| rows[at] + plan.rows_sent()[at]);
        }
        self.problem.sent_bytes(rows, pass)
    }
}

impl DistributedAttention<'_> {
    /// `forward`: whether the forward pass follows.
    pub(crate) fn agreed(
        &self,
        problem: Result<Problem>,
        comm: &dyn Communicator,
        forward: bool,
    ) -> Result<PreparedAttention> {
        let planned = problem.and_then(|problem| {
            let plans = match self.block_mask {
                Some(mask) => mask.plans(),
                None => {
                    let pattern = Pattern { band: problem.band, cu_seqlens: self.cu_seqlens };
                    [Plan::dense(&problem.grid, &pattern)?].into()
                }
            };
            Ok(PreparedAttention { problem, plans, gather: None })
        });
        let none = ([0; ARGUMENTS.len()], [0; 2]);
        let words = |PreparedAttention { problem, plans, .. }: &PreparedAttention| {
            let offer = Offer::new(comm, problem, plans, self.block_mask);
            let parts = if forward { offer.parts } else { 0 };
            (problem.arguments(), [offer.coming, parts])
        };
        let (values, others) = planned.as_ref().map_or(none, words);
        let arguments: Vec<_> = ARGUMENTS.into_iter().zip(values).collect();
        let agreed = agree(comm, planned.is_ok(), &arguments, others);
        let mut prepared = planned?;
        let agreed = agreed?;
        let offers: Vec<_> =
            agreed.iter().map(|&[coming, parts]| Offer { coming, parts }).collect();
        let PreparedAttention { problem, plans, .. } = &prepared;
        if let Some(gather) = Gather::decide(problem, plans.len(), &offers) {
            let bytes = gather.bytes(problem.local.dtype.size());
            prepared.gather = comm.reserve_gather(bytes)?.then_some(gather);
        }
        // Only a plan that nobody else has is without what is uploaded.
        if let Some(plans) = Arc::get_mut(&mut prepared.plans) {
            let uploaded = plans.iter_mut().try_for_each(|plan| plan.upload(comm.stream()));
            uploaded.inspect_err(|error| comm.give_up(&error.to_string()))?;
        }
        Ok(prepared)
    }

    pub(crate) fn check_prepared(
        &self,
        prepared: &PreparedAttention,
        comm: &dyn Communicator,
    ) -> Result<()> {
        match self.problem(comm)? == prepared.problem {
            true => Ok(()),
            false => Err(blockflash_ops::Error::NotPrepared { op: "distributed attention" }.into()),
        }
    }
}
