//! The plans of attention over several ranks, for `blockflash.distributed`: who has which rows, and
//! what is computed and exchanged, which torch does.

use crate::error::{Failure, Kind, Result};
use crate::mask::Handle;
use crate::window::token_mask;
use blockflash_dist::{
    BlockMaskExchange, DensePlan, DistributedBlockMask, Error, PlanCall, PlanStep, Scheme, Shard,
};
use blockflash_ops::{Device, Mask, Stream};
use pyo3::prelude::*;
use std::ops::Range;

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let kind = match error {
            Error::Ops(error) => return error.into(),
            Error::Unsupported { .. } => Kind::Unsupported,
            _ => Kind::Value,
        };
        Failure { kind, text: error.to_string() }
    }
}

/// The rows of a rank, by `(seqlen, world, rank)` and the queries and keys of the blocks between
/// which the sequence is cut.
type Place = ([usize; 3], [usize; 2]);

fn shard(([seqlen, world, rank], [block_q, block_kv]): Place) -> Result<Shard> {
    Ok(Shard::new(seqlen, world, rank)?.in_blocks(block_q, block_kv)?)
}

/// The lists of a rank, from a mask of the whole sequence; both on the CPU.
#[pyfunction]
pub(crate) fn shard_block_mask(whole: &Bound<'_, Handle>, place: Place) -> PyResult<Handle> {
    let lists = || Handle::host(Ok(shard(place)?.block_mask(whole.get().mask())?));
    Ok(lists()?)
}

/// Rows `start..stop`.
type Rows = (usize, usize);

/// A call as its queries, keys, the sides of its token mask, which starts at the top left, whether
/// its queries stand at its keys, the output that it fills, where its sequences begin and end if
/// they are several, and its block mask.
type Call = (Rows, Rows, i64, i64, bool, usize, Vec<i32>, Option<Handle>);

/// A step as the rank whose keys are visited, how many of them come, the rank that visits keys of
/// this one, those keys, and the calls.
type Step = (usize, usize, usize, Vec<Rows>, Vec<Call>);

/// A number for the lists of all ranks, their density in pairs and keys, and the steps of each
/// batch entry.
type Finished = (u64, (f64, f64), Vec<Vec<Step>>);

/// The rows of a rank, by `(seqlen, world, rank)`, where the sequence is cut at multiples of
/// `block` rows.
fn cut([seqlen, world, rank]: [usize; 3], block: usize) -> Result<Shard> {
    Ok(Shard::new(seqlen, world, rank)?.cut_at(block)?)
}

/// Both chunks of a rank.
#[pyfunction]
pub(crate) fn shard_ranges(
    seqlen: usize,
    world: usize,
    rank: usize,
    block: usize,
) -> PyResult<[Rows; 2]> {
    Ok(cut([seqlen, world, rank], block)?.ranges().each_ref().map(rows))
}

/// Where both chunks of each rank of its group are in the rows of the group.
#[pyfunction]
pub(crate) fn group_pieces(
    place: [usize; 3],
    block: usize,
    scheme: [usize; 2],
) -> PyResult<Vec<[Rows; 2]>> {
    let [heads, keys] = scheme;
    let pieces = cut(place, block).and_then(|shard| Ok(Scheme { heads, keys }.pieces(shard)?))?;
    Ok(pieces.iter().map(|pair| pair.each_ref().map(rows)).collect())
}

/// The steps of a rank without a block mask; `window` has the sides of the token mask.
#[pyfunction]
pub(crate) fn plan_steps(
    place: [usize; 3],
    block: usize,
    scheme: [usize; 2],
    window: [i64; 2],
    cu_seqlens: Option<Vec<i32>>,
) -> PyResult<Vec<Step>> {
    let ([heads, keys], [left, right]) = (scheme, window);
    let steps = || -> Result<_> {
        let (mask, shard) = (token_mask(left, right, true)?, cut(place, block)?);
        let plan = DensePlan::new(shard, Scheme { heads, keys }, mask, cu_seqlens.as_deref())?;
        let stream = Device::cpu().stream()?;
        plan.steps().iter().map(|each| step(each, &stream)).collect()
    };
    Ok(steps()?)
}

/// See [`BlockMaskExchange`].
#[pyclass(frozen, name = "BlockMaskExchange", module = "blockflash._native")]
pub(crate) struct Exchange(BlockMaskExchange);

#[pymethods]
impl Exchange {
    /// Checks the lists of a rank, which are on the CPU; `window` has the sides of the token mask.
    #[new]
    fn new(
        lists: &Bound<'_, Handle>,
        window: [i64; 2],
        place: Place,
        scheme: [usize; 2],
    ) -> PyResult<Self> {
        let [left, right] = window;
        let [heads, keys] = scheme;
        let new = || -> Result<Self> {
            let (mask, shard) = (token_mask(left, right, true)?, shard(place)?);
            let lists = lists.get().mask();
            Ok(Self(BlockMaskExchange::new(lists, mask, shard, Scheme { heads, keys })?))
        };
        Ok(new()?)
    }

    /// What each rank has to get.
    fn messages(&self) -> Vec<Vec<i32>> {
        self.0.messages()
    }

    /// The plan by what came from each rank.
    fn finish(&self, py: Python<'_>, messages: Vec<Vec<i32>>) -> PyResult<Finished> {
        let finish = || -> Result<_> {
            let stream = Device::cpu().stream()?;
            let mask: DistributedBlockMask = self.0.finish(&messages, &stream)?;
            let entries = mask.steps();
            let steps =
                entries.iter().map(|steps| steps.iter().map(|s| step(s, &stream)).collect());
            let density = (mask.density().pairs, mask.density().keys);
            Ok((mask.id(), density, steps.collect::<Result<_>>()?))
        };
        Ok(py.detach(finish)?)
    }
}

fn step(step: &PlanStep<'_>, stream: &Stream) -> Result<Step> {
    let calls = step.calls.iter().map(|each| call(each, stream)).collect::<Result<_>>()?;
    Ok((step.from, step.received, step.to, step.sent.iter().map(rows).collect(), calls))
}

fn call(call: &PlanCall<'_>, stream: &Stream) -> Result<Call> {
    let (left, right) = match call.mask {
        Mask::Full => (None, None),
        Mask::Causal { .. } => (None, Some(0)),
        Mask::Window { left, right, .. } => (left, right),
        other => return Err(Failure::value(format!("{other:?} is no window"))),
    };
    let [left, right] = [left, right].map(|side| side.map_or(-1, |keys| keys as i64));
    let mask = call.block_mask.map(|mask| Handle::host(mask.to(stream))).transpose()?;
    let offsets = call.cu_seqlens.unwrap_or_default().to_vec();
    let (queries, keys) = (rows(&call.queries), rows(&call.keys));
    Ok((queries, keys, left, right, call.own, call.slot, offsets, mask))
}

fn rows(range: &Range<usize>) -> Rows {
    (range.start, range.end)
}
