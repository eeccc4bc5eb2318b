//! Keys and values of all ranks gathered at once, in place of steps that bring those of one rank.
//!
//! A communicator may gather without taking SMs from attention, which sends and receives do not.

use crate::exchange::{Packed, pack};
use crate::plan::{Call, PARTS, Plan, Slots, Together, is_worth_gathering};
use crate::problem::Problem;
use crate::{Communicator, DistributedBlockMask, Mark, Result, Scheme};
use blockflash_ops::{
    Attention, AttentionProblem, Event, Mask, Scores, Stream, Tensor, View, ViewMut, copy_beside,
};
use std::ops::Range;

/// How keys and values are gathered. They are in a window of `[parts · ranks, 2 · rows, heads,
/// head_dim]`: the slot of a rank in a part has the keys of some heads, and then their values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Gather {
    world: usize,
    /// Parts of the heads.
    parts: usize,
    /// The most that any rank has; others have less in the same room.
    rows: usize,
    /// All heads of keys, and of queries.
    heads_kv: usize,
    heads_q: usize,
    head_dim: usize,
}

/// What a rank says of a call before the ranks decide whether keys are gathered.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Offer {
    /// Rows of keys that would come by steps, for all plans.
    pub(crate) coming: u64,
    /// The most parts in which this rank can gather; 0 if it cannot.
    pub(crate) parts: u64,
}

impl Offer {
    pub(crate) fn new(
        comm: &dyn Communicator,
        problem: &Problem,
        plans: &[Plan],
        block_mask: Option<&DistributedBlockMask>,
    ) -> Offer {
        let heads = problem.local.num_heads_kv;
        let parts = match block_mask {
            // A mask of all heads is not divided.
            Some(mask) if !mask.is_in_parts(heads) => heads.min(1),
            _ => heads.min(PARTS),
        };
        // With heads over ranks, those with the same heads are some of the ranks only.
        let Scheme { heads, keys } = problem.grid.scheme;
        let gathers = comm.gathers() && heads == 1 && keys > 1;
        let steps = plans.iter().flat_map(|plan| &plan.steps);
        let coming = steps.map(|step| step.received as u64).sum();
        Offer { coming, parts: if gathers { parts as u64 } else { 0 } }
    }
}

impl Gather {
    /// What all ranks decide, given what each has said: `None` unless all can, and unless it is
    /// worth it.
    pub(crate) fn decide(problem: &Problem, plans: usize, offers: &[Offer]) -> Option<Gather> {
        let grid = &problem.grid;
        let AttentionProblem { num_heads_q, num_heads_kv, head_dims, .. } = problem.local;
        let world = grid.shard.world();
        let rows = grid.most_rows();
        let parts = offers.iter().map(|offer| offer.parts).min().unwrap_or(0) as usize;
        let coming = offers.iter().map(|offer| offer.coming as f64).sum();
        let moved = (plans * rows * world) as f64 * (world as f64 - 1.0);
        let (heads_kv, heads_q) = (num_heads_kv, num_heads_q);
        let gather = Gather { world, parts, rows, heads_kv, heads_q, head_dim: head_dims.qk };
        // No other rank names more parts than this one.
        (parts > 0 && is_worth_gathering(coming, moved)).then_some(gather)
    }

    /// Heads of keys of a part, but for the last one, which may have fewer.
    fn heads(&self) -> usize {
        self.heads_kv.div_ceil(self.parts)
    }

    fn heads_of(&self, part: usize) -> Range<usize> {
        (part * self.heads()).min(self.heads_kv)..((part + 1) * self.heads()).min(self.heads_kv)
    }

    fn shape(&self) -> [usize; 4] {
        [self.parts * self.world, 2 * self.rows, self.heads(), self.head_dim]
    }

    /// Bytes of each rank in the window.
    pub(crate) fn bytes(&self, element: usize) -> usize {
        self.shape().iter().product::<usize>() / self.world * element
    }

    /// How one call visits the keys of all other ranks, where it can.
    fn together<'a>(&self, plan: &'a Plan) -> Option<&'a Together> {
        plan.together.as_ref().filter(|together| together.mask(0, self.parts).is_some())
    }

    /// Where the parts of outputs are.
    pub(crate) fn slots<'a>(&self, plan: &'a Plan) -> &'a Slots {
        self.together(plan).map_or(&plan.queries, |together| &together.slots)
    }

    /// Attention of the queries of this rank to the keys of all ranks; each call writes its part of
    /// the outputs. Inputs are ready in the order of both streams, outputs in that of `stream`.
    pub(crate) fn attend(
        &self,
        comm: &dyn Communicator,
        attention: &Attention<'_>,
        plan: &Plan,
        [q, k, v]: [View<'_>; 3],
        outputs: [&mut Tensor; 2],
        stream: &Stream,
    ) -> Result<()> {
        let mut outputs = outputs;
        let mut window = comm.window(k.dtype(), &self.shape())?;
        // Its first use on a stream waits for what the other one has queued, which is nothing yet.
        window.share_with(stream)?;
        self.place([k, v], &mut window, comm, stream)?;
        let together = self.together(plan);
        let mut steps = plan.steps.iter().enumerate();
        // Queued first, since queuing an all-gather takes a while, and it needs no SM.
        if let Some((t, step)) = steps.next() {
            comm.mark(Mark::Begin(t), stream)?;
            for call in &step.calls {
                let slot = together.map_or(call.slot, |_| 0);
                let place = place(&mut outputs, slot, &call.part.queries, &(0..self.heads_q))?;
                let attention = call.of(attention, [q, k, v])?;
                call.forward(&attention, call.block_mask.as_ref(), place, stream)?;
            }
            comm.mark(Mark::End(t), stream)?;
        }
        let come = self.gather(&mut window, comm)?;
        for (part, come) in come.iter().enumerate() {
            stream.wait(come)?;
            let heads = self.heads_of(part);
            let queries = heads.start * self.shared()..heads.end * self.shared();
            let q = q.slice(2, queries.clone())?;
            if let Some(together) = together {
                comm.mark(Mark::Begin(1), stream)?;
                let [k, v] = self.all_rows(&window, part)?;
                let block_mask = together.mask(part, self.parts);
                // The own keys have counted the sink and applied the mask.
                let scores = Scores { mask: Mask::Full, ..attention.scores.without_tensors() };
                let attention = Attention { q, k, v, block_mask, scores, ..*attention };
                let (o, lse) = place(&mut outputs, 1, &(0..q.shape()[1]), &queries)?;
                attention.forward_into(o, Some(lse), stream)?;
                comm.mark(Mark::End(1), stream)?;
                continue;
            }
            for (t, step) in steps.clone() {
                let at = part * self.world + step.from;
                let slot = window.view().slice(0, at..at + 1)?.slice(2, 0..heads.len())?;
                comm.mark(Mark::Begin(t), stream)?;
                for call in &step.calls {
                    let [k, v] = [0, self.rows].map(|first| rows(slot, first, call, stream));
                    let (k, v) = (k?, v?);
                    let attention = call.of_rows(attention, q, [k.view(), v.view()])?;
                    let place = place(&mut outputs, call.slot, &call.part.queries, &queries)?;
                    call.forward(&attention, call.mask_of(part, self.parts), place, stream)?;
                }
                comm.mark(Mark::End(t), stream)?;
            }
        }
        Ok(())
    }

    /// The rows of all slots of a part as keys and, from those of the first values on, as values.
    fn all_rows<'a>(&self, window: &'a Tensor, part: usize) -> Result<[View<'a>; 2]> {
        let slots = window.view().slice(0, part * self.world..(part + 1) * self.world)?;
        let rows = slots.slice(2, 0..self.heads_of(part).len())?.flatten(0..2)?.insert(0)?;
        let count = rows.shape()[1] - self.rows;
        Ok([rows.slice(1, 0..count)?, rows.slice(1, self.rows..self.rows + count)?])
    }

    /// Copies the keys and values of this rank to its slots, beside the attention to them if that
    /// keeps most SMs.
    fn place(
        &self,
        kv: [View<'_>; 2],
        window: &mut Tensor,
        comm: &dyn Communicator,
        stream: &Stream,
    ) -> Result<()> {
        // What the call before this one has read may be overwritten. Other ranks write into this
        // window only when the communicator's stream has reached the same all-gather here.
        comm.stream().wait_for(stream)?;
        let (mut copies, mut rest, mut passed) = (Vec::new(), window.view_mut(), 0);
        for part in 0..self.parts {
            let at = part * self.world + comm.rank();
            let (slots, after) = rest.split(at + 1 - passed)?;
            let slot = slots.slice(0, at - passed..at + 1 - passed)?.flatten(0..2)?;
            (rest, passed) = (after, at + 1);
            let (keys, values) = slot.split(self.rows)?;
            for (x, place) in kv.into_iter().zip([keys, values]) {
                let x = x.slice(2, self.heads_of(part))?.flatten(0..2)?;
                let place = place.slice(0, 0..x.shape()[0])?.slice(1, 0..x.shape()[1])?;
                copies.push((place, x));
            }
        }
        if copy_beside(copies, comm.stream())? {
            return comm.head_start(stream);
        }
        // Attention leaves no SM to copies that come later.
        Ok(stream.wait_for(comm.stream())?)
    }

    /// Queues the all-gathers, and gives an event behind each.
    fn gather(&self, window: &mut Tensor, comm: &dyn Communicator) -> Result<Vec<Event>> {
        let gather = |part: usize| {
            let slots = part * self.world..(part + 1) * self.world;
            comm.all_gather(window.view_mut().slice(0, slots)?)?;
            let event = Event::new(comm.stream().device(), false)?;
            event.record(comm.stream())?;
            Ok(event)
        };
        (0..self.parts).map(gather).collect()
    }

    /// Heads of queries that share one of keys.
    fn shared(&self) -> usize {
        self.heads_q / self.heads_kv
    }
}

/// Where a call writes its part of the output and of the log-sum-exp.
fn place<'a>(
    [o, lse]: &'a mut [&mut Tensor; 2],
    slot: usize,
    rows: &Range<usize>,
    heads: &Range<usize>,
) -> Result<(ViewMut<'a>, ViewMut<'a>)> {
    let o = o.view_mut().slice(0, slot..slot + 1)?.slice(1, rows.clone())?;
    let lse = lse.view_mut().slice(0, slot..slot + 1)?.slice(2, rows.clone())?;
    Ok((o.slice(2, heads.clone())?, lse.slice(1, heads.clone())?))
}

/// The keys of a call, or their values, in a slot.
fn rows<'a>(slot: View<'a>, first: usize, call: &Call, stream: &Stream) -> Result<Packed<'a>> {
    let range = |rows: &Range<usize>| first + rows.start..first + rows.end;
    let ranges: Vec<_> = call.keys.iter().map(range).collect();
    pack(slot, &ranges, stream)
}
