//! What one rank computes, sends and receives, in which order, as plain data.

use crate::Result;
use crate::band::Part;
use crate::grid::Grid;
use crate::pattern::Pattern;
use blockflash_ops::{BlockMask, CuSeqlens, Stream, Tensor};
use std::ops::Range;

/// Heads of keys are gathered in this many parts, if there are as many. Attention begins with the
/// first part while the next one comes; the first one comes while a rank attends its own keys.
pub(crate) const PARTS: usize = 2;

/// The steps of a rank. In step `t`, group `g` attends the keys of group `g - t`, which come from
/// the rank that holds them. (In a ring they would be handed on from neighbour to neighbour: the
/// same bytes over the same links of a switch, but each step would wait for the one before.) A step
/// that a rank has no use for is empty, but it is there if any rank has: all ranks exchange in the
/// order of the steps.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The first one attends the keys of this group.
    pub(crate) steps: Vec<Step>,
    /// Where the parts of outputs are, and of gradients of queries.
    pub(crate) queries: Slots,
    /// Where the parts of gradients of keys are.
    pub(crate) keys: Slots,
    /// Where keys are gathered, one call in place of those of all steps but the first one.
    pub(crate) together: Option<Together>,
}

/// One step.
#[derive(Debug)]
pub(crate) struct Step {
    /// The rank whose keys are attended, and how many of its rows come: those that any call needs.
    pub(crate) from: usize,
    pub(crate) received: usize,
    /// How many steps before this one had rows that came.
    pub(crate) turn: usize,
    pub(crate) calls: Vec<Call>,
    /// The rank that attends the keys of this one, and the rows that it needs.
    pub(crate) to: usize,
    pub(crate) sent: Vec<Range<usize>>,
    /// The gradients that come back, of each of its calls.
    pub(crate) returned: Vec<Returned>,
}

/// A call of attention.
#[derive(Debug)]
pub(crate) struct Call {
    /// Its keys are rows of those that came.
    pub(crate) part: Part,
    pub(crate) block_mask: Option<BlockMask>,
    /// The same of parts of the heads, if those are gathered one after another.
    pub(crate) part_masks: Vec<BlockMask>,
    /// Its keys as rows of the group that has them.
    pub(crate) keys: Vec<Range<usize>>,
    /// The sequences of the part on the device, if it has several.
    pub(crate) packed: Option<Packed>,
    /// Where the output is.
    pub(crate) slot: usize,
}

/// The sequences of a call.
#[derive(Debug)]
pub(crate) struct Packed {
    cu_seqlens: Tensor,
    longest: usize,
}

/// Gradients of keys.
#[derive(Debug)]
pub(crate) struct Returned {
    pub(crate) rows: Vec<Range<usize>>,
    pub(crate) slot: usize,
}

/// What a call attends: rows of the keys of a group.
#[derive(Debug)]
pub(crate) struct Visit {
    pub(crate) part: Part,
    pub(crate) keys: Vec<Range<usize>>,
    /// Its columns are blocks of those keys.
    pub(crate) block_mask: Option<BlockMask>,
    /// The same of parts of the heads.
    pub(crate) part_masks: Vec<BlockMask>,
}

/// Parts of results that are merged. A part has one slot in all its rows.
#[derive(Debug)]
pub(crate) struct Slots {
    pub(crate) count: usize,
    /// Rows with the same parts, and the slots of those.
    pub(crate) ranges: Vec<(Range<usize>, Range<usize>)>,
}

/// Under a block mask one call visits the keys of all other ranks, as they are in the slots of a
/// part, and writes one output in place of one for each rank.
#[derive(Debug)]
pub(crate) struct Together {
    /// Of each part of the heads, or one for all. Columns are blocks of the rows of all slots,
    /// those of values among them, which no list visits.
    pub(crate) masks: Vec<BlockMask>,
    /// The output of the own keys, then that of the others.
    pub(crate) slots: Slots,
}

impl Together {
    pub(crate) fn mask(&self, part: usize, parts: usize) -> Option<&BlockMask> {
        match &self.masks[..] {
            [one] => Some(one),
            masks if masks.len() == parts => masks.get(part),
            _ => None,
        }
    }
}

/// Whether at least half of the rows that are gathered would come by steps, too. Under a window, or
/// where few blocks are visited, most of them are of no use.
pub(crate) fn is_worth_gathering(coming: f64, gathered: f64) -> bool {
    gathered > 0.0 && 2.0 * coming >= gathered
}

impl Plan {
    /// A plan without block masks.
    pub(crate) fn dense(grid: &Grid, pattern: &Pattern<'_>) -> Result<Plan> {
        let own = grid.rows_of(grid.group());
        let visit = |part: Part| {
            let (keys, part_masks) = (vec![part.keys.clone()], Vec::new());
            Visit { keys, part, block_mask: None, part_masks }
        };
        let visits = |group| pattern.parts(&own, &grid.rows_of(group)).into_iter().map(visit);
        let keys = |part: Part| vec![part.keys];
        let returned = |group| pattern.parts(&grid.rows_of(group), &own).into_iter().map(keys);
        // Between empty steps nothing would hide an exchange.
        let groups = grid.scheme.keys;
        let has_parts = |group: usize, t: usize| {
            let source = grid.rows_of((group + groups - t) % groups);
            !pattern.parts(&grid.rows_of(group), &source).is_empty()
        };
        let is_used = |&t: &usize| t == 0 || (0..groups).any(|group| has_parts(group, t));
        let turns: Vec<_> = (0..groups).filter(is_used).collect();
        let visits = |group| Ok(visits(group).collect());
        Plan::new(grid, &turns, visits, |group| returned(group).collect())
    }

    /// `turns`: the steps that are made, 0 first. `visits`: the calls of this group to the keys of
    /// another one or its own. `returned`: rows of the keys of this group that each call of another
    /// one attends.
    pub(crate) fn new(
        grid: &Grid,
        turns: &[usize],
        visits: impl Fn(usize) -> Result<Vec<Visit>>,
        returned: impl Fn(usize) -> Vec<Vec<Range<usize>>>,
    ) -> Result<Plan> {
        let (own, groups) = (grid.group(), grid.scheme.keys);
        let mut steps = Vec::with_capacity(turns.len());
        let (mut queries, mut keys, mut turn) = (Vec::new(), Vec::new(), 0);
        for (t, by) in turns.iter().enumerate() {
            let [source, target] = [(own + groups - by) % groups, (own + by) % groups];
            let visits = visits(source)?;
            let back = match t {
                0 => visits.iter().map(|visit| visit.keys.clone()).collect(),
                _ => returned(target),
            };
            let coming = union(visits.iter().flat_map(|visit| visit.keys.clone()).collect());
            let mut calls = Vec::with_capacity(visits.len());
            for Visit { mut part, keys, block_mask, part_masks } in visits {
                let position = grid.rows_of(source).position(part.keys.start);
                queries.push((position, [t, calls.len()], part.queries.clone()));
                if t > 0 {
                    let start = count_before(&coming, hull(&keys).start);
                    part.keys = start..start + count(&keys);
                }
                calls.push(Call { part, block_mask, part_masks, keys, packed: None, slot: 0 });
            }
            keys.extend(back.iter().enumerate().map(|(at, rows)| (target, [t, at], hull(rows))));
            let [from, to] = [source, target].map(|group| grid.in_ring(group));
            let (received, sent) = match t {
                0 => (0, Vec::new()),
                _ => (count(&coming), union(back.concat())),
            };
            let returned = back.into_iter().map(|rows| Returned { rows, slot: 0 }).collect();
            steps.push(Step { from, received, turn, calls, to, sent, returned });
            turn += usize::from(received > 0);
        }
        let rows = grid.rows_of(own).rows();
        // In the order of the keys: the slots of a query are neighbours then.
        let queries = Slots::assign(rows, queries, |[t, at], slot| steps[t].calls[at].slot = slot);
        // In the order of the groups.
        let keys = Slots::assign(rows, keys, |[t, at], slot| steps[t].returned[at].slot = slot);
        Ok(Plan { steps, queries, keys, together: None })
    }

    /// Copies where the sequences of calls begin and end to the device of a stream.
    pub(crate) fn upload(&mut self, stream: &Stream) -> Result<()> {
        for call in self.steps.iter_mut().flat_map(|step| &mut step.calls) {
            let packed = |offsets: &Vec<i32>| Packed::new(offsets, stream);
            call.packed = call.part.cu_seqlens.as_ref().map(packed).transpose()?;
        }
        Ok(())
    }

    /// Readies what was uploaded for a stream. It is done before anything is exchanged: its first
    /// use on a stream waits for what the other one has queued.
    pub(crate) fn share_with(&self, stream: &Stream) -> Result<()> {
        let calls = self.steps.iter().flat_map(|step| &step.calls);
        let mut packed = calls.filter_map(|call| call.packed.as_ref());
        Ok(packed.try_for_each(|packed| packed.cu_seqlens.share_with(stream))?)
    }

    /// Rows of keys that this rank sends, and rows of which it sends gradients.
    pub(crate) fn rows_sent(&self) -> [usize; 2] {
        let steps = || self.steps.iter().skip(1);
        [steps().map(|step| count(&step.sent)).sum(), steps().map(Step::attended).sum()]
    }
}

impl Packed {
    fn new(offsets: &[i32], stream: &Stream) -> Result<Packed> {
        let lengths = offsets.windows(2).map(|pair| (pair[1] - pair[0]) as usize);
        let longest = lengths.max().unwrap_or(0);
        Ok(Packed { cu_seqlens: Tensor::from_slice(stream, offsets, &[offsets.len()])?, longest })
    }

    /// Queries and keys are the same rows.
    pub(crate) fn cu_seqlens(&self) -> CuSeqlens<'_> {
        let (offsets, longest) = (self.cu_seqlens.view(), self.longest);
        CuSeqlens { q: offsets, kv: offsets, max_seqlen_q: longest, max_seqlen_kv: longest }
    }
}

impl Step {
    /// Rows of keys of which gradients go back; one that several calls attend counts for each.
    pub(crate) fn attended(&self) -> usize {
        self.calls.iter().map(|call| call.part.keys.len()).sum()
    }
}

impl Slots {
    /// Gives the parts, in a given order, the first slot behind those before them that share rows.
    fn assign(
        rows: usize,
        mut parts: Vec<(usize, [usize; 2], Range<usize>)>,
        mut place: impl FnMut([usize; 2], usize),
    ) -> Slots {
        parts.sort_by_key(|(order, ..)| *order);
        let mut placed: Vec<(Range<usize>, usize)> = Vec::with_capacity(parts.len());
        for (_, at, part) in parts {
            let shares = |(other, _): &&(Range<usize>, usize)| {
                other.start < part.end && part.start < other.end
            };
            let slot = placed.iter().filter(shares).map(|(_, slot)| slot + 1).max().unwrap_or(0);
            place(at, slot);
            placed.push((part, slot));
        }
        let mut cuts: Vec<_> = placed.iter().flat_map(|(part, _)| [part.start, part.end]).collect();
        cuts.extend([0, rows]);
        cuts.sort_unstable();
        cuts.dedup();
        let mut ranges: Vec<(Range<usize>, Range<usize>)> = Vec::new();
        for cut in cuts.windows(2) {
            let here = placed.iter().filter(|(part, _)| part.contains(&cut[0]));
            let slots = hull(&here.map(|(_, slot)| *slot..slot + 1).collect::<Vec<_>>());
            match ranges.last_mut() {
                Some((rows, last)) if *last == slots => rows.end = cut[1],
                _ => ranges.push((cut[0]..cut[1], slots)),
            }
        }
        let count = placed.iter().map(|(_, slot)| slot + 1).max().unwrap_or(0);
        Slots { count, ranges }
    }
}

/// From the first to the last.
fn hull(ranges: &[Range<usize>]) -> Range<usize> {
    let start = ranges.iter().map(|range| range.start).min().unwrap_or(0);
    start..ranges.iter().map(|range| range.end).max().unwrap_or(start)
}

fn count(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(|range| range.len()).sum()
}

/// How many rows of the ranges are before a row.
fn count_before(ranges: &[Range<usize>], row: usize) -> usize {
    ranges.iter().map(|range| range.end.min(row).saturating_sub(range.start)).sum()
}

/// The same rows in ascending order, each once, in as few ranges as possible.
pub(crate) fn union(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.sort_by_key(|range| range.start);
    let mut all: Vec<Range<usize>> = Vec::new();
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        match all.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => all.push(range),
        }
    }
    all
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
