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

    /// The heads of this rank of all rows of its group. In the order of the communicator's stream.
    pub(crate) fn gather(self, comm: &dyn Communicator, grid: &Grid) -> Result<Tensor> {
        let Gathering { sends, mut all, axes } = self;
        let (_, theirs) = pieces(grid);
        let mut shape = all.shape().to_vec();
        let mut parts = Vec::new();
        for piece in &theirs {
            shape[axes.rows] = piece.own.len();
            parts.push(Tensor::empty(comm.stream(), all.dtype(), &shape)?);
        }
        let sends = sends.iter().map(|(to, copy)| (*to, copy.view())).collect();
        let receives = theirs.iter().zip(&mut parts);
        let receives = receives.map(|(piece, part)| (grid.in_group(piece.member), part.view_mut()));
        exchange(comm, sends, receives.collect())?;
        for (piece, part) in theirs.iter().zip(&parts) {
            let rows = all.view_mut().slice(axes.rows, piece.common.clone());
            rows?.copy_from(&part.view(), comm.stream())?;
        }
        Ok(all)
    }
}

/// The reverse: from `all`, the heads `turn` of this rank of all rows of its group, to those heads
/// of each rank of the rows of this one, in `x`.
pub(crate) fn scatter(
    comm: &dyn Communicator,
    grid: &Grid,
    all: View<'_>,
    axes: Axes,
    turn: &Range<usize>,
    mut x: ViewMut<'_>,
) -> Result<()> {
    let of_member = x.shape()[axes.heads] / grid.scheme.heads;
    let (own, theirs) = pieces(grid);
    let chunk = |piece: &Piece| all.slice(axes.rows, piece.common.clone());
    let mut sends = Vec::new();
    for piece in &theirs {
        sends.push((grid.in_group(piece.member), chunk(piece)?));
    }
    let mut shape = all.shape().to_vec();
    let mut parts = Vec::new();
    for member in others(grid) {
        for piece in &own {
            shape[axes.rows] = piece.own.len();
            let part = Tensor::empty(comm.stream(), all.dtype(), &shape)?;
            parts.push((member, piece, part));
        }
    }
    let receives = parts.iter_mut();
    let receives = receives.map(|(member, _, part)| (grid.in_group(*member), part.view_mut()));
    exchange(comm, sends, receives.collect())?;
    let mut place = |member: usize, piece: &Piece, chunk: View<'_>| -> Result<()> {
        let rows = x.reborrow().slice(axes.rows, piece.own.clone())?;
        let mut rows = rows.slice(axes.heads, of(turn, member * of_member))?;
        Ok(rows.copy_from(&chunk, comm.stream())?)
    };
    own.iter().try_for_each(|piece| place(grid.member(), piece, chunk(piece)?))?;
    parts.iter().try_for_each(|(member, piece, part)| place(*member, piece, part.view()))
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
