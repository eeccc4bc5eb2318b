//! Attention of the queries of a group to the keys of all groups.
//!
//! In step `t`, group `g` attends the keys of group `g - t`, which come from the rank that holds
//! them. (In a ring they would be handed on from neighbour to neighbour: the same bytes over the
//! same links of a switch, but each step would wait for the one before.)

use crate::grid::Grid;
use crate::heads::exchange;
use crate::{Communicator, Result};
use blockflash_ops::{
    Align, Attention, AttentionMerge, AttentionOutput, DType, Event, Mask, Stream, Tensor, View,
    ViewMut,
};
use std::ops::Range;

/// Steps whose keys are received ahead. With three, an exchange is ready to start while the step
/// before the previous one is computed, so its CTAs find free SMs when that one ends.
const SLOTS: usize = 3;

/// The part of attention that one group has of another one.
pub(crate) struct Part {
    /// The group whose keys are attended.
    pub(crate) source: usize,
    /// The queries that attend any of them.
    pub(crate) queries: Range<usize>,
    /// The keys that any query attends.
    pub(crate) keys: Range<usize>,
    pub(crate) mask: Mask,
}

/// The steps of one rank, in the order in which they are computed.
pub(crate) struct Ring<'a> {
    pub(crate) comm: &'a dyn Communicator,
    pub(crate) grid: &'a Grid,
    pub(crate) attention: &'a Attention<'a>,
}

impl Ring<'_> {
    pub(crate) fn groups(&self) -> usize {
        self.grid.scheme.keys
    }

    pub(crate) fn is_causal(&self) -> bool {
        !matches!(self.attention.mask, Mask::Full)
    }

    /// What a group has of the keys of another one, or of its own.
    ///
    /// Under a causal mask, of the chunks `a` and `b` of the source: the first chunk of a later
    /// group and its second chunk come after `a` and before `b`, and both chunks of the source lie
    /// between the two of an earlier group.
    pub(crate) fn part(&self, group: usize, source: usize) -> Result<Part> {
        let (queries, keys) = (self.grid.rows_of(group)?, self.grid.rows_of(source)?);
        let (all, every) = (0..queries.rows(), 0..keys.rows());
        if self.groups() == 1 {
            return Ok(Part { source, queries: all, keys: every, mask: self.attention.mask });
        }
        let (queries, keys, mask) = match group.cmp(&source) {
            _ if !self.is_causal() => (all, every, Mask::Full),
            std::cmp::Ordering::Equal => (all, every, Mask::Causal { align: Align::TopLeft }),
            std::cmp::Ordering::Greater => (all, 0..keys.first(), Mask::Full),
            std::cmp::Ordering::Less => (queries.first()..queries.rows(), every, Mask::Full),
        };
        Ok(Part { source, queries, keys, mask })
    }

    /// The part of step `t`.
    pub(crate) fn step(&self, t: usize) -> Result<Part> {
        let (own, groups) = (self.grid.group(), self.groups());
        self.part(own, (own + groups - t) % groups)
    }

    /// The group that needs the keys of this one in step `t`, and which of them.
    pub(crate) fn sent(&self, t: usize) -> Result<(usize, Range<usize>)> {
        let (own, groups) = (self.grid.group(), self.groups());
        let to = (own + t) % groups;
        Ok((to, self.part(to, own)?.keys))
    }

    /// The queries in ranges of equal parts: from where to where, and by how many of the first
    /// groups their keys are held.
    pub(crate) fn ranges(&self) -> Result<Vec<(Range<usize>, usize)>> {
        let (own, rows) = (self.grid.group(), self.grid.rows_of(self.grid.group())?);
        Ok(match self.is_causal() {
            false => vec![(0..rows.rows(), self.groups())],
            true => vec![(0..rows.first(), own + 1), (rows.first()..rows.rows(), self.groups())],
        })
    }
}

/// Keys and values on their way to this rank.
pub(crate) struct Incoming<'a> {
    own: [View<'a>; 2],
    slots: Vec<Slot>,
}

struct Slot {
    /// As many rows as the longest part has.
    tensors: [Tensor; 2],
    /// Behind their arrival, and behind their last use.
    arrived: Event,
    used: Event,
}

impl<'a> Incoming<'a> {
    /// Takes memory, and starts the first exchanges.
    pub(crate) fn start(ring: &Ring<'_>, own: [View<'a>; 2], stream: &Stream) -> Result<Self> {
        let steps = ring.groups() - 1;
        let mut this = Incoming { own, slots: Vec::new() };
        for _ in 0..steps.min(SLOTS) {
            let event = || Event::new(stream.device(), false);
            let (tensors, arrived, used) = (this.like(ring, stream)?, event()?, event()?);
            this.slots.push(Slot { tensors, arrived, used });
        }
        (1..=steps.min(SLOTS - 1)).try_for_each(|t| this.queue(ring, t))?;
        Ok(this)
    }

    /// Memory for keys and values, or their gradients, of any step. It is taken before anything is
    /// exchanged: its first use on a stream waits for what the other one has queued.
    pub(crate) fn like(&self, ring: &Ring<'_>, stream: &Stream) -> Result<[Tensor; 2]> {
        let mut shape = self.own[0].shape().to_vec();
        for t in 1..ring.groups() {
            shape[1] = shape[1].max(ring.step(t)?.keys.len());
        }
        let tensor = || Tensor::empty(ring.comm.stream(), self.own[0].dtype(), &shape);
        let tensors = [tensor()?, tensor()?];
        tensors.iter().try_for_each(|tensor| tensor.share_with(stream))?;
        Ok(tensors)
    }

    /// Queues the exchange of step `t`.
    fn queue(&mut self, ring: &Ring<'_>, t: usize) -> Result<()> {
        let (to, sent) = ring.sent(t)?;
        let part = ring.step(t)?;
        let at = (t - 1) % self.slots.len();
        let slot = &mut self.slots[at];
        ring.comm.stream().wait(&slot.used)?;
        let to = ring.grid.in_ring(to);
        let from = ring.grid.in_ring(part.source);
        let sends = self.own.iter().map(|own| Ok((to, own.slice(1, sent.clone())?)));
        let sends = sends.collect::<Result<Vec<_>>>()?;
        let receives = slot.tensors.iter_mut();
        let receives =
            receives.map(|tensor| Ok((from, tensor.view_mut().slice(1, 0..part.keys.len())?)));
        exchange(ring.comm, sends, receives.collect::<Result<Vec<_>>>()?)?;
        slot.arrived.record(ring.comm.stream())?;
        Ok(())
    }

    /// The keys and values of step `t`, for work on the stream. Later exchanges are queued before
    /// that work, so that they start first.
    pub(crate) fn get(
        &mut self,
        ring: &Ring<'_>,
        t: usize,
        part: &Part,
        stream: &Stream,
    ) -> Result<[View<'_>; 2]> {
        let ahead = t + SLOTS - 1;
        if t > 0 && ahead < ring.groups() {
            self.queue(ring, ahead)?;
        }
        if t == 0 {
            return Ok(self.own);
        }
        let slot = &self.slots[(t - 1) % self.slots.len()];
        stream.wait(&slot.arrived)?;
        let [k, v] = &slot.tensors;
        let rows = 0..part.keys.len();
        Ok([k.view().slice(1, rows.clone())?, v.view().slice(1, rows)?])
    }

    /// Says that the work that uses step `t` is queued.
    pub(crate) fn done(&self, t: usize, stream: &Stream) -> Result<()> {
        if t > 0 {
            self.slots[(t - 1) % self.slots.len()].used.record(stream)?;
        }
        Ok(())
    }
}

/// Attention of the group's queries, of the heads of this rank, to all keys. Inputs are ready in
/// the order of both streams, outputs in the order of `stream`.
pub(crate) fn forward(
    comm: &dyn Communicator,
    grid: &Grid,
    attention: &Attention<'_>,
    [q, k, v]: [View<'_>; 3],
    stream: &Stream,
) -> Result<AttentionOutput> {
    let ring = Ring { comm, grid, attention };
    if ring.groups() == 1 {
        return Ok(Attention { q, k, v, ..*attention }.forward(stream)?);
    }
    let mut o = Tensor::empty(stream, q.dtype(), q.shape())?;
    let mut lse = Tensor::empty(stream, DType::F32, &[q.shape()[0], q.shape()[2], q.shape()[1]])?;
    for entry in (0..q.shape()[0]).map(|entry| entry..entry + 1) {
        let [q, k, v] = [q, k, v].map(|x| x.slice(0, entry.clone()));
        let o = o.view_mut().slice(0, entry.clone())?;
        let lse = lse.view_mut().slice(0, entry)?;
        forward_entry(&ring, [q?, k?, v?], o, lse, stream)?;
    }
    Ok(AttentionOutput { o, lse })
}

/// The same for one entry of the batch.
fn forward_entry(
    ring: &Ring<'_>,
    [q, k, v]: [View<'_>; 3],
    o: ViewMut<'_>,
    lse: ViewMut<'_>,
    stream: &Stream,
) -> Result<()> {
    let (groups, rows, heads) = (ring.groups(), q.shape()[1], q.shape()[2]);
    let mut incoming = Incoming::start(ring, [k, v], stream)?;
    let mut o_parts = Tensor::empty(stream, q.dtype(), &[groups, rows, heads, q.shape()[3]])?;
    let mut lse_parts = Tensor::empty(stream, DType::F32, &[groups, heads, rows])?;
    for t in 0..groups {
        let part = ring.step(t)?;
        let [k, v] = incoming.get(ring, t, &part, stream)?;
        let at = part.source..part.source + 1;
        let o = o_parts.view_mut().slice(0, at.clone())?.slice(1, part.queries.clone())?;
        let lse = lse_parts.view_mut().slice(0, at)?.slice(2, part.queries.clone())?;
        let q = q.slice(1, part.queries)?;
        Attention { q, k, v, mask: part.mask, ..*ring.attention }.forward_into(
            o,
            Some(lse),
            stream,
        )?;
        incoming.done(t, stream)?;
    }
    let (mut o, mut lse) = (o.flatten(0..2)?, lse.flatten(0..2)?);
    for (rows, count) in ring.ranges()? {
        let parts = o_parts.view().slice(0, 0..count)?.slice(1, rows.clone())?;
        let logs = lse_parts.view().slice(0, 0..count)?.slice(2, rows.clone())?;
        let (o, lse) = (o.reborrow().slice(0, rows.clone())?, lse.reborrow().slice(1, rows)?);
        AttentionMerge::new(parts, logs).merge_into(o, Some(lse), stream)?;
    }
    Ok(())
}
