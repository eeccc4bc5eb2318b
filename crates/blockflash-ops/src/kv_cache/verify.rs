//! Verification of lengths and tables that kernels clamp.

use super::{HostCache, HostScale, KvCache};
use crate::{Error, Result};
use blockflash_safe::Stream;
use std::collections::HashMap;
use std::ops::Range;

impl HostCache {
    /// Whether kernels read lengths, a table or scales at all.
    pub(crate) fn has_data(sizes: &super::CacheSizes) -> bool {
        let scaled = sizes.k_scale.is_some() || sizes.v_scale.is_some();
        sizes.seqused_kv || sizes.table.is_some() || scaled
    }

    /// Verifies that the scales of all keys are finite and positive, apart from those that an
    /// append `chooses` for the last `tokens` of each sequence.
    pub(crate) fn verify_scales(
        &self,
        cache: &KvCache<'_>,
        chooses: [bool; 2],
        tokens: impl Fn(usize) -> usize,
        stream: &Stream,
    ) -> Result<()> {
        let scales = HostScale::both([cache.k_scale, cache.v_scale], &self.sizes, stream)?;
        for (scale, chosen) in scales.iter().zip(chooses) {
            let Some(scale) = scale else { continue };
            for entry in 0..self.sizes.batch {
                let new = if chosen { tokens(entry) } else { 0 };
                let old = self.length(entry).saturating_sub(new);
                let [keys, heads] = scale.unequal(old, self.sizes.num_heads_kv);
                for key in 0..keys {
                    let slot = self.slot(entry, key);
                    (0..heads).try_for_each(|head| scale.verify(entry, slot, head))?;
                }
            }
        }
        Ok(())
    }

    /// Verifies that every length is within the capacity, and that the pages of all keys exist.
    pub(crate) fn verify(&self) -> Result<()> {
        (0..self.sizes.batch).try_for_each(|entry| {
            let length = self.stored_length(entry);
            if length < 0 {
                return Err(self.wrong_length(entry, "a length must not be negative".into()));
            }
            if length > self.sizes.capacity as i64 {
                return Err(self.wrong_length(entry, self.capacity()));
            }
            self.verify_pages(entry)
        })
    }

    /// Verifies the entries of the table that belong to keys of a sequence.
    fn verify_pages(&self, entry: usize) -> Result<()> {
        let (Some(table), Some(of)) = (&self.table, self.sizes.table) else { return Ok(()) };
        let used = self.length(entry).div_ceil(self.sizes.page_size);
        let stored = &table[entry * of.max_pages..][..used];
        let pages = self.sizes.pages;
        let exists = |page: i32| usize::try_from(page).is_ok_and(|page| page < pages);
        match stored.iter().position(|&page| !exists(page)) {
            None => Ok(()),
            Some(column) => Err(Error::InvalidData {
                what: "cache.block_table",
                index: vec![entry, column],
                value: stored[column],
                problem: format!("the cache has {pages} pages"),
            }),
        }
    }

    /// Verifies, for a cache that was verified, that lengths count the tokens to be appended, and
    /// that no slot is written twice.
    pub(crate) fn verify_append(&self, tokens: &[Range<usize>]) -> Result<()> {
        let page_size = self.sizes.page_size;
        let mut written = HashMap::new();
        for (entry, tokens) in tokens.iter().enumerate().filter(|(_, tokens)| !tokens.is_empty()) {
            let (length, count) = (self.length(entry), tokens.len());
            if count > length {
                let problem = format!("lengths count the {count} tokens that are appended");
                return Err(self.wrong_length(entry, problem));
            }
            let first = length - count;
            for column in first / page_size..length.div_ceil(page_size) {
                let start = column * page_size;
                let slots = first.max(start) - start..length.min(start + page_size) - start;
                let others: &mut Vec<(usize, Range<usize>)> =
                    written.entry(self.page(entry, column)).or_default();
                let overlaps =
                    |other: &Range<usize>| other.start < slots.end && slots.start < other.end;
                if let Some((other, _)) = others.iter().find(|(_, range)| overlaps(range)) {
                    let problem = format!(
                        "sequence {other} also appends to slots {slots:?} of this page, which \
                         would hold the tokens of either"
                    );
                    return Err(Error::InvalidData {
                        what: "cache.block_table",
                        index: vec![entry, column],
                        value: self.page(entry, column) as i32,
                        problem,
                    });
                }
                others.push((entry, slots));
            }
        }
        Ok(())
    }

    fn wrong_length(&self, entry: usize, problem: String) -> Error {
        let value = self.stored_length(entry) as i32;
        Error::InvalidData { what: "cache.seqused_kv", index: vec![entry], value, problem }
    }

    fn capacity(&self) -> String {
        let (capacity, page_size) = (self.sizes.capacity, self.sizes.page_size);
        match self.sizes.table {
            None => format!("the capacity is {capacity}"),
            Some(table) => {
                let pages = table.max_pages;
                format!("the capacity is {capacity}, {pages} pages of {page_size} slots")
            }
        }
    }
}
