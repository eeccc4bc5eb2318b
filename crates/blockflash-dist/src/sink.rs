//! The gradient of the sink: sums over the queries of all ranks.

use crate::exchange::{Messages, exchange};
use crate::grid::Grid;
use crate::{Communicator, Result};
use blockflash_ops::{AttentionMerge, DType, Stream, Tensor};

/// The sum of vectors with an element per head, in their order.
pub(crate) fn sum(parts: &[Tensor], heads: usize, stream: &Stream) -> Result<Tensor> {
    let mut table = table(parts.len(), heads, stream)?;
    for (at, part) in parts.iter().enumerate() {
        let row = table.view_mut().slice(0, at..at + 1)?;
        row.flatten(0..4)?.slice(0, 0..heads)?.copy_from(&part.view(), stream)?;
    }
    rows_added(&table, heads, stream)
}

/// The gradient of all heads from that of the heads of each rank and the queries of its group,
/// which are added in the order of the groups.
pub(crate) fn total(
    comm: &dyn Communicator,
    grid: &Grid,
    part: &Tensor,
    stream: &Stream,
) -> Result<Tensor> {
    comm.stream().wait_for(stream)?;
    let heads = part.shape()[0];
    let others = || (0..comm.world()).filter(|&rank| rank != comm.rank());
    let empty = |_| Tensor::empty(comm.stream(), DType::F32, &[heads]);
    let mut theirs = others().map(empty).collect::<Result<Vec<_>, _>>()?;
    let sends = others().map(|rank| (rank, part.view())).collect();
    let receives = others().zip(&mut theirs).map(|(rank, tensor)| (rank, tensor.view_mut()));
    exchange(comm, Messages { sends, receives: receives.collect() })?;
    stream.wait_for(comm.stream())?;
    let all = heads * grid.scheme.heads;
    let mut table = table(grid.scheme.keys, all, stream)?;
    let own = std::iter::once((comm.rank(), part));
    for (rank, tensor) in own.chain(others().zip(&theirs)) {
        let (group, member) = (rank / grid.scheme.heads, rank % grid.scheme.heads);
        let row = table.view_mut().slice(0, group..group + 1)?;
        let mut place = row.flatten(0..4)?.slice(0, member * heads..(member + 1) * heads)?;
        place.copy_from(&tensor.view(), stream)?;
    }
    rows_added(&table, all, stream)
}

/// Elements of a row of an output, of which GPUs take multiples.
const WIDTH: usize = 8;

/// Rows in the shape of outputs, which can be added, with zeros behind the heads.
fn table(rows: usize, heads: usize, stream: &Stream) -> Result<Tensor> {
    let shape = [rows, 1, heads.div_ceil(WIDTH), WIDTH];
    Ok(Tensor::zeros(stream, DType::F32, &shape)?)
}

fn rows_added(table: &Tensor, heads: usize, stream: &Stream) -> Result<Tensor> {
    let shape = table.shape();
    if shape[0] == 0 {
        return Ok(Tensor::zeros(stream, DType::F32, &[heads])?);
    }
    if shape[0] == 1 || heads == 0 {
        return Ok(table.view().flatten(0..4)?.slice(0, 0..heads)?.to_tensor(stream)?);
    }
    let mut total = Tensor::empty(stream, DType::F32, &shape[1..])?;
    AttentionMerge::sum(table.view()).merge_into(total.view_mut(), None, stream)?;
    Ok(total.view().flatten(0..3)?.slice(0, 0..heads)?.to_tensor(stream)?)
}
