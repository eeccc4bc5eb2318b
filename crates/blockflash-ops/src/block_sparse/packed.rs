//! Block masks of packed batches: the masks of the sequences, one after another.

use super::bits::BitList;
use super::mask::Packed;
use super::validate::{Sizes, exists, invalid};
use super::{BlockGeometry, BlockMask};
use crate::check::{reserved, to_i32};
use crate::{Error, Result};
use blockflash_safe::{BlockListArrays, BlockLists, Device, Stream, Tensor};

impl BlockMask {
    /// The mask of a packed batch, for [`CuSeqlens`](crate::CuSeqlens) of the same sequences. It
    /// takes one mask per sequence, in the order of the batch and with the lengths of its sequence.
    /// All masks have the same block size and 1 batch entry; each has either 1 head, which then
    /// stands for all, or as many heads as the others.
    ///
    /// ```
    /// use blockflash_ops::{Align, Attention, BlockGeometry, BlockMask};
    /// use blockflash_ops::{CuSeqlens, Device, Mask, View};
    ///
    /// // Sequences of 300 and 100 tokens: the block before and the own one.
    /// let local = |length| {
    ///     let geometry = BlockGeometry::new(length, length, 64, 64)?;
    ///     BlockMask::window(geometry, Some(1), Some(0), Align::BottomRight)
    /// };
    /// let mask = BlockMask::packed(&[&local(300)?, &local(100)?])?;
    /// assert_eq!(mask.row(0, 0, 4)?.collect::<Vec<_>>(), [3, 4]);
    /// assert_eq!(mask.row(1, 0, 1)?.collect::<Vec<_>>(), [0, 1]);
    ///
    /// let data: Vec<f32> = (0..400 * 2 * 8).map(|i| (i as f32).sin()).collect();
    /// let q = View::from_slice(&data, &[400, 2, 8])?;
    /// let offsets = View::from_slice(&[0, 300, 400], &[3])?;
    /// let attention = Attention {
    ///     scores: Mask::causal().into(),
    ///     cu_seqlens: Some(CuSeqlens {
    ///         q: offsets,
    ///         kv: offsets,
    ///         max_seqlen_q: 300,
    ///         max_seqlen_kv: 300,
    ///     }),
    ///     block_mask: Some(&mask),
    ///     ..Attention::new(q, q, q)
    /// };
    /// assert_eq!(attention.forward(&Device::cpu().stream()?)?.o.shape(), [400, 2, 8]);
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`] if there are no masks, or naming the first mask that does not
    /// fit the others; [`Error::TooLarge`] if indices do not fit i32; a mask that is not on the
    /// CPU.
    pub fn packed(masks: &[&Self]) -> Result<Self> {
        let Some(first) = masks.first() else {
            return invalid("there are 0 masks to pack, expected at least 1".into());
        };
        let heads = masks.iter().map(|mask| mask.heads).max().unwrap_or(1);
        for (index, mask) in masks.iter().enumerate() {
            mask.check_packable(first, heads)
                .or_else(|fault| invalid(format!("mask {index} {fault}")))?;
        }
        let geometries: Vec<BlockGeometry> = masks.iter().map(|mask| mask.geometry).collect();
        let longest =
            |length: fn(&BlockGeometry) -> usize| geometries.iter().map(length).max().unwrap_or(0);
        let [seqlen_q, seqlen_kv] =
            [BlockGeometry::seqlen_q, BlockGeometry::seqlen_kv].map(longest);
        let geometry = BlockGeometry::new(seqlen_q, seqlen_kv, first.block_q(), first.block_kv())?;

        let (mut rows, mut cu_rows) = (0, vec![0]);
        for geometry in &geometries {
            rows += geometry.rows();
            cu_rows.push(to_i32("rows", rows)?);
        }
        to_i32("heads * (rows + 1)", heads.saturating_mul(rows + 1))?;
        let count = masks.iter().map(|mask| mask.nnz().saturating_mul(heads / mask.heads));
        let count = count.fold(0, usize::saturating_add);
        to_i32("nnz", count)?;
        let (mut row_ptr, mut col_idx) = (reserved(heads * (rows + 1))?, reserved(count)?);
        let mut row_order = reserved(heads * rows)?;
        let mut bits = BitList::default();
        for head in 0..heads {
            row_ptr.push(col_idx.len() as i32);
            for mask in masks {
                let (lists, order) = (mask.lists()?, mask.row_order().view().as_slice::<i32>()?);
                let (head, rows) = (if mask.heads == 1 { 0 } else { head }, mask.rows());
                for row in 0..rows {
                    col_idx.extend(lists.row(head, row));
                    lists.span(head, row).try_for_each(|at| bits.push(lists.bits_of(at)))?;
                    row_ptr.push(col_idx.len() as i32);
                }
                row_order.extend(&order[head * rows..][..rows]);
            }
        }
        let stream: &Stream = &Device::cpu().stream()?;
        let arrays = BlockListArrays {
            groups: &[heads],
            rows,
            cols: geometry.cols(),
            row_ptr: &row_ptr,
            col_idx: &col_idx,
            row_order: &row_order,
            cu_rows: Some(&cu_rows),
        };
        let lists = BlockLists::new(&arrays, stream)?;
        let (batch, packed) = (masks.len(), Some(Packed { geometries, rows }));
        bits.give_to(Self { geometry, batch, heads, lists, packed, transpose: None })
    }

    /// The mask of one batch entry; for a packed mask, the mask of one sequence.
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`] for an entry that does not exist; a mask that is not on the CPU.
    pub fn entry(&self, batch: usize) -> Result<Self> {
        exists("batch", batch, self.batch)?;
        let lists = self.lists()?;
        Sizes::new(self.geometry_of(batch), 1, self.heads)?.build_blocks(0, |head, row, blocks| {
            blocks.extend(&lists, lists.span_at([batch, head, row]))
        })
    }

    /// How the queries and keys of each sequence are divided into blocks. `None` unless packed.
    pub fn sequences(&self) -> Option<&[BlockGeometry]> {
        self.packed.as_ref().map(|packed| packed.geometries.as_slice())
    }

    /// i32 `[batch + 1]`: the block row of a head at which each sequence starts, then the number of
    /// block rows of a head. `None` unless packed.
    pub fn cu_rows(&self) -> Option<&Tensor> {
        self.lists.cu_rows()
    }

    /// Block rows of a head, over all sequences. `None` unless packed.
    pub(crate) fn packed_rows(&self) -> Option<usize> {
        self.packed.as_ref().map(|packed| packed.rows)
    }

    /// How queries and keys of a batch entry that exists are divided.
    pub(crate) fn geometry_of(&self, batch: usize) -> BlockGeometry {
        self.sequences().map_or(self.geometry, |sequences| sequences[batch])
    }

    /// Checks that the sequences between these offsets have the lengths with which the mask was
    /// packed. `which` names the offsets in errors.
    pub(crate) fn check_lengths(
        &self,
        which: &'static str,
        offsets: &[i32],
        length: fn(&BlockGeometry) -> usize,
    ) -> Result<()> {
        let lengths = offsets.windows(2).map(|pair| (pair[1] - pair[0]) as usize);
        for (index, (found, geometry)) in
            lengths.zip(self.sequences().unwrap_or_default()).enumerate()
        {
            let expected = length(geometry);
            if found != expected {
                let problem =
                    format!("sequence {index} has {found} rows, but {expected} in the block mask");
                return Err(Error::InvalidCuSeqlens {
                    which,
                    index: index + 1,
                    value: offsets[index + 1],
                    problem,
                });
            }
        }
        Ok(())
    }

    /// Applies `change` to the mask of each sequence of a packed mask, and packs the results again.
    pub(super) fn by_sequence(
        &self,
        change: impl Fn(usize, &Self) -> Result<Self>,
    ) -> Result<Self> {
        let masks: Result<Vec<Self>> =
            (0..self.batch).map(|at| change(at, &self.entry(at)?)).collect();
        Self::packed(&masks?.iter().collect::<Vec<_>>())
    }

    /// Why the mask cannot be packed together with the first one into a mask with this many heads.
    fn check_packable(&self, first: &Self, heads: usize) -> std::result::Result<(), String> {
        let blocks = |mask: &Self| [mask.block_q(), mask.block_kv()];
        let ([q, kv], [first_q, first_kv]) = (blocks(self), blocks(first));
        if self.packed.is_some() {
            return Err("is packed already".into());
        }
        if self.batch != 1 {
            return Err(format!("has {} batch entries, not 1", self.batch));
        }
        if [q, kv] != [first_q, first_kv] {
            return Err(format!(
                "has blocks of {q} × {kv}, but the first one has {first_q} × {first_kv}"
            ));
        }
        if ![1, heads].contains(&self.heads) {
            return Err(format!("has {} heads, neither 1 nor {heads}", self.heads));
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "packed_tests.rs"]
mod tests;
