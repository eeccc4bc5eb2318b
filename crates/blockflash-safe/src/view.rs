use crate::memory::{DeviceMemory, download};
use crate::stream::Kept;
use crate::{DType, Device, Element, Error, Layout, Result, Stream};
use std::ops::Range;
use std::sync::Arc;

/// A borrowed tensor: memory on a device, element type, shape and strides. Copyable, like `&[T]`.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    // Host memory is exactly the span of the layout. Device memory is valid for the span from
    // `ptr`.
    source: Source<'a>,
    device: Device,
    dtype: DType,
    layout: Layout,
    settled: bool,
}

#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    Host(&'a [u8]),
    Cuda { ptr: u64, owner: Option<&'a Arc<DeviceMemory>> },
}

/// The memory of a tensor: where it is, and what keeps it alive.
#[derive(Clone, Copy)]
pub struct Used<'a> {
    pub(crate) device: Device,
    /// `None` for host memory and for memory that its user keeps alive.
    pub(crate) owner: Option<&'a Arc<DeviceMemory>>,
}

impl std::fmt::Debug for Source<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Source::Host(bytes) => write!(f, "{:?}", bytes.as_ptr()),
            Source::Cuda { ptr, .. } => write!(f, "{ptr:#x}"),
        }
    }
}

impl<'a> View<'a> {
    /// Row-major host memory.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] unless the slice has exactly the shape's number of elements; the
    /// errors of [`Layout::contiguous`].
    pub fn from_slice<T: Element>(data: &'a [T], shape: &[usize]) -> Result<View<'a>> {
        let layout = Layout::contiguous(shape)?;
        check_length(&layout, data.len())?;
        Ok(View::from_host(bytemuck::cast_slice(data), T::DTYPE, layout))
    }

    /// Host memory with strides in elements. The slice may be longer than the tensor's span.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; the errors of [`Layout::strided`].
    pub fn from_slice_strided<T: Element>(
        data: &'a [T],
        shape: &[usize],
        strides: &[usize],
    ) -> Result<View<'a>> {
        let layout = Layout::strided(shape, strides)?;
        check_span(&layout, data.len())?;
        Ok(View::from_host(bytemuck::cast_slice(data), T::DTYPE, layout))
    }

    /// `bytes` start at the first element and reach at least to the last.
    pub(crate) fn from_host(bytes: &'a [u8], dtype: DType, layout: Layout) -> View<'a> {
        let source = Source::Host(&bytes[..layout.span() * dtype.size()]);
        View::with_source(source, Device::cpu(), dtype, layout)
    }

    /// `memory` is at least the span of the layout.
    #[inline]
    pub(crate) fn from_memory(
        memory: &'a Arc<DeviceMemory>,
        dtype: DType,
        layout: Layout,
    ) -> View<'a> {
        let source = Source::Cuda { ptr: memory.ptr(), owner: Some(memory) };
        View::with_source(source, *memory.home().device(), dtype, layout)
    }

    /// Says whether nothing that writes the elements is queued or held by a graph, or will be while
    /// this view lives.
    #[inline]
    pub(crate) fn settled(self, settled: bool) -> View<'a> {
        View { settled, ..self }
    }

    /// Whether a kernel may read the elements while the work in front of it in the stream still
    /// runs: the view is of a tensor that was copied from host memory and that nobody has borrowed
    /// for writing since.
    #[inline]
    pub(crate) fn is_settled(&self) -> bool {
        self.settled
    }

    /// Element type.
    #[inline]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape and strides.
    #[inline]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Sizes of the dimensions.
    #[inline]
    pub fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// Elements between neighbours along each dimension.
    #[inline]
    pub fn strides(&self) -> &[usize] {
        self.layout.strides()
    }

    /// Where the memory is.
    #[inline]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether the memory is host memory.
    #[inline]
    pub fn is_cpu(&self) -> bool {
        self.device.is_cpu()
    }

    /// The device address of the first element; `None` on the CPU.
    #[inline]
    pub fn device_ptr(&self) -> Option<u64> {
        match self.source {
            Source::Host(_) => None,
            Source::Cuda { ptr, .. } => Some(ptr),
        }
    }

    /// Whether the address of the first element is a multiple of `bytes`; true without elements.
    #[inline]
    pub fn is_aligned(&self, bytes: usize) -> bool {
        self.layout.is_empty() || self.address().is_multiple_of(bytes.max(1) as u64)
    }

    /// Whether both views have their first element at the same place of the same memory.
    #[inline]
    pub fn starts_with(&self, other: &View<'_>) -> bool {
        self.device == other.device && self.address() == other.address()
    }

    /// The address of the first element, in the memory of the host or of the device.
    #[inline]
    pub(crate) fn address(&self) -> u64 {
        match self.source {
            Source::Host(memory) => memory.as_ptr() as u64,
            Source::Cuda { ptr, .. } => ptr,
        }
    }

    /// The same elements with dimension `order[i]` in place `i`.
    ///
    /// # Errors
    /// [`Error::Permutation`].
    pub fn permute(&self, order: &[usize]) -> Result<View<'a>> {
        Ok(View { layout: self.layout.permute(order)?, ..*self })
    }

    /// The dimensions `dims` as one, without a copy: a batch `[batch, k, n]` with `0..2` is the
    /// matrix `[batch * k, n]`.
    ///
    /// # Errors
    /// [`Error::Flatten`] where strides do not allow it, or for dimensions that there are not.
    pub fn flatten(&self, dims: Range<usize>) -> Result<View<'a>> {
        Ok(View { layout: self.layout.flatten(dims)?, ..*self })
    }

    /// Divides a dimension into two, the inner one of `inner` elements.
    ///
    /// # Errors
    /// Those of [`Layout::unflatten`].
    pub fn unflatten(&self, dim: usize, inner: usize) -> Result<View<'a>> {
        Ok(View { layout: self.layout.unflatten(dim, inner)?, ..*self })
    }

    /// The same elements with another dimension of size 1 before dimension `dim`, or behind all.
    ///
    /// # Errors
    /// Those of [`Layout::insert`].
    pub fn insert(&self, dim: usize) -> Result<View<'a>> {
        Ok(View { layout: self.layout.insert(dim)?, ..*self })
    }

    /// Dimension `dim`, of size 1, repeated `size` times without a copy.
    ///
    /// # Errors
    /// [`Error::Expand`], [`Error::TooLarge`].
    pub fn expand(&self, dim: usize, size: usize) -> Result<View<'a>> {
        Ok(View { layout: self.layout.expand(dim, size)?, ..*self })
    }

    /// The indices `range` of dimension `dim`.
    ///
    /// # Errors
    /// [`Error::Slice`].
    pub fn slice(&self, dim: usize, range: Range<usize>) -> Result<View<'a>> {
        let (layout, offset) = self.layout.slice(dim, range)?;
        let bytes = offset * self.dtype.size();
        let source = match self.source {
            Source::Host(memory) => {
                Source::Host(&memory[bytes..bytes + layout.span() * self.dtype.size()])
            }
            Source::Cuda { ptr, owner } => Source::Cuda { ptr: ptr + bytes as u64, owner },
        };
        Ok(View { source, layout, ..*self })
    }

    /// Host memory from the first element to the last one; index it with
    /// [`strides`](Self::strides).
    ///
    /// # Errors
    /// [`Error::NotOnCpu`], [`Error::DType`].
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        check_dtype::<T>(self.dtype)?;
        match self.source {
            Source::Host(bytes) => Ok(bytemuck::cast_slice(bytes)),
            Source::Cuda { .. } => Err(Error::NotOnCpu { device: self.device }),
        }
    }

    /// The elements in row-major order, from any device. Waits for the work on `stream`, which must
    /// be one of the tensor's device; on the CPU any stream will do.
    ///
    /// # Errors
    /// [`Error::DType`], [`Error::DeviceMismatch`], [`Error::InCapture`], [`Error::OutOfMemory`],
    /// [`Error::Cuda`].
    pub fn to_vec<T: Element>(&self, stream: &Stream) -> Result<Vec<T>> {
        if let Source::Host(_) = self.source {
            return gather(&self.layout, self.as_slice::<T>()?.to_vec());
        }
        check_dtype::<T>(self.dtype)?;
        let span = self.layout.span();
        let mut data = Vec::new();
        data.try_reserve_exact(span)
            .map_err(|_| Error::OutOfMemory { bytes: span * size_of::<T>() })?;
        data.resize(span, T::zeroed());
        self.read_span(stream, bytemuck::cast_slice_mut(&mut data))?;
        gather(&self.layout, data)
    }

    /// Copies a GPU view's memory, from its first element on, into host memory that is no longer
    /// than its span.
    pub(crate) fn read_span(&self, stream: &Stream, bytes: &mut [u8]) -> Result<()> {
        let Source::Cuda { ptr, owner } = self.source else { return Ok(()) };
        self.device.expect(stream.device())?;
        owner.map_or(Ok(()), |memory| memory.prepare(stream))?;
        let Some(session) = stream.session()? else { return Ok(()) };
        debug_assert!(bytes.len() <= self.layout.span() * self.dtype.size());
        // SAFETY: the view's memory is valid for its span (our tensor's, or point 1 of
        // `from_raw`), prepared above.
        unsafe { download(&session, bytes, ptr) }
    }

    pub(crate) fn source(&self) -> Source<'a> {
        self.source
    }

    /// The source holds the span of the layout.
    #[inline]
    pub(crate) fn with_source(
        source: Source<'a>,
        device: Device,
        dtype: DType,
        layout: Layout,
    ) -> View<'a> {
        View { source, device, dtype, layout, settled: false }
    }

    /// The memory that a launch with the view uses.
    #[inline]
    pub(crate) fn used(&self) -> Used<'a> {
        Used { device: self.device, owner: self.owner() }
    }

    /// The owner that keeps the memory alive, if the memory is ours and on a GPU.
    #[inline]
    pub(crate) fn owner(&self) -> Option<&'a Arc<DeviceMemory>> {
        match self.source {
            Source::Host(_) => None,
            Source::Cuda { owner, .. } => owner,
        }
    }
}

pub(crate) fn check_dtype<T: Element>(found: DType) -> Result<()> {
    if found == T::DTYPE { Ok(()) } else { Err(Error::DType { expected: T::DTYPE, found }) }
}

/// A contiguous tensor takes the whole slice: another length means that the shape is wrong.
pub(crate) fn check_length(layout: &Layout, available: usize) -> Result<()> {
    let needed = layout.elements();
    if needed == available { Ok(()) } else { Err(Error::OutOfBounds { needed, available }) }
}

pub(crate) fn check_span(layout: &Layout, available: usize) -> Result<()> {
    let needed = layout.span();
    if needed <= available { Ok(()) } else { Err(Error::OutOfBounds { needed, available }) }
}

/// The elements of `layout` in row-major order, out of the memory of its span.
fn gather<T: Element>(layout: &Layout, span: Vec<T>) -> Result<Vec<T>> {
    if layout.is_contiguous() {
        return Ok(span);
    }
    let elements = layout.elements();
    let mut gathered = Vec::new();
    gathered
        .try_reserve_exact(elements)
        .map_err(|_| Error::OutOfMemory { bytes: elements * size_of::<T>() })?;
    gathered.extend(layout.offsets().map(|offset| span[offset]));
    Ok(gathered)
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
