use crate::memory::DeviceMemory;
use crate::view::{Source, Used, check_dtype, check_length, check_span};
use crate::{DType, Device, Element, Error, Layout, Result, View};
use std::ops::Range;
use std::sync::Arc;

/// A borrowed tensor that is written: like [`View`], but exclusive, and no two of its elements are
/// the same memory.
#[derive(Debug)]
pub struct ViewMut<'a> {
    source: SourceMut<'a>,
    device: Device,
    dtype: DType,
    layout: Layout,
}

pub(crate) enum SourceMut<'a> {
    Host(&'a mut [u8]),
    Cuda { ptr: u64, owner: Option<&'a Arc<DeviceMemory>> },
}

impl std::fmt::Debug for SourceMut<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.shared().fmt(f)
    }
}

impl SourceMut<'_> {
    #[inline]
    fn shared(&self) -> Source<'_> {
        match self {
            SourceMut::Host(bytes) => Source::Host(bytes),
            SourceMut::Cuda { ptr, owner } => Source::Cuda { ptr: *ptr, owner: *owner },
        }
    }
}

impl<'a> ViewMut<'a> {
    /// Row-major host memory.
    ///
    /// # Errors
    /// As [`View::from_slice`].
    pub fn from_slice<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<ViewMut<'a>> {
        let layout = Layout::contiguous(shape)?;
        check_length(&layout, data.len())?;
        Ok(ViewMut::from_host(bytemuck::cast_slice_mut(data), T::DTYPE, layout))
    }

    /// Host memory with strides in elements. The slice may be longer than the tensor's span.
    ///
    /// # Errors
    /// As [`View::from_slice_strided`], and [`Error::OverlappingOutput`].
    pub fn from_slice_strided<T: Element>(
        data: &'a mut [T],
        shape: &[usize],
        strides: &[usize],
    ) -> Result<ViewMut<'a>> {
        let layout = Layout::strided(shape, strides)?;
        check_span(&layout, data.len())?;
        check_overlap(&layout)?;
        Ok(ViewMut::from_host(bytemuck::cast_slice_mut(data), T::DTYPE, layout))
    }

    /// `bytes` start at the first element and reach at least to the last; the layout does not
    /// overlap itself.
    pub(crate) fn from_host(bytes: &'a mut [u8], dtype: DType, layout: Layout) -> ViewMut<'a> {
        let source = SourceMut::Host(&mut bytes[..layout.span() * dtype.size()]);
        ViewMut { source, device: Device::cpu(), dtype, layout }
    }

    /// `memory` is at least the span of the layout and borrowed exclusively; the layout does not
    /// overlap itself.
    #[inline]
    pub(crate) fn from_memory(
        memory: &'a mut Arc<DeviceMemory>,
        dtype: DType,
        layout: Layout,
    ) -> ViewMut<'a> {
        let device = *memory.home().device();
        ViewMut {
            source: SourceMut::Cuda { ptr: memory.ptr(), owner: Some(memory) },
            device,
            dtype,
            layout,
        }
    }

    /// The source holds the span of the layout, which does not overlap itself.
    pub(crate) fn with_source(
        source: SourceMut<'a>,
        device: Device,
        dtype: DType,
        layout: Layout,
    ) -> ViewMut<'a> {
        ViewMut { source, device, dtype, layout }
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
        self.as_view().device_ptr()
    }

    /// Whether the address of the first element is a multiple of `bytes`; true without elements.
    #[inline]
    pub fn is_aligned(&self, bytes: usize) -> bool {
        self.as_view().is_aligned(bytes)
    }

    /// A shared view of the same elements.
    #[inline]
    pub fn as_view(&self) -> View<'_> {
        View::with_source(self.source.shared(), self.device, self.dtype, self.layout)
    }

    /// The memory that a launch with the view uses.
    #[inline]
    pub(crate) fn used(&self) -> Used<'_> {
        let owner = match self.source {
            SourceMut::Host(_) => None,
            SourceMut::Cuda { owner, .. } => owner,
        };
        Used { device: self.device, owner }
    }

    /// A shorter exclusive view of the same elements.
    #[inline]
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        let source = match &mut self.source {
            SourceMut::Host(bytes) => SourceMut::Host(bytes),
            SourceMut::Cuda { ptr, owner } => SourceMut::Cuda { ptr: *ptr, owner: *owner },
        };
        ViewMut { source, device: self.device, dtype: self.dtype, layout: self.layout }
    }

    /// The same elements with dimension `order[i]` in place `i`.
    ///
    /// # Errors
    /// [`Error::Permutation`].
    pub fn permute(self, order: &[usize]) -> Result<ViewMut<'a>> {
        Ok(ViewMut { layout: self.layout.permute(order)?, ..self })
    }

    /// The dimensions `dims` as one, without a copy.
    ///
    /// # Errors
    /// As [`View::flatten`].
    pub fn flatten(self, dims: Range<usize>) -> Result<ViewMut<'a>> {
        Ok(ViewMut { layout: self.layout.flatten(dims)?, ..self })
    }

    /// The same elements with another dimension of size 1 before dimension `dim`, or behind all.
    ///
    /// # Errors
    /// As [`View::insert`].
    pub fn insert(self, dim: usize) -> Result<ViewMut<'a>> {
        Ok(ViewMut { layout: self.layout.insert(dim)?, ..self })
    }

    /// The indices `range` of dimension `dim`.
    ///
    /// # Errors
    /// [`Error::Slice`].
    pub fn slice(self, dim: usize, range: Range<usize>) -> Result<ViewMut<'a>> {
        let (layout, offset) = self.layout.slice(dim, range)?;
        let bytes = offset * self.dtype.size();
        let source = match self.source {
            SourceMut::Host(memory) => {
                SourceMut::Host(&mut memory[bytes..bytes + layout.span() * self.dtype.size()])
            }
            SourceMut::Cuda { ptr, owner } => SourceMut::Cuda { ptr: ptr + bytes as u64, owner },
        };
        Ok(ViewMut { source, layout, ..self })
    }

    /// What has indices before `at` in the first dimension, and the rest: two exclusive views.
    ///
    /// # Errors
    /// [`Error::Slice`]; [`Error::OverlappingOutput`] if the memory of the rest begins before that
    /// of the first view ends.
    pub fn split(self, at: usize) -> Result<(ViewMut<'a>, ViewMut<'a>)> {
        let size = self.shape().first().copied().unwrap_or(0);
        let (first, _) = self.layout.slice(0, 0..at)?;
        let (rest, offset) = self.layout.slice(0, at..size.max(at))?;
        if !rest.is_empty() && first.span() > offset {
            let (shape, strides) = (self.shape().to_vec(), self.strides().to_vec());
            return Err(Error::OverlappingOutput { shape, strides });
        }
        // Nothing is behind the memory of the first view.
        let offset = if rest.is_empty() { first.span() } else { offset };
        let (bytes, length) = (offset * self.dtype.size(), rest.span() * self.dtype.size());
        let [source, after] = match self.source {
            SourceMut::Host(memory) => {
                let (before, after) = memory.split_at_mut(bytes);
                let before = &mut before[..first.span() * self.dtype.size()];
                [SourceMut::Host(before), SourceMut::Host(&mut after[..length])]
            }
            SourceMut::Cuda { ptr, owner } => {
                [0, bytes as u64].map(|offset| SourceMut::Cuda { ptr: ptr + offset, owner })
            }
        };
        let (device, dtype) = (self.device, self.dtype);
        let of = |source, layout| ViewMut { source, device, dtype, layout };
        Ok((of(source, first), of(after, rest)))
    }

    /// What has indices before `at` in the last dimension, and the rest: two exclusive views of
    /// device memory whose rows alternate. Host memory is lent as slices, which cannot alternate.
    ///
    /// # Errors
    /// [`Error::NotOnGpu`], [`Error::Slice`].
    pub fn split_columns(self, at: usize) -> Result<(ViewMut<'a>, ViewMut<'a>)> {
        // No two elements are the same memory, so neither are those of the two parts.
        let SourceMut::Cuda { ptr, owner } = self.source else {
            return Err(Error::NotOnGpu { what: "a split into columns" });
        };
        let last = self.shape().len().saturating_sub(1);
        let size = self.shape().last().copied().unwrap_or(0);
        let part = |range| -> Result<ViewMut<'a>> {
            let (layout, offset) = self.layout.slice(last, range)?;
            let ptr = ptr + (offset * self.dtype.size()) as u64;
            let source = SourceMut::Cuda { ptr, owner };
            Ok(ViewMut { source, device: self.device, dtype: self.dtype, layout })
        };
        Ok((part(0..at)?, part(at..size.max(at))?))
    }

    /// Divides a dimension into two, the inner one of `inner` elements.
    ///
    /// # Errors
    /// Those of [`Layout::unflatten`].
    pub fn unflatten(self, dim: usize, inner: usize) -> Result<ViewMut<'a>> {
        Ok(ViewMut { layout: self.layout.unflatten(dim, inner)?, ..self })
    }

    /// Rows of bytes of device memory, whose last dimension is contiguous, in parts behind one
    /// another: of each the element type, and how many elements it has in a row.
    ///
    /// # Errors
    /// [`Error::NotOnGpu`]; [`Error::DType`] for other elements than u8; [`Error::Slice`] for parts
    /// beyond a row; [`Error::Pointer`] where elements would not be at multiples of their size.
    pub fn split_bytes<const N: usize>(
        self,
        parts: [(DType, usize); N],
    ) -> Result<[ViewMut<'a>; N]> {
        // No two bytes are the same memory, so neither are those of two parts.
        let SourceMut::Cuda { ptr, owner } = self.source else {
            return Err(Error::NotOnGpu { what: "a split into elements" });
        };
        check_dtype::<u8>(self.dtype)?;
        let (strides, mut at) = (self.strides(), 0usize);
        let [of_rows @ .., 1] = strides else {
            return Err(Error::Pointer {
                what: format!("bytes of a row have strides {strides:?}"),
            });
        };
        let mut layouts = Vec::with_capacity(N);
        for (dtype, count) in parts {
            let (size, bytes) =
                (dtype.size(), at..at.saturating_add(count.saturating_mul(dtype.size())));
            let (part, offset) = self.layout.slice(of_rows.len(), bytes.clone())?;
            let aligned = of_rows.iter().all(|stride| stride.is_multiple_of(size));
            if !aligned || !(ptr + offset as u64).is_multiple_of(size as u64) {
                let what = format!("{dtype} at byte {at} of rows with strides {strides:?}");
                return Err(Error::Pointer { what: format!("{what}: not at multiples of {size}") });
            }
            let mut shape = part.shape().to_vec();
            shape[of_rows.len()] = count;
            let mut strides: Vec<_> = of_rows.iter().map(|stride| stride / size).collect();
            strides.push(1);
            let layout = Layout::strided(&shape, &strides)?;
            layouts.push((dtype, layout, ptr + offset as u64));
            at = bytes.end;
        }
        let device = self.device;
        Ok(std::array::from_fn(|i| {
            let (dtype, layout, ptr) = layouts[i];
            ViewMut { source: SourceMut::Cuda { ptr, owner }, device, dtype, layout }
        }))
    }

    /// Host memory from the first element to the last one; index it with
    /// [`strides`](Self::strides).
    ///
    /// # Errors
    /// [`Error::NotOnCpu`], [`Error::DType`].
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        check_dtype::<T>(self.dtype)?;
        let device = self.device;
        self.host_bytes().map(bytemuck::cast_slice_mut).ok_or(Error::NotOnCpu { device })
    }

    /// The span, when it is host memory.
    pub(crate) fn host_bytes(&mut self) -> Option<&mut [u8]> {
        match &mut self.source {
            SourceMut::Host(bytes) => Some(bytes),
            SourceMut::Cuda { .. } => None,
        }
    }
}

pub(crate) fn check_overlap(layout: &Layout) -> Result<()> {
    if layout.overlaps_itself() {
        let (shape, strides) = (layout.shape().to_vec(), layout.strides().to_vec());
        return Err(Error::OverlappingOutput { shape, strides });
    }
    Ok(())
}
