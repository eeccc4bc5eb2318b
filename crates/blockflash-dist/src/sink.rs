//! The gradient of the sink: sums over the queries of all ranks.

use crate::exchange::exchange;
use crate::grid::Grid;
use crate::{Communicator, Result};
use blockflash_ops::{AttentionMerge, DType, Stream, Tensor};

/// The sum of vectors with an element per head, in their order.
pub(crate) fn sum(parts: &[Tensor], heads: usize, stream: &Stream) -> Result<Tensor> {
    let mut table = table(parts.len(), heads, stream)?;
    for (at, part) in parts.iter().enumerate() {
        let row = table.view_mut().slice(0, at..at + 1)?;
        row.flatten(0..4)?.copy_from(&part.view(), stream)?;
    }
    rows_added(&table, stream)
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
    exchange(comm, sends, receives.collect())?;
    stream.wait_for(comm.stream())?;
    let mut table = table(grid.scheme.keys, heads * grid.scheme.heads, stream)?;
    let own = std::iter::once((comm.rank(), part));
    for (rank, tensor) in own.chain(others().zip(&theirs)) {
        let (group, member) = (rank / grid.scheme.heads, rank % grid.scheme.heads);
        let row = table.view_mut().slice(0, group..group + 1)?;
        let place = row.slice(3, member * heads..(member + 1) * heads)?;
        place.flatten(0..4)?.copy_from(&tensor.view(), stream)?;
    }
    rows_added(&table, stream)
}

/// Rows in the shape of outputs with one head, which can be added.
fn table(rows: usize, heads: usize, stream: &Stream) -> Result<Tensor> {
    Ok(Tensor::zeros(stream, DType::F32, &[rows, 1, 1, heads])?)
}

fn rows_added(table: &Tensor, stream: &Stream) -> Result<Tensor> {
    let [rows, heads] = [table.shape()[0], table.shape()[3]];
    if rows == 1 || heads == 0 {
        return Ok(table.view().flatten(0..4)?.to_tensor(stream)?);
    }
    let mut total = Tensor::empty(stream, DType::F32, &[1, 1, heads])?;
    AttentionMerge::sum(table.view()).merge_into(total.view_mut(), None, stream)?;
    Ok(total.view().flatten(0..3)?.to_tensor(stream)?)
}
