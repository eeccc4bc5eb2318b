//! The checks of a call: those that need no other rank, then what all ranks agree about.

use crate::agree::agree;
use crate::attention::DistributedAttention;
use crate::gathered::{Gather, Offer};
use crate::grid::Grid;
use crate::mask_sizes::hash_of;
use crate::pattern::{Pattern, check_offsets};
use crate::plan::Plan;
use crate::problem::{ARGUMENTS, Problem};
use crate::{Communicator, DistributedBlockMask, Error, PreparedAttention, Result};
use blockflash_ops::attention;
use std::sync::Arc;

impl DistributedAttention<'_> {
    /// Every check that needs no other rank.
    pub(crate) fn problem(&self, comm: &dyn Communicator) -> Result<Problem> {
        let Self { attention, shard, scheme, block_mask, cu_seqlens } = *self;
        let mut local = attention.problem()?;
        let unsupported = |what| Error::Unsupported { scheme, what };
        if attention.cu_seqlens.is_some() {
            return Err(unsupported("cu_seqlens of the rows of one rank"));
        }
        if attention.block_mask.is_some() {
            return Err(unsupported("a block mask that is not distributed"));
        }
        if let Some(term) = local.terms() {
            return Err(unsupported(term));
        }
        if local.types.single().is_none() {
            return Err(unsupported("q, k and v of 8 bits, or an o_dtype other than theirs"));
        }
        if local.head_dims.single().is_none() {
            return Err(unsupported("a head_dim of v other than that of q and k"));
        }
        if let Some(offsets) = cu_seqlens {
            if block_mask.is_some() {
                return Err(unsupported("packed sequences with a block mask"));
            }
            if local.batch != 1 {
                let (what, value) = ("the batch of packed sequences", local.batch);
                return Err(Error::Size { what, value, expected: "1".into() });
            }
            check_offsets(offsets, shard.seqlen())?;
        }
        let pattern = Pattern::of(local.scores.mask, shard.seqlen(), cu_seqlens);
        let band = pattern.ok_or(unsupported("the mask"))?.band;
        let grid = Grid::new(scheme, shard, comm)?;
        scheme.check_heads(local.num_heads_q, local.num_heads_kv)?;
        let expected = shard.rows();
        for (what, found) in [("q", local.seqlen_q), ("k", local.seqlen_kv)] {
            if found != expected {
                let (rank, world, seqlen) = (shard.rank(), shard.world(), shard.seqlen());
                return Err(Error::Rows { what, rank, world, seqlen, expected, found });
            }
        }
        local.block_mask = block_mask.map(|mask| mask.fits(&local, &grid, band)).transpose()?;
        if let Some(gpu) = comm.stream().device().cuda_properties() {
            attention::select(&local, gpu)?;
        }
        let block_mask = block_mask.map(DistributedBlockMask::id);
        // 0 stands for one sequence.
        let cu_seqlens = cu_seqlens.map(|offsets| hash_of(&offsets).max(1));
        Ok(Problem { local, grid, band, block_mask, cu_seqlens })
    }

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
        let none = ([("", 0); ARGUMENTS], [0; 2]);
        let words = |PreparedAttention { problem, plans, .. }: &PreparedAttention| {
            let offer = Offer::new(comm, problem, plans, self.block_mask);
            let parts = if forward { offer.parts } else { 0 };
            (problem.arguments(), [offer.coming, parts])
        };
        let (arguments, others) = planned.as_ref().map_or(none, words);
        let agreed = agree(comm, planned.is_ok(), &arguments, others);
        let mut prepared = planned?;
        let agreed = agreed?;
        let offers: Vec<_> =
            agreed.iter().map(|&[coming, parts]| Offer { coming, parts }).collect();
        let PreparedAttention { problem, plans, .. } = &prepared;
        if let Some(gather) = Gather::decide(problem, plans.len(), &offers) {
            let bytes = gather.bytes(problem.local.types.kv.size());
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
