//! What the machine offers, for `blockflash.info()` and `blockflash.usable()`.

use blockflash_ops::{ComputeCapability, Device, Status, cuda_status, support};
use blockflash_safe::{cuda_driver_version, cuda_is_initialised};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::collections::BTreeSet;

/// The oldest GPU that the kernels run on.
const OLDEST: ComputeCapability = ComputeCapability::new(8, 0);

/// Why no GPU can be used, or `None` if there is one.
#[pyfunction]
pub(crate) fn gpu_problem() -> Option<String> {
    let driver = match cuda_status() {
        Ok(driver) => driver,
        Err(error) => return Some(error.to_string()),
    };
    let usable = driver.devices.iter().any(|gpu| gpu.compute_capability >= OLDEST);
    let found = || driver.devices.iter().map(|gpu| gpu.name.as_str()).collect::<Vec<_>>();
    (!usable).then(|| {
        format!("no GPU of compute capability {OLDEST} or newer among {}", found().join(", "))
    })
}

/// Why there is no driver that can be used, or `None`. Unlike the functions below it does not make
/// the driver ready.
#[pyfunction]
pub(crate) fn driver_problem() -> Option<String> {
    cuda_driver_version().err().map(|error| error.to_string())
}

/// Whether this process has made the driver ready, so that processes forked from it cannot use
/// CUDA.
#[pyfunction]
pub(crate) fn initialised() -> bool {
    cuda_is_initialised()
}

/// Lets all later calls of the process verify what kernels read on the device, or not.
#[pyfunction]
pub(crate) fn set_checks(enabled: bool) {
    blockflash_ops::set_checks(enabled);
}

/// Version of the package, of the driver, and the GPUs with the number of kernels for each.
#[pyfunction]
pub(crate) fn describe(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let described = PyDict::new(py);
    described.set_item("version", env!("CARGO_PKG_VERSION"))?;
    let (driver, gpus) = match cuda_status() {
        Ok(driver) => {
            let (major, minor) = (driver.version / 1000, driver.version % 1000 / 10);
            (Some(format!("CUDA {major}.{minor}")), driver.devices)
        }
        Err(_) => (None, Vec::new()),
    };
    described.set_item("driver", driver)?;
    let list = PyList::empty(py);
    for gpu in gpus {
        let entry = PyDict::new(py);
        entry.set_item("device", format!("cuda:{}", gpu.ordinal))?;
        entry.set_item("name", &gpu.name)?;
        entry.set_item("compute_capability", gpu.compute_capability.to_string())?;
        entry.set_item("memory_bytes", gpu.memory_bytes)?;
        entry.set_item("kernels", Device::cuda(gpu.ordinal).map_or(0, |gpu| kernels(&gpu)))?;
        list.append(entry)?;
    }
    described.set_item("gpus", list)?;
    described.set_item("gpu_problem", gpu_problem())?;
    Ok(described)
}

/// How many kernels the support table names for this device.
fn kernels(device: &Device) -> usize {
    let names = support(device).into_iter().filter_map(|row| match row.status {
        Status::Kernel { symbol, .. } => Some(symbol),
        _ => None,
    });
    names.collect::<BTreeSet<_>>().len()
}
