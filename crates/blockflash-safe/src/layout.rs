use crate::overlap::overlaps_itself;
use crate::{Error, Result};
use std::ops::Range;

/// The largest number of dimensions of a tensor.
pub const MAX_RANK: usize = 4;

/// No tensor spans more elements than this, so that offsets in bytes fit into `isize` for every
/// element type.
const MAX_SPAN: usize = isize::MAX as usize / 4;

/// Shape and strides of a tensor, in elements. A plain value: no allocation.
///
/// Element `[i, j, …]` is at offset `i * strides[0] + j * strides[1] + …` from the first one.
/// Strides are not negative; a stride of 0 repeats an element. All offsets are known to fit into 63
/// bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Layout {
    // Entries from `rank` on are 0, so that the derived equality ignores them.
    shape: [usize; MAX_RANK],
    strides: [usize; MAX_RANK],
    rank: usize,
}

impl Layout {
    /// Row-major: the last dimension is contiguous.
    ///
    /// # Errors
    /// [`Error::Rank`], [`Error::TooLarge`].
    pub fn contiguous(shape: &[usize]) -> Result<Layout> {
        let mut strides = [0; MAX_RANK];
        if shape.len() > MAX_RANK {
            return Err(Error::Rank { expected: 0..=MAX_RANK, found: shape.len() });
        }
        let mut next = 1usize;
        for dim in (0..shape.len()).rev() {
            strides[dim] = next;
            next = next.checked_mul(shape[dim].max(1)).ok_or(Error::TooLarge)?;
        }
        Layout::strided(shape, &strides[..shape.len()])
    }

    /// Any strides, in elements.
    ///
    /// # Errors
    /// [`Error::Rank`], [`Error::ShapeStrides`], [`Error::TooLarge`].
    pub fn strided(shape: &[usize], strides: &[usize]) -> Result<Layout> {
        if shape.len() > MAX_RANK {
            return Err(Error::Rank { expected: 0..=MAX_RANK, found: shape.len() });
        }
        if shape.len() != strides.len() {
            return Err(Error::ShapeStrides { shape: shape.len(), strides: strides.len() });
        }
        let empty = shape.contains(&0);
        let mut elements = 1usize;
        let mut last = 0usize;
        for (&size, &stride) in shape.iter().zip(strides) {
            // The strides of an empty tensor are never used. All other strides must not overflow
            // below.
            let reach = if empty { Some(0) } else { (size - 1).checked_mul(stride) };
            let last_element = reach.and_then(|reach| last.checked_add(reach));
            // Not `ok_or`, which would make and drop an error for each dimension of each operand.
            let (Some(offset), Some(count)) = (last_element, elements.checked_mul(size.max(1)))
            else {
                return Err(Error::TooLarge);
            };
            (last, elements) = (offset, count);
        }
        if last >= MAX_SPAN || elements > MAX_SPAN {
            return Err(Error::TooLarge);
        }
        let mut layout = Layout { shape: [0; MAX_RANK], strides: [0; MAX_RANK], rank: shape.len() };
        layout.shape[..shape.len()].copy_from_slice(shape);
        layout.strides[..shape.len()].copy_from_slice(strides);
        Ok(layout)
    }

    /// Sizes of the dimensions.
    #[inline]
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// Elements between neighbours along each dimension.
    #[inline]
    pub fn strides(&self) -> &[usize] {
        &self.strides[..self.rank]
    }

    /// Sizes and strides, with zeros behind them.
    #[inline]
    pub(crate) fn padded(&self) -> [&[usize; MAX_RANK]; 2] {
        [&self.shape, &self.strides]
    }

    /// Number of dimensions; 0 is a single element.
    #[inline]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// Whether a dimension is 0.
    pub fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    /// Elements of memory from the first element to the last one, both included; 0 when there are
    /// none.
    #[inline]
    pub fn span(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        1 + self
            .shape()
            .iter()
            .zip(self.strides())
            .map(|(size, stride)| (size - 1) * stride)
            .sum::<usize>()
    }

    /// Whether the elements are in memory in row-major order without gaps. Strides of dimensions of
    /// size 1 do not matter.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        for (&size, &stride) in self.shape().iter().zip(self.strides()).rev() {
            if size != 1 && stride != expected && !self.is_empty() {
                return false;
            }
            expected *= size;
        }
        true
    }

    /// Whether two different indices may name the same element. Such a tensor cannot be written.
    ///
    /// Exact, but for strides that have nothing to do with each other over very many elements:
    /// where some thousands of steps decide nothing, a layout counts as overlapping.
    pub fn overlaps_itself(&self) -> bool {
        if self.is_empty() {
            return false;
        }
        let mut dims: [(usize, usize); MAX_RANK] = [(0, 1); MAX_RANK];
        for (dim, (&size, &stride)) in dims.iter_mut().zip(self.shape().iter().zip(self.strides()))
        {
            *dim = (stride, size);
        }
        dims.sort_unstable();
        // Nearly always, each stride steps over everything that the smaller strides reach.
        let mut reach = 0;
        for (stride, size) in dims.into_iter().filter(|&(_, size)| size > 1) {
            if stride <= reach {
                return overlaps_itself(self);
            }
            reach += (size - 1) * stride;
        }
        false
    }

    /// The same elements with dimension `order[i]` in place `i`.
    ///
    /// # Errors
    /// [`Error::Permutation`].
    pub fn permute(&self, order: &[usize]) -> Result<Layout> {
        let mut seen = [false; MAX_RANK];
        let valid = order.len() == self.rank
            && order.iter().all(|&dim| dim < self.rank && !std::mem::replace(&mut seen[dim], true));
        if !valid {
            return Err(Error::Permutation { order: order.to_vec(), rank: self.rank });
        }
        let mut permuted = *self;
        for (place, &dim) in order.iter().enumerate() {
            permuted.shape[place] = self.shape[dim];
            permuted.strides[place] = self.strides[dim];
        }
        Ok(permuted)
    }

    /// The indices `range` of dimension `dim`: the layout of that part, and the offset of its first
    /// element.
    ///
    /// # Errors
    /// [`Error::Slice`].
    pub fn slice(&self, dim: usize, range: Range<usize>) -> Result<(Layout, usize)> {
        if dim >= self.rank || range.start > range.end || range.end > self.shape[dim] {
            let shape = self.shape().to_vec();
            return Err(Error::Slice { dim, start: range.start, end: range.end, shape });
        }
        let mut part = *self;
        part.shape[dim] = range.len();
        // An empty part has no first element; offset 0 keeps its pointer inside the memory.
        let offset = if part.is_empty() { 0 } else { range.start * self.strides[dim] };
        Ok((part, offset))
    }

    /// Merges the dimensions `dims` into one, in row-major order: `[batch, k, n]` with `0..2`
    /// becomes `[batch * k, n]`. Each dimension must continue where the next inner one ends.
    /// Strides of dimensions of size 1 do not matter, and no stride does if there are no elements.
    ///
    /// # Errors
    /// [`Error::Flatten`].
    pub fn flatten(&self, dims: Range<usize>) -> Result<Layout> {
        let refused = || {
            let (shape, strides) = (self.shape().to_vec(), self.strides().to_vec());
            Error::Flatten { start: dims.start, end: dims.end, shape, strides }
        };
        if dims.start >= dims.end || dims.end > self.rank {
            return Err(refused());
        }
        let (mut size, mut stride) = (1, None);
        for dim in dims.clone().rev() {
            let step = self.strides[dim];
            if !self.is_empty()
                && self.shape[dim] != 1
                && *stride.get_or_insert(step) * size != step
            {
                return Err(refused());
            }
            size *= self.shape[dim];
        }
        let (mut shape, mut strides) = (self.shape, self.strides);
        (shape[dims.start], strides[dims.start]) = (size, stride.unwrap_or(strides[dims.end - 1]));
        shape.copy_within(dims.end.., dims.start + 1);
        strides.copy_within(dims.end.., dims.start + 1);
        let rank = self.rank + 1 - dims.len();
        Layout::strided(&shape[..rank], &strides[..rank])
    }

    /// Divides dimension `dim` into two, the inner one of `inner` elements: `[rows, 8 * 16]` with 1
    /// and 16 becomes `[rows, 8, 16]`.
    ///
    /// # Errors
    /// [`Error::Expand`] for a dimension that there is not, or of another size than a multiple of
    /// `inner`; [`Error::Rank`] beyond [`MAX_RANK`].
    pub fn unflatten(&self, dim: usize, inner: usize) -> Result<Layout> {
        let (mut shape, mut strides) = (self.shape().to_vec(), self.strides().to_vec());
        if dim >= self.rank || inner == 0 || !shape[dim].is_multiple_of(inner) {
            return Err(Error::Expand { dim, shape });
        }
        shape.splice(dim..=dim, [shape[dim] / inner, inner]);
        strides.splice(dim..=dim, [strides[dim].saturating_mul(inner), strides[dim]]);
        Layout::strided(&shape, &strides)
    }

    /// The same elements with another dimension of size 1 before dimension `dim`, or behind all.
    ///
    /// # Errors
    /// [`Error::Expand`] for a `dim` beyond the rank, [`Error::Rank`] beyond [`MAX_RANK`].
    pub fn insert(&self, dim: usize) -> Result<Layout> {
        let (mut shape, mut strides) = (self.shape().to_vec(), self.strides().to_vec());
        if dim > self.rank {
            return Err(Error::Expand { dim, shape });
        }
        let stride = shape.get(dim).map_or(1, |size| size.saturating_mul(strides[dim]));
        shape.insert(dim, 1);
        strides.insert(dim, stride);
        Layout::strided(&shape, &strides)
    }

    /// Dimension `dim`, of size 1, repeated `size` times by a stride of 0.
    ///
    /// # Errors
    /// [`Error::Expand`], [`Error::TooLarge`].
    pub fn expand(&self, dim: usize, size: usize) -> Result<Layout> {
        if self.shape().get(dim) != Some(&1) {
            return Err(Error::Expand { dim, shape: self.shape().to_vec() });
        }
        let (mut shape, mut strides) = (self.shape, self.strides);
        (shape[dim], strides[dim]) = (size, 0);
        Layout::strided(&shape[..self.rank], &strides[..self.rank])
    }

    /// Offsets of all elements in row-major order of their indices.
    pub fn offsets(&self) -> impl Iterator<Item = usize> + use<> {
        let layout = *self;
        (0..layout.elements()).map(move |index| {
            let mut rest = index;
            let mut offset = 0;
            for dim in (0..layout.rank).rev() {
                offset += rest % layout.shape[dim] * layout.strides[dim];
                rest /= layout.shape[dim];
            }
            offset
        })
    }
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
