//! Gradients of attention of the queries of a group to the keys of all groups.
//!
//! As in the forward pass, keys and values come to the queries. What a group adds to the gradients
//! of keys goes straight back to the group that holds them, beside the next keys; that one adds all
//! parts in the order of the groups, in f32, when it has them all.

use crate::exchange::Messages;
use crate::plan::{Call, Plan, Returned, Slots, Step};
use crate::ring::{Incoming, Ring};
use crate::{Mark, Result, sink};
use blockflash_ops::{
    Attention, AttentionBackward, AttentionGradients, AttentionGradientsMut, AttentionMerge,
    Stream, Tensor, View, ViewMut,
};
use std::mem;

/// What the forward pass had and gave, of the heads of this rank and the rows of its group.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    pub(crate) qkv: [View<'a>; 3],
    pub(crate) o: View<'a>,
    pub(crate) lse: View<'a>,
    pub(crate) d_o: View<'a>,
}

/// The gradients; that of the sink is of the queries of this group. Inputs are ready in the order
/// of both streams, outputs in the order of `stream`.
pub(crate) fn backward(
    ring: Ring<'_>,
    operands: Operands<'_>,
    stream: &Stream,
) -> Result<AttentionGradients> {
    let Operands { qkv: [q, k, v], o, lse, d_o } = operands;
    let like = |x: View<'_>| Tensor::empty(stream, x.dtype(), x.shape());
    let (dq, dk, dv) = (like(q)?, like(k)?, like(v)?);
    let mut gradients = AttentionGradients::new(dq, dk, dv);
    let mut d_sinks = Vec::new();
    let alone = ring.alone();
    if let Some(only) = alone {
        ring.comm.mark(Mark::Begin(0), stream)?;
        if let Some(call) = only {
            let attention = Attention { q, k, v, ..*ring.attention };
            let operands = AttentionBackward { attention, o, lse, d_o };
            let AttentionGradientsMut { dq, dk, dv, .. } = gradients.view_mut();
            d_sinks.extend(call.backward(operands, [dq, dk, dv], stream)?);
        }
        ring.comm.mark(Mark::End(0), stream)?;
    }
    let entries = if alone.is_some() { 0 } else { q.shape()[0] };
    for (at, plan) in (0..entries).zip(ring.plans.iter().cycle()) {
        let entry = at..at + 1;
        let [q, k, v] = [q, k, v].map(|x| x.slice(0, entry.clone()));
        let [o, lse, d_o] = [o, lse, d_o].map(|x| x.slice(0, entry.clone()));
        let operands = Operands { qkv: [q?, k?, v?], o: o?, lse: lse?, d_o: d_o? };
        let AttentionGradientsMut { dq, dk, dv, .. } = gradients.view_mut();
        let [dq, dk, dv] = [dq, dk, dv].map(|x| x.slice(0, entry.clone()));
        let mut entry = Entry { ring, plan, operands, d_sinks: &mut d_sinks };
        entry.backward([dq?, dk?, dv?], stream)?;
    }
    if ring.attention.scores.sink.is_some() {
        gradients.d_sink = Some(sink::sum(&d_sinks, q.shape()[2], stream)?);
    }
    Ok(gradients)
}

/// One entry of the batch.
struct Entry<'a> {
    ring: Ring<'a>,
    plan: &'a Plan,
    operands: Operands<'a>,
    /// Gradients of the sink, of each call that counts it.
    d_sinks: &'a mut Vec<Tensor>,
}

impl Entry<'_> {
    fn backward(&mut self, gradients: [ViewMut<'_>; 3], stream: &Stream) -> Result<()> {
        let (plan, comm) = (self.plan, self.ring.comm);
        let [q, k, v] = self.operands.qkv;
        // A slot between others may have no part of a row of keys: that adds nothing.
        let parts = |x: View<'_>, slots: &Slots| {
            Tensor::zeros(stream, x.dtype(), &[&[slots.count], &x.shape()[1..]].concat())
        };
        let mut dq_parts = parts(q, &plan.queries)?;
        let mut dkv_parts = [parts(k, &plan.keys)?, parts(v, &plan.keys)?];
        plan.share_with(stream)?;
        let mut incoming = Incoming::new(comm, plan, [k, v], stream)?;
        // Of the step that is computed, and of the one before it, which leave meanwhile.
        let rows = plan.steps.iter().skip(1).map(Step::attended).max().unwrap_or(0);
        let mut gradients_of = [incoming.like(rows, stream)?, incoming.like(rows, stream)?];
        let mut coming: Option<Coming<'_>> = None;
        for t in 0..=plan.steps.len() {
            let [current, last] = &mut gradients_of;
            let left = t.checked_sub(1).filter(|&left| left > 0);
            let come = left.map(|left| Coming::new(&plan.steps[left], &incoming, stream));
            let mut come = come.transpose()?;
            let messages = come.as_mut().map(|come| come.messages(last)).transpose()?;
            let kv = incoming.begin(t, messages.unwrap_or_default(), stream)?;
            if let Some(come) = mem::replace(&mut coming, come) {
                come.place(&mut dkv_parts, stream)?;
            }
            let Some(step) = plan.steps.get(t) else { break };
            comm.mark(Mark::Begin(t), stream)?;
            let mut end = 0;
            for (at, call) in step.calls.iter().enumerate() {
                let rows = end..end + call.part.keys.len();
                end = rows.end;
                let dkv = match t {
                    0 => place(&mut dkv_parts, step.returned[at].slot, call.part.keys.clone())?,
                    _ => place(current, 0, rows)?,
                };
                self.call(call, kv, &mut dq_parts, dkv, stream)?;
            }
            comm.mark(Mark::End(t), stream)?;
            gradients_of.swap(0, 1);
        }
        stream.wait_for(comm.stream())?;
        if let Some(come) = coming {
            come.place(&mut dkv_parts, stream)?;
        }
        let [dk_parts, dv_parts] = dkv_parts;
        let sums = [(dq_parts, &plan.queries), (dk_parts, &plan.keys), (dv_parts, &plan.keys)];
        for ((parts, slots), total) in sums.into_iter().zip(gradients) {
            let mut total = total.flatten(0..2)?;
            for (rows, slots) in &slots.ranges {
                let parts = parts.view().slice(0, slots.clone())?.slice(1, rows.clone())?;
                let total = total.reborrow().slice(0, rows.clone())?;
                AttentionMerge::sum(parts).merge_into(total, None, stream)?;
            }
        }
        Ok(())
    }

    /// One call on the keys of its step.
    fn call(
        &mut self,
        call: &Call,
        [k, v]: [View<'_>; 2],
        dq_parts: &mut Tensor,
        [dk, dv]: [ViewMut<'_>; 2],
        stream: &Stream,
    ) -> Result<()> {
        let Operands { qkv: [q, ..], o, lse, d_o } = self.operands;
        let attention = call.of(self.ring.attention, [q, k, v])?;
        let rows = || call.part.queries.clone();
        let (o, lse, d_o) = (o.slice(1, rows())?, lse.slice(2, rows())?, d_o.slice(1, rows())?);
        let operands = AttentionBackward { attention, o, lse, d_o };
        let dq = dq_parts.view_mut().slice(0, call.slot..call.slot + 1)?.slice(1, rows())?;
        self.d_sinks.extend(call.backward(operands, [dq, dk, dv], stream)?);
        Ok(())
    }
}

/// Gradients of keys of this rank on their way from the one that attended those in a step.
struct Coming<'a> {
    step: &'a Step,
    tensors: [Tensor; 2],
}

impl<'a> Coming<'a> {
    fn new(step: &'a Step, incoming: &Incoming<'_>, stream: &Stream) -> Result<Self> {
        let rows = |back: &Returned| back.rows.iter().map(|rows| rows.len()).sum::<usize>();
        let tensors = incoming.like(step.returned.iter().map(rows).sum(), stream)?;
        Ok(Coming { step, tensors })
    }

    /// Both directions of the exchange, with the gradients that this rank has computed.
    fn messages<'b>(&'b mut self, gradients: &'b [Tensor; 2]) -> Result<Messages<'b>> {
        let Step { from, to, .. } = self.step;
        let attended = 0..self.step.attended();
        let sends = gradients.iter().map(|x| Ok((*from, x.view().slice(1, attended.clone())?)));
        let receives = self.tensors.iter_mut().map(|x| (*to, x.view_mut()));
        Ok(Messages { sends: sends.collect::<Result<_>>()?, receives: receives.collect() })
    }

    /// Copies what has come to its places.
    fn place(self, parts: &mut [Tensor; 2], stream: &Stream) -> Result<()> {
        for (part, come) in parts.iter_mut().zip(&self.tensors) {
            let mut end = 0;
            for back in &self.step.returned {
                for rows in &back.rows {
                    let source = come.view().slice(1, end..end + rows.len())?;
                    let slot = part.view_mut().slice(0, back.slot..back.slot + 1)?;
                    slot.slice(1, rows.clone())?.copy_from(&source, stream)?;
                    end += rows.len();
                }
            }
        }
        Ok(())
    }
}

/// Rows of a slot of the gradients of keys and values.
fn place(
    parts: &mut [Tensor; 2],
    slot: usize,
    rows: std::ops::Range<usize>,
) -> Result<[ViewMut<'_>; 2]> {
    let [dk, dv] = parts;
    let slot = slot..slot + 1;
    let (dk, dv) = (dk.view_mut().slice(0, slot.clone())?, dv.view_mut().slice(0, slot)?);
    Ok([dk.slice(1, rows.clone())?, dv.slice(1, rows)?])
}
