//! Queries of the driver about itself and its GPUs, without creating a context.

use crate::driver::{check, initialise};
use crate::gpu::CudaProperties;
use crate::{Error, Result};
use blockflash_sys::ComputeCapability;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use serde::Serialize;
use std::ffi::CStr;

impl CudaProperties {
    /// Queries the driver, without creating a context.
    pub(crate) fn read(ordinal: usize) -> Result<CudaProperties> {
        let device = device_handle(ordinal)?;
        let driver_version = initialise()?;
        let number =
            |which| attribute(device, which).map(|value| u32::try_from(value).unwrap_or(0));
        let mut name = [0u8; 256];
        // SAFETY: 1. `device` comes from the driver. 2. The buffer is valid for writes of the
        // length that is passed.
        let code =
            unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device) };
        check("cuDeviceGetName", code)?;
        let mut memory_bytes = 0;
        // SAFETY: 1. `device` comes from the driver. 2. The pointer is valid for writes during the
        // call.
        check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&mut memory_bytes, device) })?;
        Ok(CudaProperties {
            ordinal,
            name: CStr::from_bytes_until_nul(&name)
                .map_or_else(|_| String::new(), |name| name.to_string_lossy().into_owned()),
            compute_capability: ComputeCapability::new(
                number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            smem_per_block: number(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
            smem_per_multiprocessor: number(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            )?,
            l2_bytes: number(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
            memory_bytes: memory_bytes as u64,
            driver_version,
            clock_khz: number(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?,
            memory_clock_khz: number(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?,
            memory_bus_bits: number(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?,
        })
    }
}

/// The driver and its GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CudaDriver {
    /// The newest CUDA version that the driver supports: 13000 is 13.0.
    pub version: u32,
    /// All GPUs that the driver shows, usable or not; at least one.
    pub devices: Vec<CudaProperties>,
}

/// The CUDA driver and GPUs of this machine, or the error that explains why there are none.
pub type CudaStatus = Result<CudaDriver>;

/// Queries the driver, without creating a context.
pub fn cuda_status() -> CudaStatus {
    let version = initialise()?;
    let count = device_count()?;
    if count == 0 {
        return Err(Error::NoSuchDevice { ordinal: 0, count });
    }
    Ok(CudaDriver {
        version,
        devices: (0..count).map(CudaProperties::read).collect::<Result<_>>()?,
    })
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

pub(crate) fn attribute(device: sys::CUdevice, attribute: Attribute) -> Result<i32> {
    let mut value = 0;
    // SAFETY: 1. `device` comes from `device_handle`. 2. The pointer is valid for writes during the
    // call.
    check("cuDeviceGetAttribute", unsafe {
        sys::cuDeviceGetAttribute(&mut value, attribute, device)
    })?;
    Ok(value)
}
