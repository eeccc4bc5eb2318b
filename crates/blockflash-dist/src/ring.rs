//! Attention of the queries of a group to the keys of all groups.

use crate::exchange::{Messages, exchange, pack};
use crate::gathered::Gather;
use crate::plan::{Call, Plan, Step};
use crate::{Communicator, Mark, Result};
use blockflash_ops::{
    Attention, AttentionMerge, AttentionOutput, DType, Stream, Tensor, View, ViewMut,
};

/// The calls of one rank.
#[derive(Clone, Copy)]
pub(crate) struct Ring<'a> {
    pub(crate) comm: &'a dyn Communicator,
    /// For each entry of the batch, or one for all.
    pub(crate) plans: &'a [Plan],
    /// With the sink of the heads of this rank.
    pub(crate) attention: &'a Attention<'a>,
    /// Whether the forward pass gathers keys.
    pub(crate) gather: Option<Gather>,
}

impl<'a> Ring<'a> {
    /// Where there is one group and one plan: its only call, which takes the whole batch; none
    /// without rows.
    pub(crate) fn alone(&self) -> Option<Option<&'a Call>> {
        let [Plan { steps, .. }] = self.plans else { return None };
        let [Step { calls, .. }] = &steps[..] else { return None };
        Some(calls.first())
    }
}

/// Keys and values on their way to this rank.
///
/// Those of a step come while the step before it is computed, and their exchange begins with that
/// step, on all ranks. Attention fills a GPU and leaves it at its end only: an exchange that begins
/// later waits for that end, and its CTAs on other GPUs wait with it, on SMs that attention needs.
pub(crate) struct Incoming<'a> {
    comm: &'a dyn Communicator,
    plan: &'a Plan,
    own: [View<'a>; 2],
    /// As many rows as any step needs, for two steps that receive some.
    slots: Vec<[Tensor; 2]>,
}

impl<'a> Incoming<'a> {
    /// Takes memory.
    pub(crate) fn new(
        comm: &'a dyn Communicator,
        plan: &'a Plan,
        own: [View<'a>; 2],
        stream: &Stream,
    ) -> Result<Self> {
        let receiving = plan.steps.iter().filter(|step| step.received > 0).count();
        let rows = plan.steps.iter().map(|step| step.received).max().unwrap_or(0);
        let mut this = Incoming { comm, plan, own, slots: Vec::new() };
        for _ in 0..receiving.min(2) {
            this.slots.push(this.like(rows, stream)?);
        }
        Ok(this)
    }

    /// Memory for this many rows of keys and values, or of their gradients. It is shared before
    /// anything is exchanged: its first use on a stream waits for what the other one has queued.
    pub(crate) fn like(&self, rows: usize, stream: &Stream) -> Result<[Tensor; 2]> {
        let mut shape = self.own[0].shape().to_vec();
        shape[1] = rows;
        let tensor = || Tensor::empty(self.comm.stream(), self.own[0].dtype(), &shape);
        let tensors = [tensor()?, tensor()?];
        tensors.iter().try_for_each(|tensor| tensor.share_with(stream))?;
        Ok(tensors)
    }

    /// The keys and values of step `t`, for work on the stream; those of the next step begin to
    /// come, and `others` travel with them, ready in the order of the stream. Behind the last step
    /// only those travel.
    pub(crate) fn begin(
        &mut self,
        t: usize,
        others: Messages<'_>,
        stream: &Stream,
    ) -> Result<[View<'_>; 2]> {
        let comm = self.comm.stream();
        // The last step is computed, so its keys may be overwritten; those of this one are there.
        comm.wait_for(stream)?;
        let next = self.plan.steps.get(t + 1);
        let sent = next.map_or(&[][..], |next| &next.sent);
        let packed = [pack(self.own[0], sent, comm)?, pack(self.own[1], sent, comm)?];
        stream.wait_for(comm)?;
        let mut messages = Messages::default();
        if let Some(Step { from, received, turn, to, .. }) = next {
            messages.sends.extend(packed.iter().map(|rows| (*to, rows.view())));
            let slots = self.slots.len();
            if *received > 0 {
                for tensor in &mut self.slots[turn % slots] {
                    messages.receives.push((*from, tensor.view_mut().slice(1, 0..*received)?));
                }
            }
        }
        messages.sends.extend(others.sends);
        messages.receives.extend(others.receives);
        if exchange(self.comm, messages)? {
            self.comm.head_start(stream)?;
        }
        Ok(match self.plan.steps.get(t) {
            Some(Step { received: 1.., turn, .. }) => {
                self.slots[turn % self.slots.len()].each_ref().map(Tensor::view)
            }
            _ => self.own,
        })
    }
}

/// Attention of the group's queries, of the heads of this rank, to all keys. Inputs are ready in
/// the order of both streams, outputs in the order of `stream`.
pub(crate) fn forward(
    ring: Ring<'_>,
    [q, k, v]: [View<'_>; 3],
    stream: &Stream,
) -> Result<AttentionOutput> {
    let mut o = Tensor::empty(stream, q.dtype(), q.shape())?;
    let mut lse = Tensor::empty(stream, DType::F32, &[q.shape()[0], q.shape()[2], q.shape()[1]])?;
    if let Some(only) = ring.alone() {
        ring.comm.mark(Mark::Begin(0), stream)?;
        if let Some(call) = only {
            let attention = Attention { q, k, v, ..*ring.attention };
            let mask = call.block_mask.as_ref();
            call.forward(&attention, mask, (o.view_mut(), lse.view_mut()), stream)?;
        }
        ring.comm.mark(Mark::End(0), stream)?;
        return Ok(AttentionOutput { o, lse });
    }
    for (at, plan) in (0..q.shape()[0]).zip(ring.plans.iter().cycle()) {
        let entry = at..at + 1;
        let [q, k, v] = [q, k, v].map(|x| x.slice(0, entry.clone()));
        let o = o.view_mut().slice(0, entry.clone())?;
        let lse = lse.view_mut().slice(0, entry)?;
        forward_entry(ring, plan, [q?, k?, v?], (o, lse), stream)?;
    }
    Ok(AttentionOutput { o, lse })
}

/// The same for one entry of the batch.
fn forward_entry(
    ring: Ring<'_>,
    plan: &Plan,
    [q, k, v]: [View<'_>; 3],
    (o, lse): (ViewMut<'_>, ViewMut<'_>),
    stream: &Stream,
) -> Result<()> {
    let slots = ring.gather.map_or(&plan.queries, |gather| gather.slots(plan));
    let (count, rows, heads) = (slots.count, q.shape()[1], q.shape()[2]);
    plan.share_with(stream)?;
    let mut o_parts = Tensor::empty(stream, q.dtype(), &[count, rows, heads, q.shape()[3]])?;
    let mut lse_parts = Tensor::empty(stream, DType::F32, &[count, heads, rows])?;
    let outputs = [&mut o_parts, &mut lse_parts];
    match ring.gather {
        Some(ref gather) => {
            gather.attend(ring.comm, ring.attention, plan, [q, k, v], outputs, stream)?;
        }
        None => attend(ring, plan, [q, k, v], outputs, stream)?,
    }
    let (mut o, mut lse) = (o.flatten(0..2)?, lse.flatten(0..2)?);
    for (rows, slots) in &slots.ranges {
        let parts = o_parts.view().slice(0, slots.clone())?.slice(1, rows.clone())?;
        let logs = lse_parts.view().slice(0, slots.clone())?.slice(2, rows.clone())?;
        let o = o.reborrow().slice(0, rows.clone())?;
        let lse = lse.reborrow().slice(1, rows.clone())?;
        AttentionMerge::new(parts, logs).merge_into(o, Some(lse), stream)?;
    }
    Ok(())
}

/// Attention to the keys of this rank and of those that come by steps; each call writes its part
/// of the outputs.
fn attend(
    ring: Ring<'_>,
    plan: &Plan,
    [q, k, v]: [View<'_>; 3],
    [o, lse]: [&mut Tensor; 2],
    stream: &Stream,
) -> Result<()> {
    let mut incoming = Incoming::new(ring.comm, plan, [k, v], stream)?;
    for (t, step) in plan.steps.iter().enumerate() {
        let [k, v] = incoming.begin(t, Messages::default(), stream)?;
        ring.comm.mark(Mark::Begin(t), stream)?;
        for call in &step.calls {
            let (at, rows) = (call.slot..call.slot + 1, || call.part.queries.clone());
            let o = o.view_mut().slice(0, at.clone())?.slice(1, rows())?;
            let lse = lse.view_mut().slice(0, at)?.slice(2, rows())?;
            let attention = call.of(ring.attention, [q, k, v])?;
            call.forward(&attention, call.block_mask.as_ref(), (o, lse), stream)?;
        }
        ring.comm.mark(Mark::End(t), stream)?;
    }
    Ok(())
}
