//! Attention of the queries of a group to the keys of all groups.

use crate::exchange::{exchange, pack};
use crate::plan::{Call, Plan, Step};
use crate::{Communicator, Mark, Result};
use blockflash_ops::{
    Attention, AttentionMerge, AttentionOutput, DType, Event, Stream, Tensor, View, ViewMut,
};

/// Steps whose keys are received ahead. With three, an exchange is ready to start while the step
/// before the previous one is computed, so its CTAs find free SMs when that one ends.
pub(crate) const SLOTS: usize = 3;

/// The calls of one rank.
#[derive(Clone, Copy)]
pub(crate) struct Ring<'a> {
    pub(crate) comm: &'a dyn Communicator,
    /// For each entry of the batch, or one for all.
    pub(crate) plans: &'a [Plan],
    /// With the sink of the heads of this rank.
    pub(crate) attention: &'a Attention<'a>,
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
pub(crate) struct Incoming<'a> {
    comm: &'a dyn Communicator,
    plan: &'a Plan,
    own: [View<'a>; 2],
    slots: Vec<Slot>,
}

struct Slot {
    /// As many rows as any step needs.
    tensors: [Tensor; 2],
    /// Behind their arrival, and behind their last use.
    arrived: Event,
    used: Event,
}

impl<'a> Incoming<'a> {
    /// Takes memory, and starts the first exchanges.
    pub(crate) fn start(
        comm: &'a dyn Communicator,
        plan: &'a Plan,
        own: [View<'a>; 2],
        stream: &Stream,
    ) -> Result<Self> {
        let ahead = 1..plan.steps.len().min(SLOTS);
        let receiving = plan.steps.iter().filter(|step| step.received > 0).count();
        let rows = plan.steps.iter().map(|step| step.received).max().unwrap_or(0);
        let mut this = Incoming { comm, plan, own, slots: Vec::new() };
        for _ in 0..receiving.min(SLOTS) {
            let event = || Event::new(stream.device(), false);
            let (tensors, arrived, used) = (this.like(rows, stream)?, event()?, event()?);
            this.slots.push(Slot { tensors, arrived, used });
        }
        ahead.into_iter().try_for_each(|t| this.queue(t, stream))?;
        Ok(this)
    }

    /// Memory for so many rows of keys and values, or of their gradients. It is taken before
    /// anything is exchanged: its first use on a stream waits for what the other one has queued.
    pub(crate) fn like(&self, rows: usize, stream: &Stream) -> Result<[Tensor; 2]> {
        let mut shape = self.own[0].shape().to_vec();
        shape[1] = rows;
        let tensor = || Tensor::empty(self.comm.stream(), self.own[0].dtype(), &shape);
        let tensors = [tensor()?, tensor()?];
        tensors.iter().try_for_each(|tensor| tensor.share_with(stream))?;
        Ok(tensors)
    }

    /// Queues the exchange of step `t`, before work on `stream`.
    fn queue(&mut self, t: usize, stream: &Stream) -> Result<()> {
        let Step { from, received, turn, to, sent, .. } = &self.plan.steps[t];
        let comm = self.comm.stream();
        let [k, v] = self.own;
        let packed = [pack(k, sent, comm)?, pack(v, sent, comm)?];
        if t == 1 {
            // Attention of the first step takes all SMs. It may start when the exchange does, not
            // while that still waits for what came before both.
            stream.wait_for(comm)?;
        }
        let sends = packed.iter().map(|rows| (*to, rows.view())).collect();
        if *received == 0 {
            return exchange(self.comm, sends, Vec::new());
        }
        let at = turn % self.slots.len();
        let slot = &mut self.slots[at];
        comm.wait(&slot.used)?;
        let receives = slot.tensors.iter_mut();
        let receives = receives.map(|x| Ok((*from, x.view_mut().slice(1, 0..*received)?)));
        exchange(self.comm, sends, receives.collect::<Result<Vec<_>>>()?)?;
        slot.arrived.record(comm)?;
        Ok(())
    }

    /// The slot of step `t`, if keys come for it.
    fn slot(&self, t: usize) -> Option<&Slot> {
        let step = &self.plan.steps[t];
        (step.received > 0).then(|| &self.slots[step.turn % self.slots.len()])
    }

    /// The keys and values of step `t`, for work on the stream. Later exchanges are queued before
    /// that work, so that they start first.
    pub(crate) fn get(&mut self, t: usize, stream: &Stream) -> Result<[View<'_>; 2]> {
        let ahead = t + SLOTS - 1;
        if t > 0 && ahead < self.plan.steps.len() {
            self.queue(ahead, stream)?;
        }
        let Some(slot) = self.slot(t) else { return Ok(self.own) };
        stream.wait(&slot.arrived)?;
        Ok([slot.tensors[0].view(), slot.tensors[1].view()])
    }

    /// Says that the work that uses step `t` is queued.
    pub(crate) fn done(&self, t: usize, stream: &Stream) -> Result<()> {
        if let Some(slot) = self.slot(t) {
            slot.used.record(stream)?;
        }
        Ok(())
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
            call.forward(&attention, (o.view_mut(), lse.view_mut()), stream)?;
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
    let (slots, rows, heads) = (plan.queries.count, q.shape()[1], q.shape()[2]);
    plan.share_with(stream)?;
    let mut incoming = Incoming::start(ring.comm, plan, [k, v], stream)?;
    let mut o_parts = Tensor::empty(stream, q.dtype(), &[slots, rows, heads, q.shape()[3]])?;
    let mut lse_parts = Tensor::empty(stream, DType::F32, &[slots, heads, rows])?;
    for (t, step) in plan.steps.iter().enumerate() {
        let [k, v] = incoming.get(t, stream)?;
        ring.comm.mark(Mark::Begin(t), stream)?;
        for call in &step.calls {
            let (at, rows) = (call.slot..call.slot + 1, || call.part.queries.clone());
            let o = o_parts.view_mut().slice(0, at.clone())?.slice(1, rows())?;
            let lse = lse_parts.view_mut().slice(0, at)?.slice(2, rows())?;
            call.forward(&call.of(ring.attention, [q, k, v])?, (o, lse), stream)?;
        }
        ring.comm.mark(Mark::End(t), stream)?;
        incoming.done(t, stream)?;
    }
    let (mut o, mut lse) = (o.flatten(0..2)?, lse.flatten(0..2)?);
    for (rows, slots) in &plan.queries.ranges {
        let parts = o_parts.view().slice(0, slots.clone())?.slice(1, rows.clone())?;
        let logs = lse_parts.view().slice(0, slots.clone())?.slice(2, rows.clone())?;
        let o = o.reborrow().slice(0, rows.clone())?;
        let lse = lse.reborrow().slice(1, rows.clone())?;
        AttentionMerge::new(parts, logs).merge_into(o, Some(lse), stream)?;
    }
    Ok(())
}
