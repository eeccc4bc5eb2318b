//! Exchange of rows for heads among the ranks of a group.

use crate::grid::Grid;
use crate::{Communicator, Result};
use blockflash_ops::{Tensor, View, ViewMut};
use std::ops::Range;

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
    let mut shape = x.shape().to_vec();
    (shape[axes.rows], shape[axes.heads]) = (grid.rows_of(grid.group())?.rows(), heads);
    let mut all = Tensor::empty(comm.stream(), x.dtype(), &shape)?;
    let pieces = grid.pieces()?;
    let own = |member: usize| member * heads..(member + 1) * heads;
    let mine = pieces.iter().filter(|(member, ..)| *member == grid.member());
    let mine: Vec<_> = mine.map(|(_, rows, _)| rows.clone()).collect();
    let mut sends = Vec::new();
    for member in others(grid) {
        for rows in &mine {
            let part = x.slice(axes.rows, rows.clone())?.slice(axes.heads, own(member))?;
            sends.push((grid.in_group(member), part));
        }
    }
    let mut parts = Vec::new();
    for (member, _, rows) in &pieces {
        shape[axes.rows] = rows.len();
        let part = match *member == grid.member() {
            true => None,
            false => Some(Tensor::empty(comm.stream(), x.dtype(), &shape)?),
        };
        parts.push((grid.in_group(*member), part));
    }
    let receives =
        parts.iter_mut().filter_map(|(from, part)| Some((*from, part.as_mut()?.view_mut())));
    exchange(comm, sends, receives.collect())?;
    for ((member, rows, common), (_, part)) in pieces.into_iter().zip(parts) {
        let source = match &part {
            Some(part) => part.view(),
            None => x.slice(axes.rows, rows)?.slice(axes.heads, own(member))?,
        };
        all.view_mut().slice(axes.rows, common)?.copy_from(&source, comm.stream())?;
    }
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
    let pieces = grid.pieces()?;
    let of_others = pieces.iter().filter(|(member, ..)| *member != grid.member());
    let send = |(member, _, common): &(usize, Range<usize>, Range<usize>)| {
        Ok((grid.in_group(*member), all.slice(axes.rows, common.clone())?))
    };
    let sends = of_others.map(send).collect::<Result<Vec<_>>>()?;
    let mine = pieces.iter().filter(|(member, ..)| *member == grid.member());
    let mine: Vec<_> = mine.cloned().collect();
    let mut parts = Vec::new();
    for member in others(grid) {
        for (_, rows, _) in &mine {
            let mut shape = all.shape().to_vec();
            shape[axes.rows] = rows.len();
            let part = Tensor::empty(comm.stream(), all.dtype(), &shape)?;
            parts.push((member, rows.clone(), part));
        }
    }
    let receives =
        parts.iter_mut().map(|(member, _, part)| (grid.in_group(*member), part.view_mut()));
    exchange(comm, sends, receives.collect())?;
    let received = parts.iter().map(|(member, rows, part)| (*member, rows.clone(), part.view()));
    let kept = mine.iter().map(|(member, rows, common)| {
        Ok((*member, rows.clone(), all.slice(axes.rows, common.clone())?))
    });
    let kept = kept.collect::<Result<Vec<_>>>()?;
    for (member, rows, part) in received.chain(kept) {
        let of_member = member * heads..(member + 1) * heads;
        let place = x.reborrow().slice(axes.rows, rows)?.slice(axes.heads, of_member);
        place?.copy_from(&part, comm.stream())?;
    }
    Ok(())
}

/// The other places in the group of this rank.
fn others(grid: &Grid) -> impl Iterator<Item = usize> + use<> {
    let own = grid.member();
    (0..grid.scheme.heads).filter(move |&member| member != own)
}

/// Exchanges tensors of any strides; those without elements do not travel.
pub(crate) fn exchange(
    comm: &dyn Communicator,
    sends: Vec<(usize, View<'_>)>,
    receives: Vec<(usize, ViewMut<'_>)>,
) -> Result<()> {
    let stream = comm.stream();
    let some = |view: &View<'_>| !view.layout().is_empty();
    let sends: Vec<_> = sends.into_iter().filter(|(_, view)| some(view)).collect();
    let mut receives: Vec<_> =
        receives.into_iter().filter(|(_, view)| some(&view.as_view())).collect();
    let packed = |view: &View<'_>| match view.layout().is_contiguous() {
        true => Ok(None),
        false => view.to_tensor(stream).map(Some),
    };
    let copies = sends.iter().map(|(_, view)| packed(view)).collect::<Result<Vec<_>, _>>()?;
    let sends: Vec<_> = sends
        .iter()
        .zip(&copies)
        .map(|((to, view), copy)| (*to, copy.as_ref().map_or(*view, Tensor::view)))
        .collect();
    let place = |view: &ViewMut<'_>| match view.layout().is_contiguous() {
        true => Ok(None),
        false => Tensor::empty(stream, view.dtype(), view.shape()).map(Some),
    };
    let mut places = receives.iter().map(|(_, view)| place(view)).collect::<Result<Vec<_>, _>>()?;
    let mut targets: Vec<_> = receives
        .iter_mut()
        .zip(&mut places)
        .map(|((from, view), place)| match place {
            Some(place) => (*from, place.view_mut()),
            None => (*from, view.reborrow()),
        })
        .collect();
    if !sends.is_empty() || !targets.is_empty() {
        comm.exchange(&sends, &mut targets)?;
    }
    drop(targets);
    for ((_, view), place) in receives.iter_mut().zip(&places) {
        if let Some(place) = place {
            view.copy_from(&place.view(), stream)?;
        }
    }
    Ok(())
}
