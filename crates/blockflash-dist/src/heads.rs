//! Exchange of rows for heads among the ranks of a group.

use crate::exchange::exchange;
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

/// The heads of this rank of all rows of its group, from all heads of its rows. In the order of the
/// communicator's stream.
pub(crate) fn gather(
    comm: &dyn Communicator,
    grid: &Grid,
    x: View<'_>,
    axes: Axes,
) -> Result<Tensor> {
    let heads = x.shape()[axes.heads] / grid.scheme.heads;
    let (own, theirs) = pieces(grid);
    let chunk = |piece: &Piece, member: usize| -> Result<View<'_>> {
        let rows = x.slice(axes.rows, piece.own.clone())?;
        Ok(rows.slice(axes.heads, member * heads..(member + 1) * heads)?)
    };
    let mut sends = Vec::new();
    for member in others(grid) {
        for piece in &own {
            sends.push((grid.in_group(member), chunk(piece, member)?));
        }
    }
    let mut shape = x.shape().to_vec();
    shape[axes.heads] = heads;
    let mut parts = Vec::new();
    for piece in &theirs {
        shape[axes.rows] = piece.own.len();
        parts.push(Tensor::empty(comm.stream(), x.dtype(), &shape)?);
    }
    let receives = theirs.iter().zip(&mut parts);
    let receives = receives.map(|(piece, part)| (grid.in_group(piece.member), part.view_mut()));
    exchange(comm, sends, receives.collect())?;
    shape[axes.rows] = grid.rows_of(grid.group()).rows();
    let mut all = Tensor::empty(comm.stream(), x.dtype(), &shape)?;
    let mut place = |piece: &Piece, chunk: View<'_>| -> Result<()> {
        let rows = all.view_mut().slice(axes.rows, piece.common.clone());
        Ok(rows?.copy_from(&chunk, comm.stream())?)
    };
    own.iter().try_for_each(|piece| place(piece, chunk(piece, grid.member())?))?;
    theirs.iter().zip(&parts).try_for_each(|(piece, part)| place(piece, part.view()))?;
    Ok(all)
}

/// The reverse of [`gather`]: all heads of the rows of this rank, into `x`.
pub(crate) fn scatter(
    comm: &dyn Communicator,
    grid: &Grid,
    all: View<'_>,
    axes: Axes,
    mut x: ViewMut<'_>,
) -> Result<()> {
    let heads = all.shape()[axes.heads];
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
        let mut rows = rows.slice(axes.heads, member * heads..(member + 1) * heads)?;
        Ok(rows.copy_from(&chunk, comm.stream())?)
    };
    own.iter().try_for_each(|piece| place(grid.member(), piece, chunk(piece)?))?;
    parts.iter().try_for_each(|(member, piece, part)| place(*member, piece, part.view()))
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
