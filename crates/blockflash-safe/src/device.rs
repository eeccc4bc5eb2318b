use crate::context::{Context, attribute, device_count, device_handle};
use crate::driver::{check, initialise};
use crate::kernel::Kernel;
use crate::{ComputeCapability, Error, KernelInfo, Result, Row, Stream};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use serde::Serialize;
use std::ffi::CStr;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

/// The CPU or one CUDA GPU. A small copyable name; the GPU's context behind it lives as long as the
/// process.
///
/// As text: `cpu`, `cuda:0`, `cuda:1`, …; `cuda` is read as `cuda:0`.
#[derive(Clone, Copy)]
pub struct Device(Option<&'static Context>);

impl Device {
    /// Host memory, host threads.
    pub const fn cpu() -> Device {
        Device(None)
    }

    /// The GPU of this number, from 0, as the driver orders them (`CUDA_VISIBLE_DEVICES` applies).
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::DriverTooOld`], [`Error::NoSuchDevice`], [`Error::Cuda`].
    pub fn cuda(ordinal: usize) -> Result<Device> {
        Context::of(ordinal).map(|context| Device(Some(context)))
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

    /// Whether this is the CPU.
    #[inline]
    pub fn is_cpu(&self) -> bool {
        self.0.is_none()
    }

    /// What the GPU is; `None` for the CPU.
    #[inline]
    pub fn cuda_properties(&self) -> Option<&CudaProperties> {
        self.0.map(|context| &context.properties)
    }

    /// A new stream: a queue of work that runs in order, independent of other streams (also of
    /// CUDA's default stream). On the CPU work runs at once, before its call returns.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn stream(&self) -> Result<Stream> {
        Stream::new(*self)
    }

    /// Loads the kernel of a row now instead of at its first launch, and says what it occupies.
    ///
    /// # Errors
    /// [`Error::NotOnGpu`] for the CPU, [`Error::Image`] for a missing image, [`Error::Cuda`] for
    /// one that this GPU cannot run.
    pub fn preload(&self, row: &Row) -> Result<KernelInfo> {
        let context = self.0.ok_or(Error::NotOnGpu { what: "loading a kernel" })?;
        Ok(Kernel::of(context, row)?.info)
    }

    pub(crate) fn with_context(context: &'static Context) -> Device {
        Device(Some(context))
    }

    pub(crate) fn context(&self) -> Option<&'static Context> {
        self.0
    }

    /// Checks that something on `found` may be used in work on this device.
    pub(crate) fn expect(&self, found: &Device) -> Result<()> {
        if self == found {
            Ok(())
        } else {
            Err(Error::DeviceMismatch { expected: *self, found: *found })
        }
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        self.0.map(|context| context.ordinal) == other.0.map(|context| context.ordinal)
    }
}

impl Eq for Device {}

impl Hash for Device {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.map(|context| context.ordinal).hash(state);
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str("cpu"),
            Some(context) => write!(f, "cuda:{}", context.ordinal),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
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

/// What the driver says about a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CudaProperties {
    /// The N of `cuda:N`.
    pub ordinal: usize,
    /// Product name.
    pub name: String,
    /// Which images it can run.
    pub compute_capability: ComputeCapability,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory in bytes that one block may use when it asks for it.
    pub smem_per_block: u32,
    /// Shared memory in bytes of a multiprocessor.
    pub smem_per_multiprocessor: u32,
    /// L2 cache in bytes.
    pub l2_bytes: u64,
    /// Device memory in bytes.
    pub memory_bytes: u64,
    /// The newest CUDA version that the driver supports: 13000 is 13.0.
    pub driver_version: u32,
    /// Highest multiprocessor clock in kHz.
    pub clock_khz: u32,
    /// Highest memory clock in kHz.
    pub memory_clock_khz: u32,
    /// Width of the memory bus in bits.
    pub memory_bus_bits: u32,
}

impl CudaProperties {
    /// Asks the driver; creates no context.
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

/// What CUDA offers on this machine, or the error that says why it offers nothing.
pub type CudaStatus = Result<CudaDriver>;

/// Asks the driver what there is; creates no context.
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

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
