//! Arrays of a cache as the oracle takes packed sequences.

use crate::io::Array;
use blockflash_oracle::Elements;
use blockflash_sys::DType;
use std::ops::Range;

/// `[batch, queries, heads, head_dim]` as `[rows, heads, head_dim]`.
#[derive(Debug)]
pub(super) struct QueryRows<'a> {
    array: &'a Array,
    shape: [usize; 3],
}

/// `[pages, page_size, heads, head_dim]` as the rows in some of its slots.
#[derive(Debug)]
pub(super) struct CacheRows<'a> {
    array: &'a Array,
    shape: [usize; 3],
    slots: &'a [usize],
}

/// Heads and elements of a row of a head.
fn row(array: &Array) -> [usize; 2] {
    match *array.shape() {
        [_, _, heads, head_dim] => [heads, head_dim],
        _ => [0, 0],
    }
}

impl<'a> QueryRows<'a> {
    /// A view of an array.
    pub(super) fn new(array: &'a Array) -> Self {
        let [heads, head_dim] = row(array);
        let rows = array.len().checked_div(heads * head_dim).unwrap_or(0);
        Self { array, shape: [rows, heads, head_dim] }
    }
}

impl<'a> CacheRows<'a> {
    /// A view of an array.
    pub(super) fn new(array: &'a Array, slots: &'a [usize]) -> Self {
        let [heads, head_dim] = row(array);
        Self { array, shape: [slots.len(), heads, head_dim], slots }
    }
}

impl Elements for QueryRows<'_> {
    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn dtype(&self) -> DType {
        self.array.dtype()
    }

    fn to_f32(&self, range: Range<usize>) -> Vec<f32> {
        self.array.to_f32(range)
    }
}

impl Elements for CacheRows<'_> {
    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn dtype(&self) -> DType {
        self.array.dtype()
    }

    fn to_f32(&self, Range { mut start, end }: Range<usize>) -> Vec<f32> {
        let [rows, heads, head_dim] = self.shape;
        let width = heads * head_dim;
        if start > end || end > rows * width {
            return Vec::new();
        }
        let mut values = Vec::with_capacity(end - start);
        while start < end {
            let (row, column) = (start / width, start % width);
            let count = (width - column).min(end - start);
            let at = self.slots[row] * width + column;
            values.extend(self.array.to_f32(at..at + count));
            start += count;
        }
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_in_their_slots() {
        let values: Vec<f32> = (0..24).map(|at| at as f32).collect();
        let array = Array::new(&[2, 3, 2, 2], values).unwrap();
        let slots = [4, 0, 5];
        let rows = CacheRows::new(&array, &slots);
        assert_eq!((rows.shape(), rows.len()), (&[3, 2, 2][..], 12));
        assert_eq!(rows.to_f32(2..6), [18.0, 19.0, 0.0, 1.0]);
        assert_eq!(rows.to_f32(8..12), [20.0, 21.0, 22.0, 23.0]);
        assert!(rows.to_f32(8..13).is_empty());
        assert_eq!(QueryRows::new(&array).shape(), [6, 2, 2]);
    }
}
