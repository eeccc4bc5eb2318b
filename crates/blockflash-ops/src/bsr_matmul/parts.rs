//! Long tiles in parts: several SMs compute a tile of C where few tiles, or one that is longer than
//! the others, would leave most SMs idle (split-K).

use crate::check::aligned;
use crate::{Error, Result};
use blockflash_safe::{BsrParts, BsrPartsMemory, Device, Stream, Tensor};
use blockflash_sys::DType;
use blockflash_sys::manifest::BsrMatmulHopper;
use blockflash_sys::params::BLOCKFLASH_BSR_SPLITS;

/// Maximum number of parts of a tile.
pub(super) const MOST_PARTS: usize = BLOCKFLASH_BSR_SPLITS as usize;

/// Workspace in which a [`BsrMatmul`](super::BsrMatmul) keeps the partial sums of tiles.
///
/// With it, several SMs compute each block row that is much longer than others, or each tile of a
/// product with few tiles (few columns of B). The sums are added in a fixed order, so results are
/// the same in every run. They may differ in the last bits from results without a workspace, which
/// are summed in one go. Kernels that cannot use it ignore it: the kernels for GPUs other than
/// Hopper, and the CPU, for which it allocates nothing.
///
/// Any number of calls, streams and captured graphs may share one, but they use it one after
/// another: a call, or a launch of a graph, waits on its stream for the work queued on the stream
/// that used the workspace last. Streams that should compute concurrently need a workspace each.
/// While that last stream is being captured, other streams get
/// [`InCapture`](blockflash_safe::Error::InCapture).
///
/// ```
/// # use blockflash_ops::{BsrMatmul, BsrMatrix, BsrWorkspace, DType, Device, View};
/// let stream = Device::cpu().stream()?;
/// let workspace = BsrWorkspace::new(&stream)?; // once, for all products
/// let a = BsrMatrix::from_coo(2, 3, 1, DType::F32, &[(0, 2, 5.0)])?;
/// let b = View::from_slice(&[1.0f32, 10.0, 100.0], &[3, 1])?;
/// let product = BsrMatmul { workspace: Some(&workspace), ..BsrMatmul::new(&a, b) };
/// assert_eq!(product.matmul(DType::F32, &stream)?.to_vec::<f32>(&stream)?, [500.0, 0.0]);
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
#[derive(Debug)]
pub struct BsrWorkspace {
    memory: BsrPartsMemory,
    /// Parts of the longest tile, instead of an estimate.
    asked: Option<usize>,
}

impl BsrWorkspace {
    /// Bytes of a workspace: room for the sums of 256 of the largest tiles.
    pub const BYTES: usize = 256 * (128 << 10) / Self::SUMS_PER_WORD * (Self::SUMS_PER_WORD + 1);
    /// Sums for each word that signals that sums are there: a warp that computes has at least as
    /// many, and one word.
    const SUMS_PER_WORD: usize = 1024;

    /// A workspace on the device of a stream.
    ///
    /// # Errors
    /// Out of memory, a stream that is being captured, or a failing device.
    pub fn new(stream: &Stream) -> Result<Self> {
        let bytes = if stream.device().is_cpu() { 0 } else { Self::BYTES };
        Self::from_tensor(Tensor::empty(stream, DType::U8, &[bytes])?)
    }

    /// A workspace in memory of the caller, for example of another library's allocator, of any
    /// element type and shape. It is set to zero, after all work that is queued with the tensor by
    /// now. [`BYTES`](Self::BYTES) are as many as [`new`](Self::new) allocates; with fewer, fewer
    /// tiles are computed in parts.
    ///
    /// # Errors
    /// [`Error::Misaligned`] for memory that does not start at a multiple of 16 bytes;
    /// [`InGraph`](blockflash_safe::Error::InGraph) for a tensor that a captured graph uses;
    /// [`InCapture`](blockflash_safe::Error::InCapture); a failing device.
    pub fn from_tensor(tensor: Tensor) -> Result<Self> {
        let view = tensor.view();
        aligned("workspace", &view)?;
        let all = view.layout().elements() * view.dtype().size() / size_of::<f32>();
        let words = all / (Self::SUMS_PER_WORD + 1);
        Ok(Self { memory: BsrPartsMemory::from_tensor(tensor, words)?, asked: None })
    }

    /// The same memory for products whose longest tile is computed in this many parts, up to 8,
    /// instead of the estimated number. There are fewer parts if the longest tile has fewer steps,
    /// or if there is no room for the sums. For tests and measurements.
    ///
    /// # Errors
    /// [`Error::TooLarge`] for more parts than kernels make.
    pub fn with_parts(self, parts: usize) -> Result<Self> {
        match parts {
            0..=MOST_PARTS => Ok(Self { asked: Some(parts), ..self }),
            _ => Err(Error::TooLarge { what: "parts", value: parts, limit: MOST_PARTS }),
        }
    }

    /// Where the memory is.
    pub fn device(&self) -> Device {
        self.memory.device()
    }

    pub(super) fn on(&self, expected: &Device) -> Result<()> {
        let (what, expected, found) = ("workspace", *expected, self.device());
        if expected == found {
            Ok(())
        } else {
            Err(Error::DeviceMismatch { what, expected, found })
        }
    }

    /// The parts of a product whose longest tile is estimated to need this many, at most as many as
    /// there is room for. None: tiles are whole.
    pub(super) fn parts(
        &self,
        tile: &BsrMatmulHopper,
        lengths: &Lengths,
        tiles_n: usize,
        estimate: usize,
    ) -> Option<BsrParts<'_>> {
        if !tile.splits() {
            return None;
        }
        let most = self.asked.unwrap_or(estimate);
        let per_tile = (tile.block_rows * tile.block_size * tile.block_n) as usize;
        let warps = tile.consumer_warps() as usize;
        let room = (self.memory.sums() / per_tile).min(self.memory.words() / warps);
        (2..=most.min(MOST_PARTS)).rev().find_map(|parts| {
            let (steps, begin) = lengths.cut(parts)?;
            let slots = (begin[0] as usize).checked_mul(tiles_n)?;
            (1..=room).contains(&slots).then_some(BsrParts { steps, begin, memory: &self.memory })
        })
    }
}

/// Lengths of tiles along K, in the order in which they are taken, in blocks or in stages of the
/// plan. It is an upper bound that never ascends, since tiles that share B well may come before
/// longer ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Lengths(Vec<i32>);

impl Lengths {
    /// Makes the bound from the length of each tile in this order.
    pub(super) fn new(mut lengths: Vec<i32>) -> Self {
        let mut longest = 0;
        for length in lengths.iter_mut().rev() {
            longest = longest.max(*length);
            *length = longest;
        }
        Self(lengths)
    }

    /// The lengths of the block rows of a pattern in this order.
    pub(super) fn of_rows(row_ptr: &[i32], order: &[i32]) -> Self {
        Self::new(
            order.iter().map(|&row| row_ptr[row as usize + 1] - row_ptr[row as usize]).collect(),
        )
    }

    /// The longest; 0 if there are none.
    pub(super) fn longest(&self) -> usize {
        self.0.first().map_or(0, |&length| length as usize)
    }

    /// How many come first that may have this length or more.
    pub(super) fn at_least(&self, length: usize) -> usize {
        self.0.partition_point(|&longest| longest as usize >= length)
    }

    /// The steps of a part if the longest tile has this many parts, and where the tiles that may
    /// have a part of each number begin: `split_k_begin` in `params.h`. `None` where the longest
    /// tile has fewer steps than parts.
    fn cut(&self, parts: usize) -> Option<(i32, [i32; MOST_PARTS])> {
        let longest = *self.0.first()?;
        if longest < parts as i32 {
            return None;
        }
        let steps = (longest - 1) / parts as i32 + 1;
        let mut begin = [0; MOST_PARTS];
        for part in (1..MOST_PARTS).rev() {
            let longer = self
                .0
                .partition_point(|&length| i64::from(length) > part as i64 * i64::from(steps));
            begin[part - 1] = begin[part] + longer as i32;
        }
        Some((steps, begin))
    }
}

#[cfg(test)]
#[path = "parts_tests.rs"]
mod tests;
