//! The CUDA context of one GPU: creating it, and making it current.

use crate::device::Device;
use crate::driver::{Relaxed, check};
use crate::gpu::{Context, CudaProperties, Handle};
use crate::lock::lock;
use crate::properties::{attribute, device_count, device_handle};
use crate::{Error, Result};
use blockflash_sys::ComputeCapability;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use std::marker::PhantomData;
use std::ptr;
use std::str::FromStr;
use std::sync::{Mutex, RwLock};

impl Device {
    /// The GPU of this number, from 0, as the driver orders them (`CUDA_VISIBLE_DEVICES` applies).
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::DriverTooOld`], [`Error::NoSuchDevice`], [`Error::Cuda`].
    pub fn cuda(ordinal: usize) -> Result<Device> {
        Context::of(ordinal).map(Device::with_context)
    }

    /// The first GPU that can run the kernels (compute capability 8.0 or newer), else the CPU.
    pub fn best() -> Device {
        let oldest = ComputeCapability::new(8, 0);
        (0..device_count().unwrap_or(0))
            .filter(|&ordinal| {
                CudaProperties::read(ordinal).is_ok_and(|gpu| gpu.compute_capability >= oldest)
            })
            .find_map(|ordinal| Device::cuda(ordinal).ok())
            .unwrap_or(Device::cpu())
    }

    /// Checks that something on `found` may be used in work on this device.
    #[inline]
    pub(crate) fn expect(&self, found: &Device) -> Result<()> {
        if self == found {
            Ok(())
        } else {
            Err(Error::DeviceMismatch { expected: *self, found: *found })
        }
    }
}

impl FromStr for Device {
    type Err = Error;

    fn from_str(text: &str) -> Result<Device> {
        let invalid = || Error::InvalidDevice { text: text.to_owned() };
        match text {
            "cpu" => Ok(Device::cpu()),
            "cuda" => Device::cuda(0),
            _ => {
                let number = text.strip_prefix("cuda:").ok_or_else(invalid)?;
                // `parse` alone would take "+1".
                let digits = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
                Device::cuda(number.parse().ok().filter(|_| digits).ok_or_else(invalid)?)
            }
        }
    }
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
            attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0;
        let mut raw = ptr::null_mut();
        // SAFETY: 1. `device` comes from the driver. 2. The pointer is valid for writes during the
        // call.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&mut raw, device)
        })?;
        let most_kept = properties.memory_bytes / 2;
        let context = Context {
            ordinal,
            properties,
            has_memory_pools,
            kernels: RwLock::default(),
            raw: Handle(raw),
        };
        if has_memory_pools {
            let _bound = context.bind()?;
            // The first use may be inside a capture of somebody else.
            let _relaxed = Relaxed::enter()?;
            keep_freed_memory(device, most_kept)?;
        }
        Ok(context)
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

/// Lets the GPU's memory pool keep up to this many bytes that were freed. By default it gives them
/// back to the system whenever a stream is waited for, and the next allocation maps them again:
/// milliseconds for tensors of gigabytes. A limit that somebody else has set stays.
fn keep_freed_memory(device: sys::CUdevice, most: u64) -> Result<()> {
    let mut pool = ptr::null_mut();
    // SAFETY: 1. `device` comes from the driver. 2. The pointer is valid for writes during the
    // call.
    check("cuDeviceGetDefaultMemPool", unsafe {
        sys::cuDeviceGetDefaultMemPool(&mut pool, device)
    })?;
    let limit = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let mut bytes = 0u64;
    let value = (&raw mut bytes).cast();
    // SAFETY: 1. The pool is the device's own. 2. The attribute is a u64, which `value` points to.
    check("cuMemPoolGetAttribute", unsafe { sys::cuMemPoolGetAttribute(pool, limit, value) })?;
    if bytes != 0 {
        return Ok(());
    }
    bytes = most;
    let value = (&raw mut bytes).cast();
    // SAFETY: as above; the driver only reads it.
    check("cuMemPoolSetAttribute", unsafe { sys::cuMemPoolSetAttribute(pool, limit, value) })
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

#[cfg(test)]
#[path = "context_tests.rs"]
mod tests;
