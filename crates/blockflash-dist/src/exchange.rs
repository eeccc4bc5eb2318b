//! Exchange of tensors with any strides, and of lists.

use crate::{Communicator, Error, Result};
use blockflash_ops::{DType, Stream, Tensor, View, ViewMut};
use std::ops::Range;

/// What a rank sends and receives in one exchange.
#[derive(Default)]
pub(crate) struct Messages<'a> {
    pub(crate) sends: Vec<(usize, View<'a>)>,
    pub(crate) receives: Vec<(usize, ViewMut<'a>)>,
}

/// Exchanges tensors of any strides; those without elements do not travel. Says whether any does.
pub(crate) fn exchange(comm: &dyn Communicator, messages: Messages<'_>) -> Result<bool> {
    let Messages { sends, receives } = messages;
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
    let any = !sends.is_empty() || !targets.is_empty();
    if any {
        comm.exchange(&sends, &mut targets)?;
    }
    drop(targets);
    for ((_, view), place) in receives.iter_mut().zip(&places) {
        if let Some(place) = place {
            view.copy_from(&place.view(), stream)?;
        }
    }
    Ok(any)
}

/// Rows of a tensor.
pub(crate) enum Packed<'a> {
    InPlace(View<'a>),
    Copied(Tensor),
}

impl Packed<'_> {
    pub(crate) fn view(&self) -> View<'_> {
        match self {
            Packed::InPlace(view) => *view,
            Packed::Copied(tensor) => tensor.view(),
        }
    }
}

/// Rows of a tensor `[1, rows, heads, head_dim]`, one range after the other, in the order of
/// `stream`.
pub(crate) fn pack<'a>(
    x: View<'a>,
    ranges: &[Range<usize>],
    stream: &Stream,
) -> Result<Packed<'a>> {
    if let [] | [_] = ranges {
        let rows = ranges.first().cloned().unwrap_or(0..0);
        return Ok(Packed::InPlace(x.slice(1, rows)?));
    }
    let mut shape = x.shape().to_vec();
    shape[1] = ranges.iter().map(|rows| rows.len()).sum();
    let mut copy = Tensor::empty(stream, x.dtype(), &shape)?;
    let mut end = 0;
    for rows in ranges {
        let place = copy.view_mut().slice(1, end..end + rows.len());
        place?.copy_from(&x.slice(1, rows.clone())?, stream)?;
        end += rows.len();
    }
    Ok(Packed::Copied(copy))
}

/// Sends each rank a list, and takes those of all ranks: the first of two messages says how long
/// the second one is.
pub(crate) fn exchange_lists(comm: &dyn Communicator, lists: &[Vec<i32>]) -> Result<Vec<Vec<i32>>> {
    let length = |list: &Vec<i32>| match i32::try_from(list.len()) {
        Ok(length) => Ok(vec![length]),
        Err(_) => Err(Error::Size {
            what: "the length of a message",
            value: list.len(),
            expected: format!("at most {}", i32::MAX),
        }),
    };
    let lengths = lists.iter().map(length).collect::<Result<Vec<_>>>()?;
    let lengths = exchange_known(comm, &lengths, &vec![1; lists.len()])?;
    let length = |(rank, length): (usize, Vec<i32>)| {
        let found = length[0].to_string();
        let negative = |_| Error::message(rank, "a length of at least 0", &found);
        usize::try_from(length[0]).map_err(negative)
    };
    let lengths = lengths.into_iter().enumerate().map(length).collect::<Result<Vec<_>>>()?;
    exchange_known(comm, lists, &lengths)
}

/// The same for lists of known lengths.
fn exchange_known(
    comm: &dyn Communicator,
    lists: &[Vec<i32>],
    lengths: &[usize],
) -> Result<Vec<Vec<i32>>> {
    let stream = comm.stream();
    let sent = lists.iter().map(|list| Tensor::from_slice(stream, list, &[list.len()]));
    let sent = sent.collect::<Result<Vec<_>, _>>()?;
    let empty = |&length: &usize| Tensor::empty(stream, DType::I32, &[length]);
    let mut come = lengths.iter().map(empty).collect::<Result<Vec<_>, _>>()?;
    let others = |rank: &usize| *rank != comm.rank();
    let sends = sent.iter().enumerate().filter(|(rank, _)| others(rank));
    let receives = come.iter_mut().enumerate().filter(|(rank, _)| others(rank));
    let receives = receives.map(|(rank, tensor)| (rank, tensor.view_mut())).collect();
    let sends = sends.map(|(rank, tensor)| (rank, tensor.view())).collect();
    exchange(comm, Messages { sends, receives })?;
    comm.wait(stream)?;
    let read = |(rank, tensor): (usize, &Tensor)| match others(&rank) {
        true => Ok(tensor.to_vec::<i32>(stream)?),
        false => Ok(lists[rank].clone()),
    };
    come.iter().enumerate().map(read).collect()
}
