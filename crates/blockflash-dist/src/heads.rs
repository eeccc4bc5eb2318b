//! Exchange of rows for heads among the ranks of a group.

use crate::exchange::exchange;
use crate::grid::{Grid, Piece};
use crate::turns::Operand;
use crate::{Communicator, Result};
use blockflash_ops::{Stream, Tensor, View, ViewMut};
use std::ops::Range;

/// Which dimensions are rows and heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Axes {
    rows: usize,
    heads: usize,
}

/// `[batch, rows, heads, head_dim]`.
pub(crate) const ROWS: Axes = Axes { rows: 1, heads: 2 };
/// `[batch, heads, rows]`.
pub(crate) const LOGS: Axes = Axes { rows: 2, heads: 1 };

/// Heads on their way to the ranks that compute them.
pub(crate) struct Gathering {
    /// For each rank of the group.
    sends: Vec<(usize, Tensor)>,
    /// The heads of this rank, so far of its own rows.
    all: Tensor,
    axes: Axes,
}

impl Gathering {
    /// Copies what the ranks of the group need of an operand: `turn` are heads, counted from the first one of each rank. Everything that a call gathers is copied
    /// before its first exchange: a copy behind one would find no free SM beside attention.
    pub(crate) fn pack(
        comm: &dyn Communicator,
        grid: &Grid,
        &Operand { x, axes, .. }: &Operand<'_>,
        turn: &Range<usize>,
        stream: &Stream,
    ) -> Result<Gathering> {
        let (own, _) = pieces(grid);
        let of_member = x.shape()[axes.heads] / grid.scheme.heads;
        let chunk = |piece: &Piece, member: usize| -> Result<View<'_>> {
            let rows = x.slice(axes.rows, piece.own.clone())?;
            Ok(rows.slice(axes.heads, of(turn, member * of_member))?)
        };
        let mut sends = Vec::new();
        for member in others(grid) {
            for piece in &own {
                let copy = chunk(piece, member)?.to_tensor(comm.stream())?;
                sends.push((grid.in_group(member), copy));
            }
        }
        let mut shape = x.shape().to_vec();
        shape[axes.heads] = turn.len();
        shape[axes.rows] = grid.rows_of(grid.group()).rows();
        let mut all = Tensor::empty(comm.stream(), x.dtype(), &shape)?;
        all.share_with(stream)?;
        for piece in &own {
            let mut rows = all.view_mut().slice(axes.rows, piece.common.clone())?;
            rows.copy_from(&chunk(piece, grid.member())?, comm.stream())?;
        }
        Ok(Gathering { sends, all, axes })
    }
}

/// The heads of this rank of all rows of its group, of several tensors by one exchange. In the
/// order of the communicator's stream.
pub(crate) fn gather(
    comm: &dyn Communicator,
    grid: &Grid,
    mut gatherings: Vec<Gathering>,
) -> Result<Vec<Tensor>> {
    let (_, theirs) = pieces(grid);
    let mut parts = Vec::new();
    for Gathering { all, axes, .. } in &gatherings {
        let mut shape = all.shape().to_vec();
        for piece in &theirs {
            shape[axes.rows] = piece.own.len();
            let part = Tensor::empty(comm.stream(), all.dtype(), &shape)?;
            parts.push((piece, part));
        }
    }
    let sends = gatherings.iter().flat_map(|gathering| &gathering.sends);
    let sends = sends.map(|(to, copy)| (*to, copy.view())).collect();
    let receives = parts.iter_mut();
    let receives = receives.map(|(piece, part)| (grid.in_group(piece.member), part.view_mut()));
    exchange(comm, sends, receives.collect())?;
    for (Gathering { all, axes, .. }, parts) in
        gatherings.iter_mut().zip(parts.chunks(theirs.len().max(1)))
    {
        for (piece, part) in parts {
            let rows = all.view_mut().slice(axes.rows, piece.common.clone());
            rows?.copy_from(&part.view(), comm.stream())?;
        }
    }
    Ok(gatherings.into_iter().map(|gathering| gathering.all).collect())
}

/// Results of a turn on their way to the ranks whose rows they are.
pub(crate) struct Scattering<'a> {
    /// The heads of the turn, computed by this rank, of all rows of its group.
    pub(crate) all: View<'a>,
    pub(crate) axes: Axes,
    pub(crate) turn: &'a Range<usize>,
    /// All heads of the rows of this rank.
    pub(crate) x: ViewMut<'a>,
}

/// The reverse, by one exchange.
pub(crate) fn scatter(
    comm: &dyn Communicator,
    grid: &Grid,
    scatterings: &mut [Scattering<'_>],
) -> Result<()> {
    let (own, theirs) = pieces(grid);
    let (mut sends, mut parts) = (Vec::new(), Vec::new());
    for Scattering { all, axes, .. } in scatterings.iter() {
        for piece in &theirs {
            let chunk = all.slice(axes.rows, piece.common.clone())?;
            sends.push((grid.in_group(piece.member), chunk));
        }
        let mut shape = all.shape().to_vec();
        for (member, piece) in others(grid).flat_map(|member| own.iter().map(move |p| (member, p)))
        {
            shape[axes.rows] = piece.own.len();
            let part = Tensor::empty(comm.stream(), all.dtype(), &shape)?;
            parts.push((member, piece, part));
        }
    }
    let receives = parts.iter_mut();
    let receives = receives.map(|(member, _, part)| (grid.in_group(*member), part.view_mut()));
    exchange(comm, sends, receives.collect())?;
    let of_each = parts.len() / scatterings.len().max(1);
    for (Scattering { all, axes, turn, x }, parts) in
        scatterings.iter_mut().zip(parts.chunks(of_each.max(1)))
    {
        let of_member = x.shape()[axes.heads] / grid.scheme.heads;
        let mut place = |member: usize, piece: &Piece, chunk: View<'_>| -> Result<()> {
            let rows = x.reborrow().slice(axes.rows, piece.own.clone())?;
            let mut rows = rows.slice(axes.heads, of(turn, member * of_member))?;
            Ok(rows.copy_from(&chunk, comm.stream())?)
        };
        for piece in &own {
            place(grid.member(), piece, all.slice(axes.rows, piece.common.clone())?)?;
        }
        parts.iter().try_for_each(|(member, piece, part)| place(*member, piece, part.view()))?;
    }
    Ok(())
}

/// The heads of a turn of a rank whose first head is `first`.
pub(crate) fn of(turn: &Range<usize>, first: usize) -> Range<usize> {
    first + turn.start..first + turn.end
}

/// The chunks of this rank, and those of the other ranks of its group.
fn pieces(grid: &Grid) -> (Vec<Piece>, Vec<Piece>) {
    grid.pieces().into_iter().partition(|piece| piece.member == grid.member())
}

/// The other places in the group of this rank.
fn others(grid: &Grid) -> impl Iterator<Item = usize> + use<> {
    let own = grid.member();
    (0..grid.scheme.heads).filter(move |&member| member != own)
}
