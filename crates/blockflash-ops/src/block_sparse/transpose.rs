//! The transpose of a block mask: of each block of keys, the blocks of queries that visit it.

use super::BlockMask;
use crate::Result;
use crate::attention::BlockMaskSizes;
use crate::check::to_i32;
use blockflash_safe::{BlockListArrays, BlockLists, Device, Tensor};

impl BlockMask {
    /// The same mask with its transpose: for each block of keys the blocks of queries that visit
    /// it. [`AttentionBackward`](crate::AttentionBackward) needs it on a GPU, where it walks the
    /// mask along the keys, too. Inference does not, so a mask is made without one. Copies by
    /// [`to`](Self::to) have it as well; masks [packed](Self::packed) or combined from this one do
    /// not. Bits of partial blocks are transposed, too. For a mask that is built again and again
    /// see [`BlockMaskBuffer::with_transpose`](super::BlockMaskBuffer::with_transpose).
    ///
    /// For a mask on a GPU, kernels make it there, and the first use on a stream waits for them. A
    /// packed mask and one with bits is transposed on the CPU.
    ///
    /// # Errors
    /// [`Error::TooLarge`](crate::Error::TooLarge) if indices do not fit i32;
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a GPU without a kernel; a GPU on which
    /// memory was allocated by a stream that is being captured; out of memory, or a failing device.
    pub fn with_transpose(self) -> Result<Self> {
        if let Some(gpu) = self.device().cuda_properties() {
            return self.with_transpose_on(gpu);
        }
        let transpose = Some(self.transposed_lists()?);
        Ok(Self { transpose, ..self })
    }

    /// This mask, on the CPU, with a transpose if the other one has it.
    pub(super) fn transposed_like(self, other: &Self) -> Result<Self> {
        if other.transpose.is_some() { self.with_transpose() } else { Ok(self) }
    }

    /// The index arrays of the [transpose](Self::with_transpose), if the mask has one: `row_ptr`,
    /// i32 `[batch, heads, cols + 1]`, and `col_idx`, the block rows that visit each block column,
    /// ascending. Packed: `[heads, total cols + 1]`, where block rows count from the start of their
    /// sequence.
    pub fn transposed_indices(&self) -> Option<[&Tensor; 2]> {
        self.transpose.as_ref().map(|lists| [lists.row_ptr(), lists.col_idx()])
    }

    /// The bits of the transpose, if it has any: for each of its blocks the first tile of the
    /// block, or −1, as [`bits`](Self::bits) has it, and an array of as many words, in which the
    /// tiles of a block and the bits of each tile are transposed.
    pub fn transposed_bits(&self) -> Option<[&Tensor; 2]> {
        self.transpose.as_ref().and_then(BlockLists::bits)
    }

    /// The index arrays of the mask and of its transpose as kernel operands, if there is one.
    pub(crate) fn for_backward(&self) -> Option<[&BlockLists; 2]> {
        Some([&self.lists, self.transpose.as_ref()?])
    }

    /// The sizes of the transpose, whose rows are blocks of keys, if there is one.
    pub(crate) fn transposed_sizes(&self) -> Option<BlockMaskSizes> {
        let rows = *self.transpose.as_ref()?.row_order().shape().last()?;
        Some(BlockMaskSizes {
            block_q: self.block_kv() as u32,
            block_kv: self.block_q() as u32,
            batch: self.batch as u32,
            heads: self.heads as u32,
            packed_rows: self.packed_rows().map(|_| rows as u32),
            bits: self.bits().is_some(),
        })
    }

    pub(super) fn transposed_lists(&self) -> Result<BlockLists> {
        let lists = self.lists()?;
        // A packed group holds all sequences of a head, any other one a batch entry of a head.
        let entries = 0..self.batch;
        let (outer, inner) =
            if self.packed_rows().is_some() { (0..1, entries) } else { (entries, 0..1) };
        let mut cu_rows = vec![0];
        for entry in inner.clone() {
            let first = cu_rows[entry] as usize;
            cu_rows.push(to_i32("cols", first + self.geometry_of(entry).cols())?);
        }
        let rows = cu_rows.last().map_or(0, |&rows| rows as usize);
        let [mut row_ptr, mut col_idx, mut row_order, mut block_bits] = [const { Vec::new() }; 4];
        to_i32("batch * heads * (cols + 1)", outer.len() * self.heads * (rows + 1))?;
        for (entry, head) in outer.clone().flat_map(|b| (0..self.heads).map(move |h| (b, h))) {
            row_ptr.push(col_idx.len() as i32);
            for sequence in inner.clone() {
                let (batch, geometry) = (entry + sequence, self.geometry_of(entry + sequence));
                let mut visitors = vec![Vec::new(); geometry.cols()];
                for row in 0..geometry.rows() {
                    for at in lists.span_at([batch, head, row]) {
                        visitors[lists.columns(at..at + 1)[0] as usize].push((row as i32, at));
                    }
                }
                for blocks in visitors {
                    for (row, at) in blocks {
                        col_idx.push(row);
                        block_bits.extend(lists.block_bits().map(|first| first[at]));
                    }
                    row_ptr.push(col_idx.len() as i32);
                }
                row_order.extend((0..geometry.cols() as i32).rev());
            }
        }
        let packed = self.packed_rows().is_some();
        let arrays = BlockListArrays {
            groups: if packed { &[self.heads] } else { &[self.batch, self.heads] },
            rows,
            cols: self.rows(),
            row_ptr: &row_ptr,
            col_idx: &col_idx,
            row_order: &row_order,
            cu_rows: packed.then_some(&cu_rows),
        };
        let stream = Device::cpu().stream()?;
        let transpose = BlockLists::new(&arrays, &stream)?;
        let Some(words) = lists.transposed_words() else { return Ok(transpose) };
        let [down, across] = self.block_tiles();
        Ok(transpose.with_bits(down * across, &block_bits, &words, &stream)?)
    }
}

#[cfg(test)]
#[path = "transpose_tests.rs"]
mod tests;
