//! Views and tensors over memory of other libraries: the constructors whose conditions only the
//! caller can know.

use crate::freed::Owner;
use crate::memory::{DeviceMemory, HostMemory};
use crate::tensor::Memory;
use crate::view::Source;
use crate::view_mut::{SourceMut, check_overlap};
use crate::{DType, Device, Error, Layout, Result, Stream, Tensor, View, ViewMut};
use std::ffi::c_void;
use std::sync::{Arc, Mutex};
use std::{ptr, slice};

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

impl Tensor {
    /// An owned tensor, row-major, over memory of the host or a GPU that another library (PyTorch,
    /// candle, …) has allocated, and that `owner` keeps valid: an array, a reference count, a
    /// closure that frees the memory when it is dropped.
    ///
    /// **When the owner is dropped.** On the CPU, with the tensor. On a GPU, when the tensor and
    /// all graphs that were captured from its use are gone and the device has finished all work
    /// that was queued with it, on any stream. Nobody waits for that. Dropping the tensor drops the
    /// owner if the work is done, else a later call that finds it done does: allocating, this
    /// function, [`Stream::synchronize`], or the end of a capture. So the owner is dropped
    /// - at most once, and never if the process ends before, or after a failure of the device;
    /// - in any thread that calls this crate, but never in a thread of the driver, and never while
    ///   this crate holds a lock: it may wait for locks (Python's GIL) and may call this crate. The
    ///   thread may be capturing another stream meanwhile, as anywhere else in a program.
    ///
    /// ```
    /// # use blockflash_safe::{DType, Device, Tensor};
    /// let stream = Device::cpu().stream()?;
    /// let mut numbers = vec![1.0f32, 2.0, 3.0, 4.0];
    /// let ptr = numbers.as_mut_ptr().cast();
    /// // SAFETY: 1. Four elements, which `numbers` keeps. 2. Nobody else has `numbers`.
    /// let tensor = unsafe { Tensor::from_raw(&stream, ptr, DType::F32, &[2, 2], numbers)? };
    /// assert_eq!(tensor.to_vec::<f32>(&stream)?, [1.0, 2.0, 3.0, 4.0]);
    /// # Ok::<(), blockflash_safe::Error>(())
    /// ```
    ///
    /// # Safety
    /// 1. `ptr` points to the first element, in memory of the stream's device. For work that is
    ///    queued on `stream` from now on, and for work that is ordered after it, the memory is
    ///    valid for reads and writes of all elements, in every thread, until the owner is dropped.
    ///    Without elements it may be any pointer.
    /// 2. Until then, others read the memory only while this crate does not write to it, and write
    ///    to it only while this crate does not use it. On the CPU, this crate uses it as long as a
    ///    [`View`] or [`ViewMut`] of the tensor exists; on a GPU, in the order of the streams.
    ///
    /// # Errors
    /// [`Error::Pointer`] for a pointer that is null or not aligned to the element type, if there
    /// are elements; the errors of [`Layout::contiguous`]. The owner is then dropped at once.
    pub unsafe fn from_raw(
        stream: &Stream,
        ptr: *mut c_void,
        dtype: DType,
        shape: &[usize],
        owner: impl Send + 'static,
    ) -> Result<Tensor> {
        let layout = Layout::contiguous(shape)?;
        check_pointer(ptr, dtype, &layout)?;
        let owner: Owner = Mutex::new(Box::new(owner));
        let memory = if !stream.device().is_cpu() {
            Memory::Cuda(Arc::new(DeviceMemory::foreign(ptr.addr() as u64, stream, owner)))
        } else {
            let (ptr, bytes) = match layout.elements() {
                0 => (ptr::dangling_mut::<u64>().cast(), 0),
                elements => (ptr.cast(), elements * dtype.size()),
            };
            // SAFETY: 1. Valid until the owner is dropped (the caller's promise 1), not null, and
            // the bytes fit into `isize` (`Layout`). 2. Not used by others while a borrow of the
            // tensor exists (promise 2).
            Memory::Host(unsafe { HostMemory::foreign(ptr, bytes, owner) })
        };
        Ok(Tensor::with_memory(memory, dtype, layout))
    }
}

/// Frameworks have tensors without memory, whose pointer is null, and kernels and slices need
/// aligned elements.
fn check_pointer(ptr: *const c_void, dtype: DType, layout: &Layout) -> Result<()> {
    let (address, size) = (ptr.addr(), dtype.size());
    let what = match address {
        _ if layout.is_empty() => return Ok(()),
        0 => format!("is null, but the tensor has {} elements", layout.elements()),
        _ if !address.is_multiple_of(size) => format!(
            "is not aligned to the element type: {address:#x}, expected a multiple of {size} bytes"
        ),
        _ => return Ok(()),
    };
    Err(Error::Pointer { what })
}

#[cfg(test)]
#[path = "foreign_tests.rs"]
mod tests;
