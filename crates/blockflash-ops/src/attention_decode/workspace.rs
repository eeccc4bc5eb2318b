use crate::check::aligned;
use crate::{Error, Result};
use blockflash_safe::{BsrPartsMemory, Device, Stream, Tensor};
use blockflash_sys::DType;

/// Workspace in which the kernels of [`AttentionDecode`](super::AttentionDecode) keep the results
/// of parts of a sequence until the last one arrives, which adds them up in a fixed order, and in
/// which those of [`ChoosePages`](crate::ChoosePages) keep the scores of pages.
///
/// Any number of calls, streams and captured graphs may share one, but they use it one after
/// another: a call, or a launch of a graph, waits on its stream for the work queued on the stream
/// that used the workspace last. Streams that should compute concurrently need a workspace each.
/// While that last stream is being captured, other streams get
/// [`InCapture`](blockflash_safe::Error::InCapture). The CPU ignores it.
///
/// Kernels count the parts of a sequence by its length. If lengths, offsets or page counts on the
/// device change while a call runs, its outputs are unspecified; those of later calls are not. No
/// call reads or writes outside its tensors.
#[derive(Debug)]
pub struct AttentionDecodeWorkspace {
    memory: BsrPartsMemory,
    bytes: usize,
}

impl AttentionDecodeWorkspace {
    /// Numbers for each counter of parts: about as many as the smallest part has in practice.
    const SUMS_PER_COUNTER: usize = 64;
    /// A counter has 64 bits, and two more number the launches.
    const WORDS_PER_COUNTER: usize = 2;

    /// A workspace on the device of a stream. [`AttentionDecode::workspace_bytes`] says how many
    /// bytes a call needs.
    ///
    /// # Errors
    /// Out of memory, a stream that is being captured, or a failing device.
    ///
    /// [`AttentionDecode::workspace_bytes`]: super::AttentionDecode::workspace_bytes
    pub fn new(stream: &Stream, bytes: usize) -> Result<Self> {
        Self::from_tensor(Tensor::empty(stream, DType::U8, &[bytes])?)
    }

    /// A workspace in memory of the caller, for example of another library's allocator, of any
    /// element type and shape. It is set to zero, after all work that is queued with the tensor by
    /// now; a graph that another library is capturing on the tensor's only stream contains that.
    ///
    /// # Errors
    /// [`Error::Misaligned`] for memory that does not start at a multiple of 16 bytes;
    /// [`InGraph`](blockflash_safe::Error::InGraph) for a tensor that a captured graph uses;
    /// [`InCapture`](blockflash_safe::Error::InCapture); a failing device.
    pub fn from_tensor(tensor: Tensor) -> Result<Self> {
        let view = tensor.view();
        aligned("workspace", &view)?;
        let bytes = view.layout().elements() * view.dtype().size();
        let available = bytes / size_of::<f32>();
        let counters = available / (Self::SUMS_PER_COUNTER + Self::WORDS_PER_COUNTER);
        // Counters are aligned to 16 bytes if the numbers before them are a multiple of four.
        let words = counters * Self::WORDS_PER_COUNTER;
        let words = words + (available - words) % 4;
        Ok(Self { memory: BsrPartsMemory::from_tensor(tensor, words)?, bytes })
    }

    /// Bytes with room for this many numbers of 32 bits and this many counters; `None` beyond the
    /// address space.
    pub(crate) fn bytes_for(sums: usize, counters: usize) -> Option<usize> {
        if (sums, counters) == (0, 0) {
            return Some(0);
        }
        let counters = counters.checked_add(2)?.max(sums.div_ceil(Self::SUMS_PER_COUNTER));
        let words = Self::SUMS_PER_COUNTER + Self::WORDS_PER_COUNTER;
        counters.checked_mul(words * size_of::<f32>())
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where the memory is.
    pub fn device(&self) -> Device {
        self.memory.device()
    }

    pub(crate) fn memory(&self) -> &BsrPartsMemory {
        &self.memory
    }

    pub(crate) fn on(&self, expected: &Device) -> Result<()> {
        let (what, expected, found) = ("workspace", *expected, self.device());
        if expected == found {
            Ok(())
        } else {
            Err(Error::DeviceMismatch { what, expected, found })
        }
    }
}
