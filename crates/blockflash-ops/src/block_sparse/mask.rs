use super::BlockGeometry;
use super::validate::{filled, invalid};
use crate::{Mask, Result};
use blockflash_safe::{BlockMaskOperands, Device, Stream, Tensor};

/// Which blocks of queries × keys attention visits, per batch entry and head, on the CPU or a GPU.
///
/// The format is BSR: [`row_ptr`](Self::row_ptr) and [`col_idx`](Self::col_idx) list the block columns of each block row,
/// ascending. `batch` and `heads` are each 1, for all alike, or a number of batch entries and of heads; whether those are the
/// heads of the queries or of the keys is for the caller to say.
///
/// Every constructor validates the index arrays, and nothing changes them later but the
/// [`BlockMaskBuffer`](super::BlockMaskBuffer) that they belong to. Combining and counting read them on the CPU.
#[derive(Debug)]
pub struct BlockMask {
    pub(super) geometry: BlockGeometry,
    pub(super) batch: usize,
    pub(super) heads: usize,
    pub(super) row_ptr: Tensor,
    pub(super) col_idx: Tensor,
    pub(super) row_order: Tensor,
}

/// The index arrays on the CPU.
#[derive(Clone, Copy)]
pub(super) struct Lists<'a> {
    row_ptr: &'a [i32],
    col_idx: &'a [i32],
    rows: usize,
}

impl<'a> Lists<'a> {
    /// The columns of a row that exists; `group` is `batch * heads + head`.
    pub(super) fn row(&self, group: usize, row: usize) -> &'a [i32] {
        let at = group * (self.rows + 1) + row;
        &self.col_idx[self.row_ptr[at] as usize..self.row_ptr[at + 1] as usize]
    }

    /// The rows of all groups, in their order.
    fn all(self) -> impl Iterator<Item = (usize, &'a [i32])> {
        let groups = self.row_ptr.len() / (self.rows + 1);
        (0..groups).flat_map(move |group| (0..self.rows).map(move |row| (row, self.row(group, row))))
    }
}

impl BlockMask {
    /// How queries and keys are divided into blocks.
    pub fn geometry(&self) -> BlockGeometry {
        self.geometry
    }

    /// Number of queries.
    pub fn seqlen_q(&self) -> usize {
        self.geometry.seqlen_q()
    }

    /// Number of keys.
    pub fn seqlen_kv(&self) -> usize {
        self.geometry.seqlen_kv()
    }

    /// Queries of a block.
    pub fn block_q(&self) -> usize {
        self.geometry.block_q()
    }

    /// Keys of a block.
    pub fn block_kv(&self) -> usize {
        self.geometry.block_kv()
    }

    /// Batch entries; 1 is the same mask for all.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Heads; 1 is the same mask for all.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Number of block rows, `ceil(seqlen_q / block_q)`.
    pub fn rows(&self) -> usize {
        self.geometry.rows()
    }

    /// Number of block columns, `ceil(seqlen_kv / block_kv)`.
    pub fn cols(&self) -> usize {
        self.geometry.cols()
    }

    /// i32 `[batch, heads, rows + 1]`: the columns of row `r` of head `h` of batch entry `b` are
    /// `col_idx[row_ptr[b, h, r]..row_ptr[b, h, r + 1]]`. A head starts where the one before ends.
    pub fn row_ptr(&self) -> &Tensor {
        &self.row_ptr
    }

    /// i32 `[nnz]`: the block columns, ascending and unique within a row.
    pub fn col_idx(&self) -> &Tensor {
        &self.col_idx
    }

    /// i32 `[batch, heads, rows]`: the rows of each head in the order in which a GPU takes them, the longest first; of rows that
    /// list equally many columns the last comes first, which is the longer one under a causal token mask.
    pub fn row_order(&self) -> &Tensor {
        &self.row_order
    }

    /// Where the mask is.
    pub fn device(&self) -> Device {
        self.row_ptr.device()
    }

    /// A copy on the stream's device.
    ///
    /// # Errors
    /// Out of memory, or a failing device.
    pub fn to(&self, stream: &Stream) -> Result<Self> {
        Ok(Self {
            row_ptr: self.row_ptr.copy_to(stream)?,
            col_idx: self.col_idx.copy_to(stream)?,
            row_order: self.row_order.copy_to(stream)?,
            ..*self
        })
    }

    /// The columns of one row, ascending. The indices are those of the mask itself, so 0 where it has one batch entry or head
    /// for all.
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`](crate::Error::InvalidBlockMask) for a row that does not exist; a mask that is not on the CPU.
    pub fn row(
        &self,
        batch: usize,
        head: usize,
        row: usize,
    ) -> Result<impl ExactSizeIterator<Item = usize> + '_> {
        for (what, index, count) in
            [("batch", batch, self.batch), ("head", head, self.heads), ("row", row, self.rows())]
        {
            if index >= count {
                return invalid(format!("{what} is {index}, but there are {count}"));
            }
        }
        let columns = self.lists()?.row(batch * self.heads + head, row);
        Ok(columns.iter().map(|&col| col as usize))
    }

    /// Which blocks are visited, `[batch, heads, rows, cols]`.
    ///
    /// # Errors
    /// Out of memory; a mask that is not on the CPU.
    pub fn to_bool(&self) -> Result<Vec<bool>> {
        let lists = self.lists()?;
        let cols = self.cols();
        let mut visited = filled(false, &[self.batch, self.heads, self.rows(), cols])?;
        for (at, (_, columns)) in lists.all().enumerate() {
            columns.iter().for_each(|&col| visited[at * cols + col as usize] = true);
        }
        Ok(visited)
    }

    /// Number of visited blocks, of all the mask's batch entries and heads together; for a mask that is built on a GPU, the room
    /// that its [`BlockMaskBuffer`](super::BlockMaskBuffer) has for them.
    pub fn nnz(&self) -> usize {
        self.col_idx.shape().first().copied().unwrap_or(0)
    }

    /// Visited blocks ([`nnz`](Self::nnz)) per block, 0 to 1; 0 for a mask without any blocks.
    pub fn density(&self) -> f64 {
        let rows = (self.batch * self.heads * self.rows()) as f64;
        let blocks = rows * self.cols() as f64;
        if blocks == 0.0 { 0.0 } else { self.nnz() as f64 / blocks }
    }

    /// Columns of the longest row per columns of the mean row, at least 1: how much longer the longest task takes than the mean
    /// one. 1 when no block is visited.
    ///
    /// # Errors
    /// A mask that is not on the CPU.
    pub fn imbalance(&self) -> Result<f64> {
        let longest = self.lists()?.all().map(|(_, columns)| columns.len()).max().unwrap_or(0);
        let rows = self.batch * self.heads * self.rows();
        Ok(if longest == 0 { 1.0 } else { longest as f64 * rows as f64 / self.nnz() as f64 })
    }

    /// Number of (query, key) pairs that lie in a visited block and are visible under the token mask, of all the mask's batch
    /// entries and heads together: what the FLOPs are counted from. One batch entry or head that stands for several counts once.
    ///
    /// # Errors
    /// A mask that is not on the CPU.
    pub fn visited_pairs(&self, mask: Mask) -> Result<u64> {
        let pairs = |(row, columns): (usize, &[i32])| {
            columns.iter().map(|&col| self.pairs(row, col as usize, mask)).sum::<u64>()
        };
        Ok(self.lists()?.all().map(pairs).sum())
    }

    /// Pairs of one block that the token mask leaves.
    fn pairs(&self, row: usize, col: usize, mask: Mask) -> u64 {
        let (queries, keys) = (self.geometry.queries(row), self.geometry.keys(col));
        let seen = |query| {
            let visible = mask.visible(query, self.seqlen_q(), self.seqlen_kv());
            visible.end.min(keys.end).saturating_sub(visible.start.max(keys.start)) as u64
        };
        let all = keys.len() as u64;
        // The ends of the visible keys never go back from one query to the next: what first and last see whole, all do.
        if seen(queries.start) == all && seen(queries.end - 1) == all {
            return all * queries.len() as u64;
        }
        queries.map(seen).sum()
    }

    /// The index arrays as kernels take them.
    pub(crate) fn operands(&self) -> BlockMaskOperands<'_> {
        BlockMaskOperands {
            row_ptr: self.row_ptr.view(),
            col_idx: self.col_idx.view(),
            row_order: self.row_order.view(),
        }
    }

    /// The index arrays, if they are on the CPU.
    pub(super) fn lists(&self) -> Result<Lists<'_>> {
        let (row_ptr, col_idx) = (self.row_ptr.view().as_slice()?, self.col_idx.view().as_slice()?);
        Ok(Lists { row_ptr, col_idx, rows: self.rows() })
    }
}

#[cfg(test)]
#[path = "mask_tests.rs"]
mod tests;
