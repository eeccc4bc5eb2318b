//! Long tiles of BSR matmul in parts, and the memory for their sums.

use super::fit::pointer;
use crate::view::Used;
use crate::{Device, Error, Result, Tensor, View};
use blockflash_sys::params::BLOCKFLASH_BSR_SPLITS;

/// How the long tiles of a BSR matmul are split into parts, and the memory for their partial sums.
#[derive(Clone, Copy, Debug)]
pub struct BsrParts<'a> {
    /// Tiles with more blocks than this are computed in several parts. Counted in stages for
    /// kernels that have a plan of stages. Positive.
    pub steps: i32,
    /// In the order of all parts, the parts `p` take the positions from `[p]` up to `[p - 1]`, one
    /// for each of the first block rows (or groups of them) in `row_order`. Descends to zero. The
    /// caller knows that no other block row has a part `p`.
    pub begin: [i32; BLOCKFLASH_BSR_SPLITS as usize],
    /// Room for `begin[0]·tiles_n` tiles.
    pub memory: &'a BsrPartsMemory,
}

/// Memory in which the SMs that share a tile leave their partial sums, and words that signal that
/// the sums are there.
///
/// A kernel would wait forever for a word that another launch resets. So launches use the memory
/// one after another, whatever their streams: each waits for everything queued on the stream that
/// used the memory last, and so does each launch of a [`Graph`](crate::Graph) that uses it.
#[derive(Debug)]
pub struct BsrPartsMemory {
    /// Sums, then words. Only kernels use the memory. Those of BSR matmul leave the words at zero;
    /// others use them as counters that tell the counts of other launches from theirs.
    memory: Tensor,
    sums: usize,
    words: usize,
}

impl BsrPartsMemory {
    /// The memory of a tensor of any element type: at its end `words` words, one per consumer warp
    /// of a tile, and before them partial sums of 32 bits, one per element of a tile. Whatever was
    /// queued with the tensor, on any stream, comes before its use here. If another library is
    /// capturing the only stream that has used the tensor, its graph contains the zeroing.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] for a tensor with fewer words; [`Error::InGraph`] if a captured graph
    /// uses the tensor; [`Error::InCapture`] while a stream that used it is captured;
    /// [`Error::Cuda`].
    pub fn from_tensor(tensor: Tensor, words: usize) -> Result<BsrPartsMemory> {
        let available = tensor.layout().elements() * tensor.dtype().size() / size_of::<u32>();
        let sums =
            available.checked_sub(words).ok_or(Error::OutOfBounds { needed: words, available })?;
        Ok(BsrPartsMemory { memory: tensor.into_turns()?, sums, words })
    }

    /// The device that holds the memory.
    pub fn device(&self) -> Device {
        self.memory.device()
    }

    /// Number of sums that fit.
    pub fn sums(&self) -> usize {
        self.sums
    }

    /// Number of words that fit.
    pub fn words(&self) -> usize {
        self.words
    }

    pub(super) fn view(&self) -> View<'_> {
        self.memory.view()
    }

    pub(super) fn used(&self) -> Used<'_> {
        self.memory.used()
    }

    pub(super) fn sums_pointer(&self) -> *mut f32 {
        pointer(&self.view()).cast_mut().cast()
    }

    /// Number of 64-bit counters that fit into the words, behind the two that number launches; 0 if
    /// the words are not aligned to 16 bytes.
    pub(super) fn counters(&self) -> usize {
        if self.words_pointer().addr().is_multiple_of(16) {
            (self.words / 2).saturating_sub(2)
        } else {
            0
        }
    }

    pub(super) fn counters_pointer(&self) -> *mut u64 {
        self.words_pointer().cast()
    }

    pub(super) fn words_pointer(&self) -> *mut u32 {
        self.sums_pointer().wrapping_add(self.sums).cast()
    }
}
