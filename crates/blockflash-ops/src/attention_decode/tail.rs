use super::AttentionDecodeProblem;
use crate::Result;
use crate::check::{Operand, to_i32};
use blockflash_safe::View;
use blockflash_sys::DType;

/// A mask of the last keys reduced to plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailMaskSizes {
    /// Its keys.
    pub tail: usize,
}

impl TailMaskSizes {
    /// The sizes, checked for a problem whose queries and cache are known.
    pub(super) fn of(view: &View<'_>, problem: &AttentionDecodeProblem) -> Result<Self> {
        let (mask, attention) = (Operand::new("tail_mask", view), &problem.attention);
        mask.dtype_in(&[DType::U8])?;
        let (batch, queries, capacity) =
            (attention.batch, attention.seqlen_q, problem.cache.capacity);
        let rows_fit = match (attention.packed, mask.shape) {
            (Some(packed), &[rows, _]) => rows == packed.total_q,
            (None, &[entries, rows, _]) => (entries == batch || entries == 1) && rows == queries,
            _ => false,
        };
        let tail = mask.shape.last().copied().unwrap_or(0);
        if !rows_fit || !(1..=capacity).contains(&tail) {
            return Err(mask.wrong_shape(match attention.packed {
                Some(packed) => format!("[{}, 1 to {capacity}]", packed.total_q),
                None => format!("[{batch} or 1, {queries}, 1 to {capacity}]"),
            }));
        }
        mask.last_dim_contiguous()?;
        to_i32("tail_mask", tail)?;
        Ok(Self { tail })
    }
}

/// A mask of the last keys in host memory.
pub(super) struct HostTail<'a> {
    entries: &'a [u8],
    /// From sequence to sequence, and from query to query.
    strides: [usize; 2],
    tail: usize,
}

impl<'a> HostTail<'a> {
    /// Of a view that was checked.
    pub(super) fn new(view: &View<'a>) -> Result<Self> {
        let stride = |dim: usize| if view.shape()[dim] == 1 { 0 } else { view.strides()[dim] };
        let strides = match view.shape().len() {
            2 => [0, stride(0)],
            _ => [stride(0), stride(1)],
        };
        let tail = view.shape()[view.shape().len() - 1];
        Ok(Self { entries: view.as_slice()?, strides, tail })
    }

    /// Whether query `row` of a sequence, of all packed ones if they are packed, sees a key of the
    /// sequence's `length`, which the ordinary mask shows.
    pub(super) fn shows(&self, [entry, row]: [usize; 2], key: usize, length: usize) -> bool {
        let Some(at) = (key + self.tail).checked_sub(length) else { return true };
        self.entries[entry * self.strides[0] + row * self.strides[1] + at] != 0
    }
}

#[cfg(test)]
#[path = "tail_tests.rs"]
mod tests;
