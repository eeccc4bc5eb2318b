use crate::driver::check;
use crate::memory::{DeviceMemory, HostMemory, upload};
use crate::stream::Kept;
use crate::view::Used;
use crate::view::{check_dtype, check_length};
use crate::{DType, Device, Element, Error, Layout, Result, Stream, View, ViewMut};
use cudarc::driver::sys;
use std::fmt;
use std::sync::Arc;

/// An owned tensor, always contiguous. On a GPU its memory is allocated and freed in the order of
/// the stream that it was created with; on the CPU it is aligned to 64 bytes. Memory of another
/// library is the exception, see [`Tensor::from_raw`].
///
/// Dropping it while work that uses it is still queued is fine: see the crate's documentation.
pub struct Tensor {
    memory: Memory,
    dtype: DType,
    layout: Layout,
    /// Whether the elements were complete before this tensor could be used, and never change: no
    /// work that writes them is queued, or held by a graph.
    settled: bool,
}

pub(crate) enum Memory {
    Host(HostMemory),
    Cuda(Arc<DeviceMemory>),
}

impl Tensor {
    /// Memory that is not initialised: unspecified contents on a GPU, all bits set (NaN, -1) on the
    /// CPU.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::InCapture`], [`Error::Unsupported`] for a GPU without
    /// memory pools, [`Error::Cuda`]; the errors of [`Layout::contiguous`].
    pub fn empty(stream: &Stream, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        Tensor::allocate(stream, dtype, shape, false)
    }

    /// All elements 0.
    ///
    /// # Errors
    /// As [`Tensor::empty`].
    pub fn zeros(stream: &Stream, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        Tensor::allocate(stream, dtype, shape, true)
    }

    /// The same memory with all elements 0, which only one piece of work uses at a time from now
    /// on (`turns.rs`). Only launches may use it, which take turns; the other methods of tensors do
    /// not. All work that was queued with the tensor, on any stream, comes before.
    ///
    /// # Errors
    /// [`Error::InGraph`] if a graph uses the tensor: its launches would take no turns.
    /// [`Error::InCapture`] while a stream that used the tensor is captured; [`Error::Cuda`].
    pub(crate) fn into_turns(mut self) -> Result<Tensor> {
        if let Memory::Cuda(memory) = &self.memory {
            // A graph of another library may contain the zeroing, where nothing comes before it.
            if !memory.is_captured_elsewhere()? {
                memory.gather("zeroing")?;
            }
            let home = memory.home().clone();
            self.fill_bytes(&home, 0)?;
        }
        match &mut self.memory {
            Memory::Host(memory) => memory.bytes_mut().fill(0),
            Memory::Cuda(memory) => Arc::get_mut(memory)
                .ok_or(Error::InGraph { what: "using the tensor in turns" })?
                .use_in_turns(),
        }
        Ok(self)
    }

    /// A copy of host memory, row-major. Waits for the copy.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] unless the slice has exactly the shape's number of elements; those of
    /// [`Tensor::empty`].
    pub fn from_slice<T: Element>(stream: &Stream, data: &[T], shape: &[usize]) -> Result<Tensor> {
        check_length(&Layout::contiguous(shape)?, data.len())?;
        let mut tensor = Tensor::empty(stream, T::DTYPE, shape)?;
        tensor.copy_from_slice(stream, data)?;
        Ok(Tensor { settled: true, ..tensor })
    }

    /// Not `zeroed`: all bits are set on the CPU.
    fn allocate(stream: &Stream, dtype: DType, shape: &[usize], zeroed: bool) -> Result<Tensor> {
        let layout = Layout::contiguous(shape)?;
        let bytes = layout.elements() * dtype.size();
        let memory = if stream.device().is_cpu() {
            Memory::Host(HostMemory::filled(bytes, if zeroed { 0 } else { 0xFF })?)
        } else {
            Memory::Cuda(Arc::new(DeviceMemory::allocate(stream, bytes, zeroed)?))
        };
        Ok(Tensor::with_memory(memory, dtype, layout))
    }

    /// The memory is as large as the layout, which is contiguous.
    pub(crate) fn with_memory(memory: Memory, dtype: DType, layout: Layout) -> Tensor {
        Tensor { memory, dtype, layout, settled: false }
    }

    /// Lets work that is queued on `stream` from now on wait for what the tensor's own stream has
    /// queued by now. The first use on another stream does that by itself; to do it ahead keeps the
    /// first use from waiting for work that is queued in between.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`], [`Error::InCapture`] while the tensor's own stream is captured,
    /// [`Error::Cuda`].
    pub fn share_with(&self, stream: &Stream) -> Result<()> {
        self.device().expect(stream.device())?;
        match &self.memory {
            Memory::Host(_) => Ok(()),
            Memory::Cuda(memory) => memory.prepare(stream),
        }
    }

    /// Sets every byte, for example to poison an output before a test.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`], [`Error::Cuda`].
    pub fn fill_bytes(&mut self, stream: &Stream, value: u8) -> Result<()> {
        self.view_mut().fill_bytes(stream, value)
    }

    /// Overwrites the tensor with host memory, row-major. Waits for the copy.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] for another number of elements, [`Error::DType`],
    /// [`Error::DeviceMismatch`], [`Error::InCapture`], [`Error::Cuda`].
    pub fn copy_from_slice<T: Element>(&mut self, stream: &Stream, data: &[T]) -> Result<()> {
        check_dtype::<T>(self.dtype)?;
        check_length(&self.layout, data.len())?;
        self.device().expect(stream.device())?;
        self.write(stream, bytemuck::cast_slice(data))
    }

    /// `bytes` is as long as the tensor, `stream` on its device.
    fn write(&mut self, stream: &Stream, bytes: &[u8]) -> Result<()> {
        self.settled = false;
        match &mut self.memory {
            Memory::Host(memory) => memory.bytes_mut().copy_from_slice(bytes),
            Memory::Cuda(memory) => {
                memory.prepare(stream)?;
                if let Some(session) = stream.session()? {
                    // SAFETY: the memory is as long as `bytes`, borrowed exclusively, and was
                    // prepared for the stream.
                    unsafe { upload(&session, memory.ptr(), bytes)? };
                }
            }
        }
        Ok(())
    }

    /// Overwrites the tensor with another one of the same shape and element type on the same
    /// device, in the order of `stream` and without waiting: also possible in a graph.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] for another number of elements, [`Error::DType`],
    /// [`Error::DeviceMismatch`], [`Error::Cuda`].
    pub fn copy_from(&mut self, stream: &Stream, source: &Tensor) -> Result<()> {
        if self.dtype != source.dtype {
            return Err(Error::DType { expected: self.dtype, found: source.dtype });
        }
        check_length(&self.layout, source.layout.elements())?;
        self.device().expect(stream.device())?;
        self.device().expect(&source.device())?;
        self.copy_within_cuda(stream, source)
    }

    /// The tensor's elements in row-major order. Waits for the work on `stream`, which is one of
    /// the tensor's device; on the CPU any stream will do.
    ///
    /// # Errors
    /// [`Error::DType`], [`Error::DeviceMismatch`], [`Error::InCapture`], [`Error::OutOfMemory`],
    /// [`Error::Cuda`].
    pub fn to_vec<T: Element>(&self, stream: &Stream) -> Result<Vec<T>> {
        self.view().to_vec(stream)
    }

    /// A copy on the device of `stream`. What the tensor's own stream and all streams that used the
    /// tensor have queued by now comes before the copy. Waits when one of the two devices is the
    /// CPU, else the copy is queued on `stream`.
    ///
    /// # Errors
    /// Those of [`Tensor::empty`] and [`Tensor::to_vec`]; [`Error::InCapture`] also when the
    /// tensor's own stream is captured.
    pub fn copy_to(&self, stream: &Stream) -> Result<Tensor> {
        let mut copy = Tensor::empty(stream, self.dtype, self.shape())?;
        match &self.memory {
            Memory::Host(memory) => {
                copy.write(stream, memory.bytes())?;
                copy.settled = true;
            }
            Memory::Cuda(memory) => {
                memory.gather("copying to another device")?;
                match &mut copy.memory {
                    Memory::Host(host) => self.view().read_span(memory.home(), host.bytes_mut())?,
                    Memory::Cuda(_) => {
                        stream.wait_for(memory.home())?;
                        copy.copy_within_cuda(stream, self)?;
                    }
                }
            }
        }
        Ok(copy)
    }

    /// Both tensors have the same size, and `stream` is on the device of `self`.
    fn copy_within_cuda(&mut self, stream: &Stream, source: &Tensor) -> Result<()> {
        let size = self.size();
        self.settled = false;
        match (&mut self.memory, &source.memory) {
            (Memory::Host(to), Memory::Host(from)) => to.bytes_mut().copy_from_slice(from.bytes()),
            (Memory::Cuda(to), Memory::Cuda(from)) if size > 0 => {
                to.prepare(stream)?;
                from.prepare(stream)?;
                let Some(mut session) = stream.session()? else { return Ok(()) };
                session.keep(to);
                session.keep(from);
                let other = from.home().device().context().unwrap_or(session.context());
                let (here, there) = (session.context().raw.0, other.raw.0);
                let (call, code) = if here == there {
                    // SAFETY:
                    // 1. Both memories hold `size` bytes and were prepared for the stream; a graph
                    //    keeps them alive.
                    // 2. They are different allocations: `self` is borrowed exclusively.
                    // 3. The stream lives and its context is current.
                    let code = unsafe {
                        sys::cuMemcpyDtoDAsync_v2(to.ptr(), from.ptr(), size, session.raw())
                    };
                    ("cuMemcpyDtoDAsync", code)
                } else {
                    // SAFETY: as above; each pointer comes with the context that its memory belongs
                    // to, and both contexts are retained for the rest of the process.
                    let code = unsafe {
                        sys::cuMemcpyPeerAsync(
                            to.ptr(),
                            here,
                            from.ptr(),
                            there,
                            size,
                            session.raw(),
                        )
                    };
                    ("cuMemcpyPeerAsync", code)
                };
                check(call, code)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Borrows the tensor.
    #[inline]
    pub fn view(&self) -> View<'_> {
        let view = match &self.memory {
            Memory::Host(memory) => View::from_host(memory.bytes(), self.dtype, self.layout),
            Memory::Cuda(memory) => View::from_memory(memory, self.dtype, self.layout),
        };
        view.settled(self.settled)
    }

    /// The memory that a launch with the tensor uses.
    #[inline]
    pub(crate) fn used(&self) -> Used<'_> {
        self.view().used()
    }

    /// Borrows the tensor for writing.
    #[inline]
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        self.settled = false;
        match &mut self.memory {
            Memory::Host(memory) => ViewMut::from_host(memory.bytes_mut(), self.dtype, self.layout),
            Memory::Cuda(memory) => ViewMut::from_memory(memory, self.dtype, self.layout),
        }
    }

    /// Element type.
    #[inline]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape and (contiguous) strides.
    #[inline]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Sizes of the dimensions.
    #[inline]
    pub fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// Where the memory is.
    #[inline]
    pub fn device(&self) -> Device {
        match &self.memory {
            Memory::Host(_) => Device::cpu(),
            Memory::Cuda(memory) => *memory.home().device(),
        }
    }

    /// Bytes of all elements.
    fn size(&self) -> usize {
        self.layout.elements() * self.dtype.size()
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({}, {:?}, {})", self.dtype, self.shape(), self.device())
    }
}

#[cfg(test)]
#[path = "tensor_tests.rs"]
mod tests;
