//! The heads of a rank in turns: what some of them need travels while others are computed.

use crate::heads::{Axes, Gathering, gather};
use crate::problem::Problem;
use crate::{Communicator, Result};
use blockflash_ops::{Event, Stream, Tensor, View};
use std::ops::Range;

/// Most turns. The first exchange and the last one are exposed, so each further turn gains less.
const MOST: usize = 4;
/// Fewest bytes of queries of a rank in a turn. An exchange of less takes hardly less time.
const FEWEST_BYTES: usize = if cfg!(test) { 1 } else { 1 << 22 };

/// Heads of q, and those of k that they share, counted from the first ones of a rank.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Turn {
    pub(crate) q: Range<usize>,
    pub(crate) k: Range<usize>,
}

/// How many turns there are for so many heads of k of a rank, and bytes of queries of its rows with
/// the heads of one rank.
pub(crate) fn count(heads_kv: usize, bytes: usize) -> usize {
    let fits = |turns: &usize| heads_kv.is_multiple_of(*turns) && bytes / turns >= FEWEST_BYTES;
    (2..=MOST).rev().find(fits).unwrap_or(1)
}

/// The turns of a call, the same on all ranks. A block mask is for all heads at once.
fn turns(problem: &Problem) -> Vec<Turn> {
    let (local, grid) = (&problem.local, &problem.grid);
    let [q, k] = [local.num_heads_q, local.num_heads_kv].map(|heads| heads / grid.scheme.heads);
    let rows = local.batch * grid.shard.seqlen() / grid.shard.world();
    let bytes = rows * q * local.head_dim * local.dtype.size();
    let count = if local.block_mask.is_some() { 1 } else { count(k, bytes) };
    let part = |heads: usize, turn: usize| turn * heads / count..(turn + 1) * heads / count;
    (0..count).map(|turn| Turn { q: part(q, turn), k: part(k, turn) }).collect()
}

/// A tensor with all heads of the rows of a rank.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    pub(crate) x: View<'a>,
    pub(crate) axes: Axes,
    /// Which heads of a turn it has.
    pub(crate) heads: fn(&Turn) -> &Range<usize>,
}

/// Gathers the heads of each turn of all rows of the group of this rank, queues `compute` on
/// `stream` for them, and `finish` on the communicator's stream.
///
/// Attention takes all SMs, so whatever should run beside it has to start first: the exchange for
/// the next turn is queued before `compute`, behind copies of everything that is sent, and the next
/// turn is computed when the exchange of `finish` may start.
pub(crate) fn in_turns<T>(
    comm: &dyn Communicator,
    problem: &Problem,
    operands: &[Operand<'_>],
    stream: &Stream,
    mut compute: impl FnMut(&Turn, &[Tensor]) -> Result<T>,
    mut finish: impl FnMut(&Turn, T) -> Result<()>,
) -> Result<()> {
    let grid = &problem.grid;
    let pack = |turn: Turn| -> Result<(Turn, Vec<Gathering>)> {
        let pack = |x: &Operand<'_>| Gathering::pack(comm, grid, x, (x.heads)(&turn), stream);
        let packed = operands.iter().map(pack).collect::<Result<Vec<_>>>()?;
        Ok((turn, packed))
    };
    let packed = turns(problem).into_iter().map(pack).collect::<Result<Vec<_>>>()?;
    let mut coming = packed.into_iter().map(|(turn, packed)| -> Result<_> {
        let tensors = gather(comm, grid, packed)?;
        let arrived = Event::new(comm.stream().device(), false)?;
        arrived.record(comm.stream())?;
        Ok((turn, tensors, arrived))
    });
    let mut next = coming.next();
    while let Some(turn) = next {
        let (turn, tensors, arrived) = turn?;
        next = coming.next();
        stream.wait(&arrived)?;
        let computed = compute(&turn, &tensors)?;
        comm.stream().wait_for(stream)?;
        if next.is_some() {
            stream.wait_for(comm.stream())?;
        }
        finish(&turn, computed)?;
    }
    Ok(stream.wait_for(comm.stream())?)
}

#[cfg(test)]
#[path = "turns_tests.rs"]
mod tests;
