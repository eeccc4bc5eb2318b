//! What the CPU backends of decoding share: where the keys of a sequence are, and rotation.

use super::{CacheSizes, KvCache, Rotary, RotaryPairs};
use crate::Result;
use crate::attention::Strides;
use crate::float::Float;
use blockflash_safe::Stream;
use blockflash_sys::DType;
use half::{bf16, f16};

/// Table and lengths of a cache in host memory.
pub(crate) struct HostCache {
    pub(super) sizes: CacheSizes,
    /// Pages of all sequences, `[batch, max_pages]`, as they are stored.
    pub(super) table: Option<Vec<i32>>,
    pub(super) seqused_kv: Option<Vec<i32>>,
    /// Rows of page 0 before the keys of each sequence, and of all, where keys are packed. Checked.
    pub(super) offsets: Option<Vec<i32>>,
}

impl HostCache {
    pub(crate) fn new(cache: &KvCache<'_>, sizes: CacheSizes, stream: &Stream) -> Result<Self> {
        let read = |view: &blockflash_safe::View<'_>| view.to_vec::<i32>(stream);
        let table = cache.block_table.as_ref().map(read).transpose()?;
        let seqused_kv = cache.seqused_kv.as_ref().map(read).transpose()?;
        Ok(Self { sizes, table, seqused_kv, offsets: None })
    }

    /// Keys that are packed one sequence after another in the only page of a cache, at offsets that
    /// were checked.
    pub(crate) const fn packed(sizes: CacheSizes, offsets: Vec<i32>) -> Self {
        Self { sizes, table: None, seqused_kv: None, offsets: Some(offsets) }
    }

    /// The length of a sequence as it is stored, which may be anything.
    pub(crate) fn stored_length(&self, entry: usize) -> i64 {
        if let Some(offsets) = &self.offsets {
            return i64::from(offsets[entry + 1]) - i64::from(offsets[entry]);
        }
        let capacity = self.sizes.capacity as i64;
        self.seqused_kv.as_ref().map_or(capacity, |lengths| lengths[entry].into())
    }

    /// The length of a sequence, at most the capacity.
    pub(crate) fn length(&self, entry: usize) -> usize {
        self.stored_length(entry).clamp(0, self.sizes.capacity as i64) as usize
    }

    /// The page of a column of the table.
    pub(crate) fn page(&self, entry: usize, column: usize) -> usize {
        let (Some(table), Some(sizes)) = (&self.table, self.sizes.table) else { return entry };
        let stored = i64::from(table[entry * sizes.max_pages + column]);
        stored.clamp(0, self.sizes.pages as i64 - 1) as usize
    }

    /// Start of the row of a key below the capacity, of a tensor with these strides.
    pub(crate) fn row(&self, strides: Strides, [entry, key, head]: [usize; 3]) -> usize {
        let [page, slot] = self.slot(entry, key);
        page * strides.batch + slot * strides.seq + head * strides.head
    }

    /// The page and the slot of a key below the capacity.
    pub(crate) fn slot(&self, entry: usize, key: usize) -> [usize; 2] {
        if let Some(offsets) = &self.offsets {
            return [0, offsets[entry] as usize + key];
        }
        let page_size = self.sizes.page_size;
        [self.page(entry, key / page_size), key % page_size]
    }
}

/// The tables of a rotary embedding in f32.
pub(crate) struct HostRotary {
    /// `[positions, rotary_dim / 2]`
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
    pairs: RotaryPairs,
}

impl HostRotary {
    pub(crate) fn new(rotary: &Rotary<'_>, stream: &Stream) -> Result<Self> {
        let half = rotary.cos.shape()[1];
        let widened = |view: &blockflash_safe::View<'_>| -> Result<Vec<f32>> {
            Ok(match view.dtype() {
                DType::F16 => widen(&view.to_vec::<f16>(stream)?),
                DType::BF16 => widen(&view.to_vec::<bf16>(stream)?),
                _ => view.to_vec(stream)?,
            })
        };
        let (cos, sin) = (widened(&rotary.cos)?, widened(&rotary.sin)?);
        Ok(Self { cos, sin, half, pairs: rotary.pairs })
    }

    /// Turns a row at a position below the number of positions.
    pub(crate) fn turn(&self, row: &mut [f32], position: usize) {
        for i in 0..self.half {
            let at = position * self.half + i;
            let (cos, sin) = (self.cos[at], self.sin[at]);
            let [first, second] = match self.pairs {
                RotaryPairs::Halves => [i, i + self.half],
                RotaryPairs::Interleaved => [2 * i, 2 * i + 1],
            };
            let (x, y) = (row[first], row[second]);
            (row[first], row[second]) = (x * cos - y * sin, x * sin + y * cos);
        }
    }
}

fn widen<T: Float>(values: &[T]) -> Vec<f32> {
    let mut widened = vec![0.0; values.len()];
    T::widen(values, &mut widened);
    widened
}
