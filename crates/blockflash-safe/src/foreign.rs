//! Views of memory that another library owns: the constructors whose conditions only the caller can
//! know.

use crate::view::Source;
use crate::view_mut::{SourceMut, check_overlap};
use crate::{DType, Device, Error, Layout, Result, View, ViewMut};
use std::ffi::c_void;
use std::slice;

impl<'a> View<'a> {
    /// Memory of the host or of a GPU that another library (PyTorch, candle, …) owns.
    ///
    /// ```
    /// # use blockflash_safe::{DType, Device, Layout, View};
    /// // Columns 1 and 2 of a matrix `[2, 4]`.
    /// let matrix = [0.0f32, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
    /// let layout = Layout::strided(&[2, 2], &[4, 1])?;
    /// let first = matrix[1..].as_ptr().cast();
    /// // SAFETY: 1. The layout spans 6 of the 7 elements from there on. 2. `matrix` outlives the
    /// // view, and nobody writes to it.
    /// let view = unsafe { View::from_raw(&Device::cpu(), first, DType::F32, layout)? };
    /// assert_eq!(view.to_vec::<f32>(&Device::cpu().stream()?)?, [1.0, 2.0, 5.0, 6.0]);
    /// # Ok::<(), blockflash_safe::Error>(())
    /// ```
    ///
    /// # Safety
    /// 1. `ptr` points to the first element, in memory of `device` that is valid for reads of
    ///    `layout.span()` elements, gaps between them included. Without elements it may be any
    ///    pointer.
    /// 2. The memory stays valid, and nobody writes to it:
    ///    - on the CPU, as long as `'a`;
    ///    - on a GPU, until all work that was queued with this view or its copies is done and all
    ///      graphs captured from it are gone, even beyond `'a`. Writes that are ordered with our
    ///      streams are allowed.
    ///
    /// # Errors
    /// [`Error::Pointer`] for a pointer that is null or not aligned to the element type, if there
    /// are elements.
    pub unsafe fn from_raw(
        device: &Device,
        ptr: *const c_void,
        dtype: DType,
        layout: Layout,
    ) -> Result<View<'a>> {
        check_pointer(ptr, dtype, &layout)?;
        let source = if !device.is_cpu() {
            Source::Cuda { ptr: ptr.addr() as u64, owner: None }
        } else if layout.is_empty() {
            Source::Host(bytemuck::cast_slice::<u64, u8>(&[]))
        } else {
            // SAFETY: 1. Not null, and valid for reads of the span (the caller's promise 1), whose
            // bytes fit into `isize` (`Layout`). 2. Valid and not written during `'a` (promise 2).
            Source::Host(unsafe { slice::from_raw_parts(ptr.cast(), layout.span() * dtype.size()) })
        };
        Ok(View::with_source(source, *device, dtype, layout))
    }
}

impl<'a> ViewMut<'a> {
    /// Memory of the host or of a GPU that another library (PyTorch, candle, …) owns.
    ///
    /// # Safety
    /// As for [`View::from_raw`], for reads and writes. In the time of its point 2 nobody else
    /// reads the memory either, on the CPU not even the gaps between elements: two views of
    /// interleaved rows must not exist at a time if one of them is written. On a GPU, reads that
    /// are ordered with our streams are allowed.
    ///
    /// # Errors
    /// [`Error::Pointer`] as [`View::from_raw`], [`Error::OverlappingOutput`].
    pub unsafe fn from_raw(
        device: &Device,
        ptr: *mut c_void,
        dtype: DType,
        layout: Layout,
    ) -> Result<ViewMut<'a>> {
        check_pointer(ptr, dtype, &layout)?;
        check_overlap(&layout)?;
        let source = if !device.is_cpu() {
            SourceMut::Cuda { ptr: ptr.addr() as u64, owner: None }
        } else if layout.is_empty() {
            SourceMut::Host(bytemuck::cast_slice_mut::<u64, u8>(&mut []))
        } else {
            let bytes = layout.span() * dtype.size();
            // SAFETY: 1. Not null, and valid for reads and writes of the span (the caller's promise
            // 1), whose bytes fit into `isize` (`Layout`). 2. Valid and not used by others during
            // `'a` (promise 2).
            SourceMut::Host(unsafe { slice::from_raw_parts_mut(ptr.cast(), bytes) })
        };
        Ok(ViewMut::with_source(source, *device, dtype, layout))
    }
}

/// Frameworks have tensors without memory, whose pointer is null, and kernels and slices need
/// aligned elements.
fn check_pointer(ptr: *const c_void, dtype: DType, layout: &Layout) -> Result<()> {
    let what = match ptr.addr() {
        _ if layout.is_empty() => return Ok(()),
        0 => "is null, but the tensor has elements",
        address if !address.is_multiple_of(dtype.size()) => "is not aligned to the element type",
        _ => return Ok(()),
    };
    Err(Error::Pointer { what })
}

#[cfg(test)]
#[path = "foreign_tests.rs"]
mod tests;
