//! The plans of a rank as data, for ranks that talk by other means than a
//! [`Communicator`](crate::Communicator).

use crate::band::Part;
use crate::grid::{Grid, Piece};
use crate::pattern::{Pattern, check_offsets};
use crate::plan::{Call, Plan, Step};
use crate::{Error, Result, Scheme, Shard};
use blockflash_ops::{BlockMask, Mask};
use std::ops::Range;

/// One step of a rank: keys of another rank come, or those of this one are there, and calls of
/// attention visit them.
#[derive(Clone, Debug)]
pub struct PlanStep<'a> {
    /// The rank whose keys are visited: this one in the first step.
    pub from: usize,
    /// How many of its rows come; none of this rank.
    pub received: usize,
    /// The rank that visits keys of this one in this step.
    pub to: usize,
    /// The rows that it needs, of those of the group of this rank.
    pub sent: &'a [Range<usize>],
    /// The calls of attention.
    pub calls: Vec<PlanCall<'a>>,
}

/// A call of attention of a [`PlanStep`].
#[derive(Clone, Debug)]
pub struct PlanCall<'a> {
    /// Its queries, of the rows of the group of this rank.
    pub queries: Range<usize>,
    /// Its keys, of the rows that have come, or of those of the group in the first step.
    pub keys: Range<usize>,
    /// The token mask between them, aligned at the top left.
    pub mask: Mask,
    /// Whether the queries stand at these keys: each query does in one call, which counts a sink.
    pub own: bool,
    /// The output that it writes, of those that are merged. No two calls write the same rows of
    /// one.
    pub slot: usize,
    /// Where sequences that attend only themselves begin and end among the rows, which are the
    /// same ones of queries and keys; `None` if there is one sequence.
    pub cu_seqlens: Option<&'a [i32]>,
    /// The blocks that are visited; `None` if all are.
    pub block_mask: Option<&'a BlockMask>,
}

/// What a rank computes and exchanges for attention without a block mask. A
/// [`DistributedBlockMask`](crate::DistributedBlockMask) has its own.
///
/// ```
/// # use blockflash_dist::{DensePlan, Scheme, Shard};
/// # use blockflash_ops::Mask;
/// let shard = Shard::new(4096, 4, 3)?;
/// let plan = DensePlan::new(shard, Scheme { heads: 1, keys: 4 }, Mask::causal(), None)?;
/// // Its own keys, then those of rank 2, of which it needs the first chunk.
/// let steps = plan.steps();
/// assert_eq!((steps[0].from, steps[1].from, steps[1].received), (3, 2, 512));
/// # Ok::<(), blockflash_dist::Error>(())
/// ```
#[derive(Debug)]
pub struct DensePlan(Plan);

impl DensePlan {
    /// The plan of the rank of `shard`. The mask is one of the whole sequence, or of each sequence
    /// of a packed batch, which begin and end at `cu_seqlens`.
    ///
    /// # Errors
    /// [`Error::Scheme`]; [`Error::CuSeqlens`] and [`Error::Size`] for offsets that are not those
    /// of the rows; [`Error::Unsupported`] for a mask that is neither full, causal nor a window.
    pub fn new(
        shard: Shard,
        scheme: Scheme,
        mask: Mask,
        cu_seqlens: Option<&[i32]>,
    ) -> Result<DensePlan> {
        let grid = Grid::of(scheme, shard)?;
        cu_seqlens.map_or(Ok(()), |offsets| check_offsets(offsets, shard.seqlen()))?;
        let pattern = Pattern::of(mask, shard.seqlen(), cu_seqlens);
        let what = "this mask";
        let pattern = pattern.ok_or(Error::Unsupported { scheme, what })?;
        Ok(DensePlan(Plan::dense(&grid, &pattern)?))
    }

    /// The steps in the order in which all ranks make theirs.
    pub fn steps(&self) -> Vec<PlanStep<'_>> {
        PlanStep::all(&self.0)
    }
}

impl Scheme {
    /// Where both chunks of each rank of the group of a rank are in the rows of the group, which
    /// are exchanged for heads.
    ///
    /// # Errors
    /// [`Error::Scheme`].
    pub fn pieces(&self, shard: Shard) -> Result<Vec<[Range<usize>; 2]>> {
        let pieces = Grid::of(*self, shard)?.pieces();
        let of_rank = |pair: &[Piece]| [pair[0].common.clone(), pair[1].common.clone()];
        Ok(pieces.chunks_exact(2).map(of_rank).collect())
    }
}

impl<'a> PlanStep<'a> {
    pub(crate) fn all(plan: &'a Plan) -> Vec<PlanStep<'a>> {
        let step = |step: &'a Step| {
            let Step { from, received, to, ref sent, .. } = *step;
            PlanStep {
                from,
                received,
                to,
                sent,
                calls: step.calls.iter().map(PlanCall::of).collect(),
            }
        };
        plan.steps.iter().map(step).collect()
    }
}

impl<'a> PlanCall<'a> {
    fn of(call: &'a Call) -> PlanCall<'a> {
        let Part { ref queries, ref keys, mask, own, ref cu_seqlens } = call.part;
        PlanCall {
            queries: queries.clone(),
            keys: keys.clone(),
            mask,
            own,
            slot: call.slot,
            cu_seqlens: cu_seqlens.as_deref(),
            block_mask: call.block_mask.as_ref(),
        }
    }
}
