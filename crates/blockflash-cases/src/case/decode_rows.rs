//! Arrays of a cache as the oracle takes packed sequences.

use crate::io::Array;
use blockflash_oracle::Elements;
use blockflash_sys::DType;
use std::ops::Range;

/// `[…, …, heads, head_dim]` as `[rows, heads, head_dim]`.
#[derive(Debug)]
pub(super) struct Rows<'a> {
    array: &'a Array,
    shape: [usize; 3],
    /// Elements from one head to the next.
    stored: usize,
    /// Where each row is stored; `None`: all of them in their order.
    slots: Option<&'a [usize]>,
    codes: Option<Codes>,
}

/// What rows of codes are multiplied with.
#[derive(Debug)]
struct Codes {
    /// The type by which the oracle judges what is computed of them: codes are exact in it.
    dtype: DType,
    /// One for each row and head.
    scales: Vec<f32>,
}

impl<'a> Rows<'a> {
    /// All rows of queries `[batch, queries, heads, head_dim]`.
    pub(super) fn of_queries(array: &'a Array) -> Self {
        let all = array.shape().iter().take(2).product();
        Self::new(array, all, None)
    }

    /// The rows in some slots of a cache `[pages, page_size, heads, head_dim]`.
    pub(super) fn of_cache(array: &'a Array, slots: &'a [usize]) -> Self {
        Self::new(array, slots.len(), Some(slots))
    }

    /// The first columns of the same rows.
    pub(super) fn columns(self, columns: usize) -> Self {
        let [rows, heads, head_dim] = self.shape;
        Self { shape: [rows, heads, columns.min(head_dim)], ..self }
    }

    /// The same rows, of codes of sequences that have `counts` rows, times their scales, `[1]` or
    /// `[batch, heads]`.
    pub(super) fn of_codes(self, dtype: DType, scales: Option<&Array>, counts: &[usize]) -> Self {
        let heads = self.shape[1];
        let values = scales.map_or(vec![1.0], |scales| scales.to_f32(0..scales.len()));
        let scale = |entry: usize, head: usize| match values.len() {
            1 => values[0],
            _ => values[entry * heads + head],
        };
        let of_entry = |(entry, &rows): (usize, &usize)| {
            let row: Vec<f32> = (0..heads).map(|head| scale(entry, head)).collect();
            row.repeat(rows)
        };
        let scales = counts.iter().enumerate().flat_map(of_entry).collect();
        Self { codes: Some(Codes { dtype, scales }), ..self }
    }

    fn new(array: &'a Array, rows: usize, slots: Option<&'a [usize]>) -> Self {
        let shape = match *array.shape() {
            [_, _, heads, head_dim] => [rows, heads, head_dim],
            _ => [0; 3],
        };
        Self { array, shape, stored: shape[2], slots, codes: None }
    }
}

impl Elements for Rows<'_> {
    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn dtype(&self) -> DType {
        self.codes.as_ref().map_or_else(|| self.array.dtype(), |codes| codes.dtype)
    }

    fn to_f32(&self, Range { mut start, end }: Range<usize>) -> Vec<f32> {
        let [rows, heads, head_dim] = self.shape;
        let width = heads * head_dim;
        if start > end || end > rows * width {
            return Vec::new();
        }
        let Some(slots) = self.slots else { return self.array.to_f32(start..end) };
        let mut values = Vec::with_capacity(end - start);
        while start < end {
            let (row, column) = (start / width, start % width);
            let (head, in_head) = (column / head_dim, column % head_dim);
            // Rows without gaps are read as a whole.
            let whole = if head_dim == self.stored { width - column } else { head_dim - in_head };
            let count = whole.min(end - start);
            let at = (slots[row] * heads + head) * self.stored + in_head;
            let found = self.array.to_f32(at..at + count).into_iter();
            match &self.codes {
                None => values.extend(found),
                Some(Codes { scales, .. }) => values.extend(
                    found
                        .zip(column..)
                        .map(|(x, column)| x * scales[row * heads + column / head_dim]),
                ),
            }
            start += count;
        }
        values
    }
}

/// Elements of several pieces, side by side, as `[rows, heads, width]`.
#[derive(Debug)]
pub(super) struct Gathered {
    shape: [usize; 3],
    values: Vec<f32>,
    /// The type by which the oracle judges.
    dtype: DType,
}

impl Gathered {
    pub(super) fn new(
        of: &dyn Elements,
        pieces: impl Iterator<Item = usize>,
        [heads, width]: [usize; 2],
    ) -> Self {
        let piece = |first| of.to_f32(first..first + heads * width);
        let values: Vec<f32> = pieces.flat_map(piece).collect();
        let shape = [values.len() / (heads * width).max(1), heads, width];
        Self { shape, values, dtype: of.dtype() }
    }
}

impl Elements for Gathered {
    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn to_f32(&self, range: Range<usize>) -> Vec<f32> {
        self.values.get(range).unwrap_or_default().to_vec()
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
        let rows = Rows::of_cache(&array, &slots);
        assert_eq!((rows.shape(), rows.len()), (&[3, 2, 2][..], 12));
        assert_eq!(rows.to_f32(2..6), [18.0, 19.0, 0.0, 1.0]);
        assert_eq!(rows.to_f32(8..12), [20.0, 21.0, 22.0, 23.0]);
        assert!(rows.to_f32(8..13).is_empty());
        let first = Rows::of_cache(&array, &slots).columns(1);
        assert_eq!((first.shape(), first.len()), (&[3, 2, 1][..], 6));
        assert_eq!(first.to_f32(1..5), [18.0, 0.0, 2.0, 20.0]);
        assert_eq!(Rows::of_queries(&array).shape(), [6, 2, 2]);
        // Sequences of two rows and one, with two heads.
        let scales = Array::new(&[2, 2], vec![2f32, 3.0, 5.0, 7.0]).unwrap();
        let codes = Rows::of_cache(&array, &slots).of_codes(DType::BF16, Some(&scales), &[2, 1]);
        assert_eq!(codes.dtype(), DType::BF16);
        assert_eq!(codes.to_f32(2..6), [54.0, 57.0, 0.0, 2.0]);
        assert_eq!(codes.to_f32(8..12), [100.0, 105.0, 154.0, 161.0]);
    }
}
