//! A placement, and what it makes of a shape.

use blockflash_ops::{Major, Tensor, View, ViewMut};
use std::ops::Range;

/// A logical tensor inside a larger, contiguous physical one. The default, for any rank, is no gap
/// and the same order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Physical dimension `i` is logical dimension `order[i]`; empty: the same order.
    pub order: Vec<usize>,
    /// Elements before and after the tensor along each *logical* dimension; missing ones are 0.
    pub padding: Vec<(usize, usize)>,
}

impl Placement {
    /// A matrix without gaps whose rows or columns are contiguous.
    pub fn of_major(major: Major) -> Self {
        let order = if major == Major::Row { Vec::new() } else { vec![1, 0] };
        Self { order, padding: Vec::new() }
    }

    /// The placement of a tensor of this logical shape.
    pub fn place(&self, shape: &[usize]) -> Placed {
        let rank = shape.len();
        let order = if self.order.is_empty() { (0..rank).collect() } else { self.order.clone() };
        assert_eq!(order.len(), rank, "the order names each dimension once");
        let padding = |dim: usize| self.padding.get(dim).copied().unwrap_or((0, 0));
        let physical: Vec<usize> =
            order.iter().map(|&dim| padding(dim).0 + shape[dim] + padding(dim).1).collect();
        let ranges = order.iter().map(|&dim| padding(dim).0..padding(dim).0 + shape[dim]).collect();
        let permutation: Vec<usize> = (0..rank)
            .map(|dim| order.iter().position(|&d| d == dim).expect("a permutation"))
            .collect();
        let physical_stride = |at: usize| physical[at + 1..].iter().product::<usize>();
        let strides: Vec<usize> = permutation.iter().map(|&at| physical_stride(at)).collect();
        let origin = (0..rank).map(|dim| padding(dim).0 * strides[dim]).sum();
        Placed { physical, ranges, permutation, shape: shape.to_vec(), strides, origin }
    }
}

/// A placement that was applied to a shape.
#[derive(Clone, Debug)]
pub struct Placed {
    /// Shape of the physical tensor.
    pub physical: Vec<usize>,
    /// The part of each physical dimension that the logical tensor takes.
    pub ranges: Vec<Range<usize>>,
    /// For each logical dimension, its physical one: the permutation of the sliced physical tensor
    /// that gives the logical one.
    pub permutation: Vec<usize>,
    shape: Vec<usize>,
    strides: Vec<usize>,
    origin: usize,
}

impl Placed {
    /// The logical tensor inside of the physical one.
    ///
    /// # Errors
    /// If `tensor` has another shape than [`physical`](Self::physical).
    pub fn view<'a>(&self, tensor: &'a Tensor) -> blockflash_safe::Result<View<'a>> {
        let slice =
            |view: View<'a>, (dim, range): (usize, &Range<usize>)| view.slice(dim, range.clone());
        let inner = self.ranges.iter().enumerate().try_fold(tensor.view(), slice);
        inner?.permute(&self.permutation)
    }

    /// The same for writing.
    ///
    /// # Errors
    /// As for [`view`](Self::view).
    pub fn view_mut<'a>(&self, tensor: &'a mut Tensor) -> blockflash_safe::Result<ViewMut<'a>> {
        let slice = |view: ViewMut<'a>, (dim, range): (usize, &Range<usize>)| {
            view.slice(dim, range.clone())
        };
        let inner = self.ranges.iter().enumerate().try_fold(tensor.view_mut(), slice);
        inner?.permute(&self.permutation)
    }

    /// Shape of the logical tensor.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Whether the physical tensor is the logical one.
    pub fn is_whole(&self) -> bool {
        self.physical == self.shape && self.permutation.is_sorted()
    }

    /// Physical index of each logical element, in logical order.
    pub fn indices(&self) -> impl Iterator<Item = usize> + '_ {
        let inner = self.shape.last().copied().unwrap_or(1);
        let rows: usize = self.shape.iter().rev().skip(1).product();
        let rows = if inner == 0 { 0 } else { rows };
        (0..rows).flat_map(move |row| {
            let (mut rest, mut start) = (row, self.origin);
            for dim in (0..self.shape.len().saturating_sub(1)).rev() {
                start += rest % self.shape[dim] * self.strides[dim];
                rest /= self.shape[dim];
            }
            (0..inner).map(move |i| start + i * self.strides.last().copied().unwrap_or(1))
        })
    }

    /// A physical buffer that holds `logical`, and `filler` in every gap.
    pub fn scatter<T: Copy>(&self, logical: impl IntoIterator<Item = T>, filler: T) -> Vec<T> {
        let mut physical = vec![filler; self.physical.iter().product()];
        self.indices().zip(logical).for_each(|(at, value)| physical[at] = value);
        physical
    }

    /// The logical elements of a physical buffer.
    pub fn gather<T: Copy>(&self, physical: &[T]) -> Vec<T> {
        self.indices().map(|at| physical[at]).collect()
    }

    /// The first element of a gap that differs from `filler`.
    pub fn first_touched_gap<T: Copy + PartialEq>(
        &self,
        physical: &[T],
        filler: T,
    ) -> Option<usize> {
        let mut gap = vec![true; physical.len()];
        self.indices().for_each(|at| gap[at] = false);
        (0..physical.len()).find(|&at| gap[at] && physical[at] != filler)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scatter_and_gather_are_inverse_and_fill_the_gaps() {
        let placement =
            Placement { order: vec![0, 2, 1, 3], padding: vec![(0, 1), (2, 0), (0, 0), (8, 16)] };
        let shape = [2, 3, 5, 4];
        let placed = placement.place(&shape);
        assert_eq!(placed.physical, [3, 5, 5, 28]);
        let logical: Vec<u32> = (1..=120).collect();
        let mut physical = placed.scatter(logical.clone(), 0);
        assert_eq!(placed.gather(&physical), logical);
        assert_eq!(physical.iter().filter(|x| **x != 0).count(), 120);
        // logical [1, 2, 3, 1] is physical [1, 3, 2 + 2, 8 + 1]
        assert_eq!(physical[((5 + 3) * 5 + 4) * 28 + 9], logical[((3 + 2) * 5 + 3) * 4 + 1]);
        assert_eq!(placed.first_touched_gap(&physical, 0), None);
        physical[0] = 7;
        assert_eq!(placed.first_touched_gap(&physical, 0), Some(0));
    }

    #[test]
    fn empty_shapes_have_no_elements() {
        for shape in [[0, 3, 2], [2, 0, 3], [2, 3, 0]] {
            assert_eq!(Placement::default().place(&shape).indices().count(), 0);
        }
    }
}
