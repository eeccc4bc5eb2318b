//! Memory and streams of candle on a GPU: the only unsafe code of the crate.
//!
//! Calls do not run on candle's stream, because this may be the per-thread default stream, which
//! cannot be wrapped, and because masks and caches may live longer than it. They run on a stream of
//! this crate, one for each thread and device, which waits for candle's stream and is waited for by
//! it. So work is ordered as if it ran on candle's stream.
//!
//! A stream of candle that is being captured into a graph takes a stream of this crate along by the
//! same events: the work becomes part of the graph. Such a stream serves captures alone, of one
//! stream of candle, so that no other work enters the graph.

use super::candle_core::backend::BackendStorage;
use super::candle_core::cuda_backend::cudarc::driver::CudaSlice;
use super::candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaStream, DevicePtr, DevicePtrMut, result, sys,
};
use super::candle_core::cuda_backend::{CudaDType, CudaStorageSlice, WrapErr};
use super::candle_core::{self, CudaDevice, CudaStorage, Layout, Result, bail};
use super::error::refused;
use super::held::{Reading, Scratch, Writing, unsupported};
use blockflash_foreign::{Described, Error, Foreign, views};
use blockflash_ops::{DType, Device, Stream};
use half::{bf16, f16};
use std::cell::RefCell;
use std::sync::Arc;

/// Work beside candle's stream.
pub(crate) struct Fork {
    candle: Arc<CudaStream>,
    device: CudaDevice,
    own: Stream,
    is_captured: bool,
}

/// What a stream of this crate is for: the ordinal of a device and, if it serves captures, the
/// stream of candle that is captured.
type Role = (usize, Option<usize>);

thread_local! {
    /// The streams of this thread.
    static STREAMS: RefCell<Vec<(Role, Stream)>> = const { RefCell::new(Vec::new()) };
}

/// The stream of this thread for a role.
fn stream_of(role: Role) -> blockflash_ops::Result<Stream> {
    STREAMS.with_borrow_mut(|streams| {
        if let Some((_, stream)) = streams.iter().find(|(of, _)| *of == role) {
            return Ok(stream.clone());
        }
        let stream = Device::cuda(role.0)?.stream()?;
        streams.push((role, stream.clone()));
        Ok(stream)
    })
}

impl Fork {
    pub(crate) fn new(device: &CudaDevice) -> Result<Self> {
        let candle = device.cuda_stream();
        let status = candle.capture_status().w()?;
        let is_captured = status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let captured = is_captured.then(|| candle.cu_stream().addr());
        let own = stream_of((candle.context().ordinal(), captured)).map_err(refused)?;
        Ok(Self { candle, device: device.clone(), own, is_captured })
    }

    /// Whether candle's stream is being captured into a graph.
    pub(crate) fn is_captured(&self) -> bool {
        self.is_captured
    }

    pub(crate) fn device(&self) -> Device {
        *self.own.device()
    }

    /// Queues work between what candle has queued by now and what it queues next.
    pub(crate) fn run<R>(
        &self,
        work: impl FnOnce(&Stream) -> blockflash_ops::Result<R>,
    ) -> Result<R> {
        let event = self.candle.record_event(None).w()?;
        let wait = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the stream lives as long as `own`, and the event lives. Both are of the device's
        // primary context, which `record_event` has made current.
        unsafe { result::stream::wait_event(self.own.raw().cast(), event.cu_event(), wait) }.w()?;
        // Dropped after the work was queued, whatever came of it.
        let _join = Join { fork: self, event };
        work(&self.own).map_err(refused)
    }

    pub(crate) fn read<'a>(
        &'a self,
        what: &'static str,
        storage: &'a CudaStorage,
        layout: &'a Layout,
    ) -> Result<Reading<'a>> {
        match &storage.slice {
            CudaStorageSlice::F16(slice) => self.view(what, slice, layout, DType::F16),
            CudaStorageSlice::BF16(slice) => self.view(what, slice, layout, DType::BF16),
            CudaStorageSlice::F32(slice) => self.view(what, slice, layout, DType::F32),
            CudaStorageSlice::U8(slice) => self.view(what, slice, layout, DType::U8),
            CudaStorageSlice::I32(slice) => self.view(what, slice, layout, DType::I32),
            CudaStorageSlice::U32(slice) => self.view(what, slice, layout, DType::I32),
            CudaStorageSlice::F8E4M3(slice) => self.view(what, slice, layout, DType::E4M3),
            _ => unsupported(what, storage.dtype()),
        }
    }

    fn view<'a, T>(
        &'a self,
        what: &'static str,
        slice: &'a CudaSlice<T>,
        layout: &Layout,
        dtype: DType,
    ) -> Result<Reading<'a>> {
        let own = self.layout_in(what, slice, layout)?;
        let (start, in_use) = slice.device_ptr(&self.candle);
        let address = start as usize + layout.start_offset() * dtype.size();
        let described = Described { address, ..Described::new(what, self.device(), dtype, own) };
        // SAFETY: 1. The span is within the slice, which is memory of this device. candle frees it
        // in the order of its stream, which waits for the work (`run`); `in_use` tells other
        // streams of candle. Whoever launches a graph with the work keeps its tensors, as for
        // candle's own operations in it. 2. No stream is described. 3. Others write to it in the
        // order of candle's stream.
        let view = unsafe { Foreign::new(described) }.into_view().map_err(wrong)?;
        Ok(Reading { view, _in_use: Some(in_use) })
    }

    /// The layout of a tensor that is in a slice on the device of the call.
    fn layout_in<T>(
        &self,
        what: &'static str,
        slice: &CudaSlice<T>,
        layout: &Layout,
    ) -> Result<blockflash_ops::Layout> {
        let (found, ordinal) = (slice.ordinal(), self.candle.context().ordinal());
        if found != ordinal {
            bail!("{what} is on GPU {found}, but the call runs on GPU {ordinal}");
        }
        let own = blockflash_ops::Layout::strided(layout.dims(), layout.stride());
        let own = own.map_err(|source| wrong(Error::Operand { what, source }))?;
        let end = layout.start_offset().checked_add(own.span());
        if end.is_none_or(|end| end > slice.len()) {
            bail!("{what}: the layout {layout:?} reaches beyond {} elements", slice.len());
        }
        Ok(own)
    }

    /// Memory for a result or, as bytes, for a workspace, which holds anything unless `zeroed`.
    pub(crate) fn allocate(
        &self,
        dtype: DType,
        elements: usize,
        zeroed: bool,
    ) -> Result<CudaStorage> {
        match dtype {
            DType::F16 => self.new_slice::<f16>(elements, zeroed),
            DType::BF16 => self.new_slice::<bf16>(elements, zeroed),
            DType::F32 => self.new_slice::<f32>(elements, zeroed),
            DType::U8 => self.new_slice::<u8>(elements, zeroed),
            DType::I32 => self.new_slice::<u32>(elements, zeroed),
            dtype => bail!("a result is {dtype}, expected f16, bf16, f32, u8 or i32"),
        }
    }

    fn new_slice<T>(&self, elements: usize, zeroed: bool) -> Result<CudaStorage>
    where
        T: CudaDType
            + candle_core::cuda_backend::cudarc::driver::DeviceRepr
            + candle_core::cuda_backend::cudarc::driver::ValidAsZeroBits,
    {
        let slice = if zeroed {
            self.device.alloc_zeros::<T>(elements)?
        } else {
            // SAFETY: numbers of any bits, and the call writes all of them before anybody reads
            // them.
            unsafe { self.device.alloc::<T>(elements)? }
        };
        Ok(CudaStorage::wrap_cuda_slice(slice, self.device.clone()))
    }

    pub(crate) fn write<'a>(
        &'a self,
        storage: &'a mut CudaStorage,
        shape: &[usize],
    ) -> Result<Writing<'a>> {
        self.write_to("the result", storage, &Layout::contiguous(shape))
    }

    /// The view of a tensor that exists.
    pub(crate) fn write_to<'a>(
        &'a self,
        what: &'static str,
        storage: &'a mut CudaStorage,
        layout: &Layout,
    ) -> Result<Writing<'a>> {
        let found = storage.dtype();
        match &mut storage.slice {
            CudaStorageSlice::F16(slice) => self.view_mut(what, slice, layout, DType::F16),
            CudaStorageSlice::BF16(slice) => self.view_mut(what, slice, layout, DType::BF16),
            CudaStorageSlice::F32(slice) => self.view_mut(what, slice, layout, DType::F32),
            CudaStorageSlice::U8(slice) => self.view_mut(what, slice, layout, DType::U8),
            CudaStorageSlice::U32(slice) => self.view_mut(what, slice, layout, DType::I32),
            CudaStorageSlice::F8E4M3(slice) => self.view_mut(what, slice, layout, DType::E4M3),
            _ => unsupported(what, found),
        }
    }

    fn view_mut<'a, T>(
        &'a self,
        what: &'static str,
        slice: &'a mut CudaSlice<T>,
        layout: &Layout,
        dtype: DType,
    ) -> Result<Writing<'a>> {
        let own = self.layout_in(what, slice, layout)?;
        let (start, in_use) = slice.device_ptr_mut(&self.candle);
        let address = start as usize + layout.start_offset() * dtype.size();
        let described = Described { address, ..Described::new(what, self.device(), dtype, own) };
        // SAFETY: as in `view`; the slice is borrowed exclusively, and nobody has a copy of it.
        let foreign = unsafe { Foreign::new(described) };
        match views(([], []), [Some(foreign)]).map_err(wrong)? {
            ([], [], [Some(view)]) => Ok(Writing { view, _in_use: Some(in_use) }),
            _ => bail!("{what} has no view"),
        }
    }

    /// Bytes that [`allocate`](Self::allocate) has given as a tensor of this crate, for work that
    /// [`run`](Self::run) queues while the storage is borrowed.
    pub(crate) fn scratch<'a>(&'a self, storage: &'a mut CudaStorage) -> Result<Scratch<'a>> {
        let slice = storage.as_cuda_slice_mut::<u8>()?;
        let bytes = slice.len();
        let layout = blockflash_ops::Layout::contiguous(&[bytes]);
        let layout = layout.map_err(|error| refused(error.into()))?;
        let (start, in_use) = slice.device_ptr_mut(&self.candle);
        let described = Described::new("the workspace", self.device(), DType::U8, layout);
        let described = Described { address: start as usize, ..described };
        // SAFETY: as in `view`; the slice, which has these bytes, is borrowed exclusively, and work
        // is queued with them in `run` alone, for which candle's stream waits.
        let tensor = unsafe { Foreign::new(described).scratch(&self.own) };
        Ok(Scratch { tensor: tensor.map_err(wrong)?, _in_use: in_use })
    }
}

/// An error of candle that keeps the type of this one.
fn wrong(error: Error) -> candle_core::Error {
    match error {
        Error::Safe(error) => refused(error.into()),
        error => candle_core::Error::wrap(error),
    }
}

/// Makes candle's stream wait for the work when it is dropped.
struct Join<'a> {
    fork: &'a Fork,
    event: CudaEvent,
}

impl Drop for Join<'_> {
    fn drop(&mut self) {
        let Fork { candle, own, .. } = self.fork;
        // SAFETY: stream and event live, and are of the device's primary context.
        let recorded = unsafe { result::event::record(self.event.cu_event(), own.raw().cast()) };
        if recorded.and_then(|()| candle.wait(&self.event)).is_err() {
            // The memory must not be freed before the work is done. A device that fails here, too,
            // has stopped.
            let _ = own.synchronize();
        }
    }
}
