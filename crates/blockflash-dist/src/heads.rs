//! Exchange of rows for heads among the ranks of a group.

use crate::exchange::{Messages, exchange};
use crate::grid::{Grid, Piece};
use crate::{Communicator, Result};
use blockflash_ops::{Tensor, View, ViewMut};

/// Which dimensions are rows and heads.
#[derive(Clone, Copy)]
pub(crate) struct Axes {
    rows: usize,
    heads: usize,
}

/// `[batch, rows, heads, head_dim]`.
pub(crate) const ROWS: Axes = Axes { rows: 1, heads: 2 };
/// `[batch, heads, rows]`.
pub(crate) const LOGS: Axes = Axes { rows: 2, heads: 1 };

/// A part of the rows of this rank, with the heads of a rank of its group.
fn chunk<'a>(
    grid: &Grid,
    (x, axes): &(View<'a>, Axes),
    piece: &Piece,
    member: usize,
) -> Result<View<'a>> {
    let heads = x.shape()[axes.heads] / grid.scheme.heads;
    let rows = x.slice(axes.rows, piece.own.clone())?;
    Ok(rows.slice(axes.heads, member * heads..(member + 1) * heads)?)
}

/// The heads of this rank of all rows of its group, of several tensors by one exchange, from all
/// heads of its rows. In the order of the communicator's stream.
pub(crate) fn gather(
    comm: &dyn Communicator,
    grid: &Grid,
    operands: &[(View<'_>, Axes)],
) -> Result<Vec<Tensor>> {
    let (own, theirs) = pieces(grid);
    let (mut sends, mut parts) = (Vec::new(), Vec::new());
    for operand @ (x, axes) in operands {
        for member in others(grid) {
            for piece in &own {
                sends.push((grid.in_group(member), chunk(grid, operand, piece, member)?));
            }
        }
        let mut shape = x.shape().to_vec();
        shape[axes.heads] /= grid.scheme.heads;
        for piece in &theirs {
            shape[axes.rows] = piece.own.len();
            parts.push((piece, Tensor::empty(comm.stream(), x.dtype(), &shape)?));
        }
    }
    let receives = parts.iter_mut();
    let receives = receives.map(|(piece, part)| (grid.in_group(piece.member), part.view_mut()));
    exchange(comm, Messages { sends, receives: receives.collect() })?;
    let mut parts = parts.iter();
    let mut gathered = Vec::with_capacity(operands.len());
    for operand @ (x, axes) in operands {
        let mut shape = x.shape().to_vec();
        shape[axes.heads] /= grid.scheme.heads;
        shape[axes.rows] = grid.rows_of(grid.group()).rows();
        let mut all = Tensor::empty(comm.stream(), x.dtype(), &shape)?;
        let mut place = |piece: &Piece, chunk: View<'_>| -> Result<()> {
            let rows = all.view_mut().slice(axes.rows, piece.common.clone());
            Ok(rows?.copy_from(&chunk, comm.stream())?)
        };
        own.iter()
            .try_for_each(|piece| place(piece, chunk(grid, operand, piece, grid.member())?))?;
        let parts = parts.by_ref().take(theirs.len());
        parts.into_iter().try_for_each(|(piece, part)| place(piece, part.view()))?;
        gathered.push(all);
    }
    Ok(gathered)
}

/// Results on their way to the ranks whose rows they are.
pub(crate) struct Scattering<'a> {
    /// The heads of this rank of all rows of its group.
    pub(crate) all: View<'a>,
    pub(crate) axes: Axes,
    /// All heads of the rows of this rank.
    pub(crate) x: ViewMut<'a>,
}

/// The reverse of [`gather`], by one exchange.
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
    exchange(comm, Messages { sends, receives: receives.collect() })?;
    let of_each = parts.len() / scatterings.len().max(1);
    let mut parts = parts.iter();
    for Scattering { all, axes, x } in scatterings {
        let heads = all.shape()[axes.heads];
        let mut place = |member: usize, piece: &Piece, chunk: View<'_>| -> Result<()> {
            let rows = x.reborrow().slice(axes.rows, piece.own.clone())?;
            let mut rows = rows.slice(axes.heads, member * heads..(member + 1) * heads)?;
            Ok(rows.copy_from(&chunk, comm.stream())?)
        };
        for piece in &own {
            place(grid.member(), piece, all.slice(axes.rows, piece.common.clone())?)?;
        }
        let mut parts = parts.by_ref().take(of_each);
        parts.try_for_each(|(member, piece, part)| place(*member, piece, part.view()))?;
    }
    Ok(())
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
