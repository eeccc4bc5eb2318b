//! The native module of the Python package `blockflash`.
//!
//! It converts torch tensors, streams, numbers and errors, and calls `blockflash-ops`. Nothing is
//! computed here. What users call is Python, in `python/blockflash`; these functions write into
//! tensors that the caller allocated and know nothing of gradients.

mod attention;
mod error;
mod foreign;
mod info;
mod mask;

/// `blockflash._native`
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use crate::attention::attention;
    #[pymodule_export]
    use crate::error::{DeviceError, Misaligned, Unsupported};
    #[pymodule_export]
    use crate::info::{describe, gpu_problem};
}
