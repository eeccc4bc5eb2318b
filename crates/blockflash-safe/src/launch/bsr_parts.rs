//! Long tiles of BSR matmul in parts, and the memory for their sums.

use super::fit::pointer;
use crate::{DType, Device, Error, Result, Stream, Tensor, View};
use blockflash_sys::params::BLOCKFLASH_BSR_PARTS;

/// In which parts the long tiles of a BSR matmul are computed, and where their sums lie meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct BsrParts<'a> {
    /// Tiles of more blocks, or stages where the kernel has a plan of these, are computed in
    /// several parts. Positive.
    pub steps: i32,
    /// At `[p]` begin, in the order of all parts, the block rows (or their groups) that may have a
    /// part `p`: the first ones in `row_order`, as many as there are up to `[p - 1]`. Descends to
    /// zero. The caller knows that these are all that have one.
    pub begin: [i32; BLOCKFLASH_BSR_PARTS as usize],
    /// Room for `begin[0]·tiles_n` tiles.
    pub memory: &'a BsrPartsMemory,
}

/// Memory in which the multiprocessors that share a tile leave their sums, and words that say that
/// they are there.
///
/// A word that another launch resets would be waited for without end. So launches use it one after
/// another, whatever their streams: each waits for what the stream that used the memory last has
/// queued, and so does a [`Graph`](crate::Graph) with it.
#[derive(Debug)]
pub struct BsrPartsMemory {
    /// Sums, then words. Only kernels use it, and leave the words as zeros.
    memory: Tensor,
    sums: usize,
    words: usize,
}

impl BsrPartsMemory {
    /// Room for so many sums of 32 bits, as many as tiles have elements, and for so many words, one
    /// per warp that computes.
    ///
    /// # Errors
    /// As [`Tensor::zeros`].
    pub fn new(stream: &Stream, sums: usize, words: usize) -> Result<BsrPartsMemory> {
        let all = sums.checked_add(words).ok_or(Error::TooLarge)?;
        Ok(BsrPartsMemory {
            memory: Tensor::zeros_in_turns(stream, DType::I32, &[all])?,
            sums,
            words,
        })
    }

    /// Where it is.
    pub fn device(&self) -> Device {
        self.memory.device()
    }

    /// How many sums there is room for.
    pub fn sums(&self) -> usize {
        self.sums
    }

    /// How many words there is room for.
    pub fn words(&self) -> usize {
        self.words
    }

    pub(super) fn view(&self) -> View<'_> {
        self.memory.view()
    }

    pub(super) fn sums_pointer(&self) -> *mut f32 {
        pointer(&self.view()).cast_mut().cast()
    }

    pub(super) fn words_pointer(&self) -> *mut u32 {
        self.sums_pointer().wrapping_add(self.sums).cast()
    }
}
