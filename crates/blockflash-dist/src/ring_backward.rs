//! Gradients of attention of the queries of a group to the keys of all groups.
//!
//! As in the forward pass, keys and values come to the queries. What a group adds to the gradients
//! of keys goes straight back to the group that holds them, which adds all parts in the order of
//! the groups, in f32, when it has them all.

use crate::grid::Grid;
use crate::heads::exchange;
use crate::ring::{Incoming, Ring};
use crate::{Communicator, Result};
use blockflash_ops::{
    Attention, AttentionBackward, AttentionGradients, AttentionGradientsMut, AttentionMerge, DType,
    Event, Stream, Tensor, View, ViewMut,
};

/// Gradients of keys that are on their way while the next ones are computed.
const SLOTS: usize = 2;

struct Slot {
    tensors: [Tensor; 2],
    sent: Event,
}

/// What the forward pass had and gave, of the heads of this rank and the rows of its group.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    pub(crate) qkv: [View<'a>; 3],
    pub(crate) o: View<'a>,
    pub(crate) lse: View<'a>,
    pub(crate) d_o: View<'a>,
}

/// The gradients. Inputs are ready in the order of both streams, outputs in the order of `stream`.
pub(crate) fn backward(
    comm: &dyn Communicator,
    grid: &Grid,
    attention: &Attention<'_>,
    operands: Operands<'_>,
    stream: &Stream,
) -> Result<AttentionGradients> {
    let ring = Ring { comm, grid, attention };
    let Operands { qkv: [q, k, v], o, lse, d_o } = operands;
    if ring.groups() == 1 {
        let attention = Attention { q, k, v, ..*attention };
        return Ok(AttentionBackward { attention, o, lse, d_o }.backward(stream)?);
    }
    let like = |x: View<'_>| Tensor::empty(stream, x.dtype(), x.shape());
    let (dq, dk, dv) = (like(q)?, like(k)?, like(v)?);
    let mut gradients = AttentionGradients { dq, dk, dv, d_sink: None };
    for entry in (0..q.shape()[0]).map(|entry| entry..entry + 1) {
        let [q, k, v] = [q, k, v].map(|x| x.slice(0, entry.clone()));
        let [o, lse, d_o] = [o, lse, d_o].map(|x| x.slice(0, entry.clone()));
        let operands = Operands { qkv: [q?, k?, v?], o: o?, lse: lse?, d_o: d_o? };
        let AttentionGradientsMut { dq, dk, dv, .. } = gradients.view_mut();
        let [dq, dk, dv] = [dq, dk, dv].map(|x| x.slice(0, entry.clone()));
        backward_entry(&ring, operands, [dq?, dk?, dv?], stream)?;
    }
    Ok(gradients)
}

/// The same for one entry of the batch.
fn backward_entry(
    ring: &Ring<'_>,
    operands: Operands<'_>,
    gradients: [ViewMut<'_>; 3],
    stream: &Stream,
) -> Result<()> {
    let Ring { comm, grid, attention } = *ring;
    let (groups, own) = (ring.groups(), grid.group());
    let Operands { qkv: [q, k, v], o, lse, d_o } = operands;
    let parts = |x: View<'_>| {
        let shape: Vec<usize> = [&[groups], &x.shape()[1..]].concat();
        Tensor::empty(stream, x.dtype(), &shape)
    };
    let (mut dq_parts, mut dkv_parts) = (parts(q)?, [parts(k)?, parts(v)?]);
    dkv_parts.iter().try_for_each(|parts| parts.share_with(comm.stream()))?;
    let mut incoming = Incoming::start(ring, [k, v], stream)?;
    let mut slots = Vec::new();
    for _ in 0..SLOTS.min(groups - 1) {
        let tensors = incoming.like(ring, stream)?;
        slots.push(Slot { tensors, sent: Event::new(stream.device(), false)? });
    }
    for t in 0..groups {
        let part = ring.step(t)?;
        let [k, v] = incoming.get(ring, t, &part, stream)?;
        let rows = || part.queries.clone();
        let (q, o, d_o) = (q.slice(1, rows())?, o.slice(1, rows())?, d_o.slice(1, rows())?);
        let attention = Attention { q, k, v, mask: part.mask, ..*attention };
        let call = AttentionBackward { attention, o, lse: lse.slice(2, rows())?, d_o };
        let dq = part_of(&mut dq_parts, part.source)?.slice(1, rows())?;
        let mut workspace = match call.workspace_bytes(stream.device())? {
            0 => None,
            bytes => Some(Tensor::empty(stream, DType::U8, &[bytes])?),
        };
        let workspace = workspace.as_mut().map(Tensor::view_mut);
        let [dk_parts, dv_parts] = &mut dkv_parts;
        if t == 0 {
            let dk = part_of(dk_parts, own)?;
            let dv = part_of(dv_parts, own)?;
            let gradients = AttentionGradientsMut { dq, dk, dv, d_sink: None };
            call.backward_into(gradients, workspace, stream)?;
            continue;
        }
        let at = (t - 1) % slots.len();
        let slot = &mut slots[at];
        stream.wait(&slot.sent)?;
        let keys = 0..part.keys.len();
        let [dk, dv] = &mut slot.tensors;
        let gradients = AttentionGradientsMut {
            dq,
            dk: dk.view_mut().slice(1, keys.clone())?,
            dv: dv.view_mut().slice(1, keys.clone())?,
            d_sink: None,
        };
        call.backward_into(gradients, workspace, stream)?;
        incoming.done(t, stream)?;
        comm.stream().wait_for(stream)?;
        let to = grid.in_ring(part.source);
        let (from, mine) = ring.sent(t)?;
        let sent = |x| -> Result<_> { Ok((to, Tensor::view(x).slice(1, keys.clone())?)) };
        let sends = slot.tensors.iter().map(sent).collect::<Result<Vec<_>>>()?;
        let mut receives = Vec::with_capacity(2);
        for parts in [dk_parts, dv_parts] {
            let part = part_of(parts, from)?.slice(1, mine.clone())?;
            receives.push((grid.in_ring(from), part));
        }
        exchange(comm, sends, receives)?;
        slot.sent.record(comm.stream())?;
    }
    stream.wait_for(comm.stream())?;
    let rows = grid.rows_of(own)?;
    // The second chunk of keys is seen by the groups before, and by this one.
    let keys = match ring.is_causal() {
        false => vec![(0..rows.rows(), groups)],
        true => vec![(0..rows.first(), groups), (rows.first()..rows.rows(), own + 1)],
    };
    let (queries, [dk_parts, dv_parts]) = (ring.ranges()?, dkv_parts);
    let sums = [(dq_parts, &queries), (dk_parts, &keys), (dv_parts, &keys)];
    for ((parts, ranges), total) in sums.into_iter().zip(gradients) {
        let mut total = total.flatten(0..2)?;
        for (rows, count) in ranges {
            let parts = parts.view().slice(0, 0..*count)?.slice(1, rows.clone())?;
            let total = total.reborrow().slice(0, rows.clone())?;
            AttentionMerge::sum(parts).merge_into(total, None, stream)?;
        }
    }
    Ok(())
}

/// The part of one group, of `[groups, rows, heads, head_dim]`.
fn part_of(parts: &mut Tensor, group: usize) -> Result<ViewMut<'_>> {
    Ok(parts.view_mut().slice(0, group..group + 1)?)
}
