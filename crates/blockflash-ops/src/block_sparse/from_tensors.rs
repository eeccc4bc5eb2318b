//! Block masks from lists on the device that uses them, for example a GPU that computed them.

use super::validate::{Sizes, invalid};
use super::{BlockGeometry, BlockMask};
use crate::Result;
use crate::check::Operand;
use blockflash_safe::{Device, Stream, Tensor};
use blockflash_sys::DType;

/// Lists of block columns with a length each. A `BlockMask` of PyTorch's flex_attention has two of
/// them: `kv_num_blocks` with `kv_indices`, and `full_kv_num_blocks` with `full_kv_indices`.
#[derive(Clone, Copy, Debug)]
pub struct BlockColumns<'a> {
    /// i32 `[batch, heads, rows]`: how many columns each row has.
    pub counts: &'a Tensor,
    /// i32 `[batch, heads, rows, most]`: the columns of each row in any order. Entries behind them
    /// may hold anything.
    pub columns: &'a Tensor,
}

impl BlockMask {
    /// From the arrays of the format on the device of the stream: `row_ptr` is i32
    /// `[batch, heads, rows + 1]` and `col_idx` i32 `[nnz]`, with the contents that
    /// [`from_parts`](Self::from_parts) describes. The mask is on the same device.
    ///
    /// The arrays are copied: the copy waits for the work that is queued by now on every stream
    /// that used them, and later writes to them do not change the mask. The copy is downloaded to
    /// the host, which validates it as the other constructors do.
    ///
    /// ```
    /// # use blockflash_ops::{BlockGeometry, BlockMask, Device, Tensor};
    /// let stream = Device::cpu().stream()?; // or of a GPU
    /// let geometry = BlockGeometry::new(300, 300, 128, 128)?;
    /// let row_ptr = Tensor::from_slice(&stream, &[0, 1, 3, 5], &[1, 1, 4])?;
    /// let col_idx = Tensor::from_slice(&stream, &[0, 0, 1, 0, 2], &[5])?;
    /// let mask = BlockMask::from_tensors(geometry, &row_ptr, &col_idx, &stream)?;
    /// assert_eq!(mask.row(0, 0, 2)?.collect::<Vec<_>>(), [0, 2]);
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`](crate::Error::InvalidBlockMask) names the first bad entry;
    /// [`Error::Shape`](crate::Error::Shape), [`Error::DType`](crate::Error::DType) and
    /// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch) name the array;
    /// [`Error::TooLarge`](crate::Error::TooLarge) if indices do not fit i32. A stream that is
    /// being captured, out of memory, or a failing device.
    pub fn from_tensors(
        geometry: BlockGeometry,
        row_ptr: &Tensor,
        col_idx: &Tensor,
        stream: &Stream,
    ) -> Result<Self> {
        let Sizes { batch, heads, .. } = sizes_of(geometry, "row_ptr", row_ptr)?;
        let nnz = col_idx.shape().first().copied().unwrap_or(0);
        let shape = [batch, heads, geometry.rows() + 1];
        let row_ptr = download("row_ptr", row_ptr, &shape, stream)?;
        let col_idx = download("col_idx", col_idx, &[nnz], stream)?;
        let (row_ptr, col_idx) = (row_ptr.view(), col_idx.view());
        let [row_ptr, col_idx] = [row_ptr.as_slice()?, col_idx.as_slice()?];
        Self::from_parts(geometry, batch, heads, row_ptr, col_idx)?.moved_to(stream)
    }

    /// The columns that one of the lists names, for a mask on the device of the lists. `batch` and
    /// `heads` are those of the first list. A column may come only once, over all lists.
    ///
    /// The lists are copied and validated as [`from_tensors`](Self::from_tensors) does.
    ///
    /// ```
    /// # use blockflash_ops::{BlockColumns, BlockGeometry, BlockMask, Device, Tensor};
    /// let stream = Device::cpu().stream()?; // or of a GPU
    /// let tensor = |data: &[i32], shape: &[usize]| Tensor::from_slice(&stream, data, shape);
    /// // A causal mask of flex_attention: the diagonal is partial, what is below it is full.
    /// let counts = [tensor(&[1, 1, 1], &[1, 1, 3])?, tensor(&[0, 1, 2], &[1, 1, 3])?];
    /// let columns = [
    ///     tensor(&[0, 1, 2, 1, 0, 2, 2, 0, 1], &[1, 1, 3, 3])?,
    ///     tensor(&[0, 1, 2, 0, 1, 2, 0, 1, 2], &[1, 1, 3, 3])?,
    /// ];
    /// let lists = [0, 1].map(|i| BlockColumns { counts: &counts[i], columns: &columns[i] });
    /// let geometry = BlockGeometry::new(300, 300, 128, 128)?;
    /// let mask = BlockMask::from_columns(geometry, &lists, &stream)?;
    /// assert_eq!(mask.row(0, 0, 2)?.collect::<Vec<_>>(), [0, 1, 2]);
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`from_tensors`](Self::from_tensors);
    /// [`Error::InvalidBlockMask`](crate::Error::InvalidBlockMask) also if there are no lists.
    pub fn from_columns(
        geometry: BlockGeometry,
        lists: &[BlockColumns<'_>],
        stream: &Stream,
    ) -> Result<Self> {
        let Some(first) = lists.first() else {
            return invalid("there are 0 lists of columns, expected at least 1".into());
        };
        let sizes = sizes_of(geometry, "counts", first.counts)?;
        let (rows, cols) = (geometry.rows(), geometry.cols());
        let mut copies = Vec::with_capacity(lists.len());
        for BlockColumns { counts, columns } in lists {
            let most = columns.shape().last().copied().unwrap_or(0);
            let shape = [sizes.batch, sizes.heads, rows, most];
            let counts = download("counts", counts, &shape[..3], stream)?;
            copies.push((counts, download("columns", columns, &shape, stream)?, most));
        }
        let mut had = vec![0; cols];
        let mask = sizes.build(0, |group, row, out| {
            let at = group * rows + row;
            for (counts, columns, most) in &copies {
                let count = counts.view().as_slice::<i32>()?[at];
                if count < 0 || count as usize > *most {
                    let place = sizes.place(group, row);
                    return invalid(format!("count is {count} at {place}, not from 0 to {most}"));
                }
                let listed = columns.view().as_slice()?[at * most..][..count as usize].iter();
                sizes.take_columns(listed.enumerate(), [group, row], &mut had, out)?;
            }
            out.sort_unstable();
            Ok(())
        })?;
        mask.moved_to(stream)
    }

    /// This mask, which is on the CPU, on the stream's device.
    fn moved_to(self, stream: &Stream) -> Result<Self> {
        if stream.device().is_cpu() { Ok(self) } else { self.to(stream) }
    }
}

/// Takes the numbers of batch entries and heads from a tensor `[batch, heads, …]`.
fn sizes_of(geometry: BlockGeometry, what: &'static str, tensor: &Tensor) -> Result<Sizes> {
    match *tensor.shape() {
        [batch, heads, _] => Sizes::new(geometry, batch, heads),
        _ => Err(Operand::new(what, &tensor.view()).wrong_shape("three dimensions")),
    }
}

/// A copy on the CPU of an i32 tensor that has this shape and is on the stream's device.
fn download(
    what: &'static str,
    tensor: &Tensor,
    shape: &[usize],
    stream: &Stream,
) -> Result<Tensor> {
    let view = tensor.view();
    let operand = Operand::new(what, &view);
    operand.dtype_in(&[DType::I32])?;
    operand.shape_is(shape)?;
    operand.on(stream.device())?;
    Ok(tensor.copy_to(&Device::cpu().stream()?)?)
}

#[cfg(test)]
#[path = "from_tensors_tests.rs"]
mod tests;
