//! The CUDA context of one GPU, and making it current.

use crate::driver::{Handle, check, initialise};
use crate::kernel::Kernel;
use crate::{CudaProperties, Error, Result, Row, lock};
use cudarc::driver::sys::{self, CUdevice_attribute};
use std::collections::HashMap;
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, Mutex, RwLock};

/// The primary context of a GPU (the one that the CUDA runtime, PyTorch and candle use too) and
/// what belongs to it.
///
/// Retained for the rest of the process: tearing a context down and up again takes seconds, and
/// kernels stay loaded. It is retained directly and not through `cudarc::driver::CudaContext`,
/// whose streams record events around every argument; that disturbs graph capture and timings of
/// microseconds, and here the lifetime rules of `memory.rs` do what is needed.
pub(crate) struct Context {
    pub(crate) ordinal: usize,
    pub(crate) properties: CudaProperties,
    pub(crate) has_memory_pools: bool,
    /// Kernels by row: a hash of a few integers per launch, no strings.
    pub(crate) kernels: RwLock<HashMap<Row, Arc<Kernel>>>,
    raw: Handle<sys::CUctx_st>,
}

impl Context {
    /// The context of a GPU, created on first use.
    pub(crate) fn of(ordinal: usize) -> Result<&'static Context> {
        static CONTEXTS: Mutex<Vec<&'static Context>> = Mutex::new(Vec::new());
        let mut contexts = lock(&CONTEXTS);
        if let Some(context) = contexts.iter().find(|context| context.ordinal == ordinal) {
            return Ok(context);
        }
        let context: &'static Context = Box::leak(Box::new(Context::new(ordinal)?));
        contexts.push(context);
        Ok(context)
    }

    fn new(ordinal: usize) -> Result<Context> {
        let properties = CudaProperties::read(ordinal)?;
        let device = device_handle(ordinal)?;
        let has_memory_pools =
            attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0;
        let mut raw = ptr::null_mut();
        // SAFETY: 1. `device` comes from the driver. 2. The pointer is valid for writes during the
        // call.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&mut raw, device)
        })?;
        Ok(Context {
            ordinal,
            properties,
            has_memory_pools,
            kernels: RwLock::default(),
            raw: Handle(raw),
        })
    }

    pub(crate) fn raw(&self) -> sys::CUcontext {
        self.raw.0
    }

    /// Makes the context current in the calling thread until the guard is dropped. The current
    /// context is a property of the thread, so every call into the driver that depends on it does
    /// this first.
    pub(crate) fn bind(&self) -> Result<Bound> {
        let mut current = ptr::null_mut();
        // SAFETY: 1. The driver is initialised, or there would be no context. 2. The pointer is
        // valid for writes.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut current) })?;
        if current == self.raw.0 {
            return Ok(Bound { pushed: false, thread: PhantomData });
        }
        // SAFETY: the context is retained for the rest of the process.
        check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(self.raw.0) })?;
        Ok(Bound { pushed: true, thread: PhantomData })
    }
}

/// A context is current in this thread; dropping restores the previous one.
pub(crate) struct Bound {
    pushed: bool,
    /// Tied to the thread: not `Send`.
    thread: PhantomData<*const ()>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = ptr::null_mut();
            // SAFETY: 1. This thread pushed a context, and guards are dropped in reverse order of
            // creation, so the one on top is ours. 2. The pointer is valid for writes. An error has
            // no one to be reported to.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}

/// The driver's name for a GPU.
pub(crate) fn device_handle(ordinal: usize) -> Result<sys::CUdevice> {
    let count = device_count()?;
    let number = i32::try_from(ordinal).ok().filter(|_| ordinal < count);
    let number = number.ok_or(Error::NoSuchDevice { ordinal, count })?;
    let mut device = 0;
    // SAFETY: 1. `device_count` initialised the driver. 2. The pointer is valid for writes during
    // the call.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, number) })?;
    Ok(device)
}

/// Number of GPUs; 0 when the driver sees none.
pub(crate) fn device_count() -> Result<usize> {
    match initialise() {
        Err(Error::NoSuchDevice { .. }) => return Ok(0),
        other => other?,
    };
    let mut count = 0;
    // SAFETY: 1. The driver is initialised. 2. The pointer is valid for writes during the call.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    Ok(usize::try_from(count).unwrap_or(0))
}

pub(crate) fn attribute(device: sys::CUdevice, attribute: CUdevice_attribute) -> Result<i32> {
    let mut value = 0;
    // SAFETY: 1. `device` comes from `device_handle`. 2. The pointer is valid for writes during the
    // call.
    check("cuDeviceGetAttribute", unsafe {
        sys::cuDeviceGetAttribute(&mut value, attribute, device)
    })?;
    Ok(value)
}
