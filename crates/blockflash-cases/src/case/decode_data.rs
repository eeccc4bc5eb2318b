//! The data of a call of attention to a cache.

use super::decode_pages::Chosen;
use crate::error::{Error, Result};
use crate::io::Array;
use crate::random;

/// Most elements of keys, and as many of values, that are drawn. A larger cache repeats its pages
/// (or sequences), of which an odd number is drawn: 17 GB of numbers take half a minute.
const MOST_DRAWN: usize = 1 << 28;

/// How many of these pages are drawn.
pub(super) fn drawn_pages(pages: usize, elements_per_page: usize) -> usize {
    match MOST_DRAWN / elements_per_page.max(1) {
        most if most >= pages => pages,
        most => most.saturating_sub(1) | 1,
    }
}

/// The pages of all sequences in a random order.
pub(super) fn shuffled(pages: usize, seed: u64) -> Vec<i32> {
    let mut table: Vec<_> = (0..pages as i32).collect();
    random::shuffle(&mut table, seed);
    table
}

/// The values of a cache.
#[derive(Clone, Copy, Debug)]
pub enum CacheValues<T> {
    /// A tensor of their own.
    Own(T),
    /// This many first columns of the keys.
    FirstColumns(usize),
}

impl<T> CacheValues<T> {
    /// The same with what `make` turns their tensor into.
    pub(super) fn try_map<U, E>(
        self,
        make: impl FnOnce(T) -> Result<U, E>,
    ) -> Result<CacheValues<U>, E> {
        Ok(match self {
            Self::Own(tensor) => CacheValues::Own(make(tensor)?),
            Self::FirstColumns(columns) => CacheValues::FirstColumns(columns),
        })
    }

    /// The same with a borrowed tensor.
    pub(super) fn as_ref(&self) -> CacheValues<&T> {
        match self {
            Self::Own(tensor) => CacheValues::Own(tensor),
            &Self::FirstColumns(columns) => CacheValues::FirstColumns(columns),
        }
    }
}

/// The data of one call, in host memory.
#[derive(Debug)]
pub struct DecodeData {
    /// `[batch, queries, heads, head_dim]`.
    pub q: Array,
    /// Keys `[pages, page_size, heads_kv, head_dim]`; without a table, a page is a sequence.
    pub k: Array,
    /// Shape of `k` but for the last size.
    pub v: CacheValues<Array>,
    /// Scales of keys and of values if they are codes, f32 `[1]` or `[batch, heads_kv]`.
    pub scales: [Option<Array>; 2],
    /// Pages of the cache: more than `k` and `v` have if theirs are repeated.
    pub pages: usize,
    /// i32 `[batch, pages of a sequence]`.
    pub block_table: Option<Array>,
    /// i32 `[batch]`: keys of each sequence; `None`: all that there is room for.
    pub seqused_kv: Option<Array>,
    /// Pages that each sequence visits.
    pub chosen: Chosen,
    /// Seed of the block tables of further copies.
    pub seed: u64,
}

impl DecodeData {
    /// Sequences, and the slots of a page and of a sequence.
    fn sizes(&self) -> Result<[usize; 3]> {
        let &[_, page_size, _, _] = self.k.shape() else {
            let text = format!("k is {:?}, expected four sizes", self.k.shape());
            return Err(Error::Option(text));
        };
        match self.block_table.as_ref().map(Array::shape) {
            None => Ok([self.pages, page_size, page_size]),
            Some(&[batch, columns]) => Ok([batch, page_size, columns.saturating_mul(page_size)]),
            Some(shape) => {
                let text = format!("the block table is {shape:?}, expected [batch, pages]");
                Err(Error::Option(text))
            }
        }
    }

    /// Keys of each sequence.
    fn lengths(&self) -> Result<Vec<usize>> {
        let [batch, _, capacity] = self.sizes()?;
        let Some(array) = &self.seqused_kv else { return Ok(vec![capacity; batch]) };
        let entries = array.as_i32().filter(|_| array.shape() == [batch]).ok_or_else(|| {
            Error::Option(format!("the lengths are {:?}, expected [{batch}]", array.shape()))
        })?;
        let length = |(entry, &length): (usize, &i32)| {
            usize::try_from(length).ok().filter(|&length| length <= capacity).ok_or_else(|| {
                let text = format!("sequence {entry} has {length} keys, expected 0 to {capacity}");
                Error::Option(text)
            })
        };
        entries.iter().enumerate().map(length).collect()
    }

    /// Where the keys that each sequence may visit are stored in `k`, one sequence behind the
    /// other, and how many they are. The library takes any entry of the table for some page; here
    /// one that is none is a mistake.
    pub(super) fn visited(&self) -> Result<(Vec<usize>, Vec<usize>)> {
        let ([batch, page_size, capacity], lengths) = (self.sizes()?, self.lengths()?);
        let columns = capacity / page_size.max(1);
        let table = self.block_table.as_ref().map(|table| table.as_i32().unwrap_or_default());
        let page = |entry: usize, column: usize| {
            let Some(table) = table else { return Ok(entry) };
            let page = table[entry * columns + column];
            usize::try_from(page).ok().filter(|&page| page < self.pages).ok_or_else(|| {
                Error::Option(format!(
                    "page {column} of sequence {entry} is {page}, but there are {}",
                    self.pages
                ))
            })
        };
        let (mut slots, mut counts) = (Vec::new(), Vec::with_capacity(batch));
        let stored = self.k.shape()[0].max(1);
        for (entry, &length) in lengths.iter().enumerate() {
            let (all, before) = (0..length.div_ceil(page_size.max(1)), slots.len());
            let columns = match &self.chosen {
                Chosen::Columns(chosen) => chosen[entry].clone(),
                Chosen::All | Chosen::Selected(_) => all.collect(),
            };
            for column in columns {
                let first = page(entry, column)? % stored * page_size;
                let used = page_size.min(length.saturating_sub(column * page_size));
                slots.extend(first..first + used);
            }
            counts.push(slots.len() - before);
        }
        Ok((slots, counts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_odd_number_of_pages_is_drawn_of_large_caches() {
        assert_eq!([drawn_pages(7, 1 << 20), drawn_pages(256, 1 << 20)], [7, 256]);
        assert_eq!([drawn_pages(257, 1 << 20), drawn_pages(300, 1 << 29)], [255, 1]);
    }
}
