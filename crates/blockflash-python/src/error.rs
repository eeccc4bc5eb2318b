//! Errors as Python exceptions.

use blockflash_foreign::with_parameters;
use blockflash_ops::Error;
use blockflash_safe::Error as SafeError;
use pyo3::create_exception;
use pyo3::exceptions::{PyNotImplementedError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyType;

create_exception!(
    blockflash,
    Misaligned,
    PyValueError,
    "An operand does not allow the 16-byte accesses of the kernel, or on the CPU is between the \
     elements of a tensor that is written: a copy does."
);
create_exception!(
    blockflash,
    Unsupported,
    PyNotImplementedError,
    "No kernel takes this call on this device, or its gradient is not implemented."
);
create_exception!(
    blockflash,
    DeviceError,
    PyRuntimeError,
    "The driver, the device or its memory failed, or there is no usable GPU."
);

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i32 = 2;

/// The kinds of exception that the package raises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Value,
    Misaligned,
    Unsupported,
    Device,
    /// A GPU has no memory left.
    Memory,
}

/// An exception to be: its kind and its text.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) kind: Kind,
    pub(crate) text: String,
}

/// Result of the code between Python and the operations.
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// The caller passed something wrong.
    pub(crate) fn value(text: impl Into<String>) -> Failure {
        Failure { kind: Kind::Value, text: text.into() }
    }

    /// The text after the name of its kind: what remains of the type in an exception of C++.
    pub(crate) fn tagged(&self) -> String {
        format!("{:?}: {}", self.kind, self.text)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let kind = match &error {
            Error::Safe(safe) => kind_of_safe(safe),
            Error::Misaligned { .. } => Kind::Misaligned,
            Error::Unsupported { .. } | Error::TooLarge { .. } => Kind::Unsupported,
            // 0 is none at all.
            Error::BlockSize { value: 1.., .. } => Kind::Unsupported,
            _ => Kind::Value,
        };
        Failure { kind, text: with_parameters(&error.to_string()) }
    }
}

impl From<SafeError> for Failure {
    fn from(error: SafeError) -> Failure {
        Failure { kind: kind_of_safe(&error), text: with_parameters(&error.to_string()) }
    }
}

/// Errors about shapes and views come from the caller's tensors, all others from the device.
fn kind_of_safe(error: &SafeError) -> Kind {
    match error {
        SafeError::Rank { .. }
        | SafeError::ShapeStrides { .. }
        | SafeError::TooLarge
        | SafeError::OutOfBounds { .. }
        | SafeError::Slice { .. }
        | SafeError::Flatten { .. }
        | SafeError::Expand { .. }
        | SafeError::Permutation { .. }
        | SafeError::DType { .. }
        | SafeError::NotOnCpu { .. }
        | SafeError::NotOnGpu { .. }
        | SafeError::DeviceMismatch { .. }
        | SafeError::OverlappingOutput { .. }
        | SafeError::Pointer { .. }
        | SafeError::Indices { .. } => Kind::Value,
        SafeError::Unsupported { .. } => Kind::Unsupported,
        SafeError::DeviceOutOfMemory { .. } => Kind::Memory,
        SafeError::Cuda { code: OUT_OF_MEMORY, .. } => Kind::Memory,
        _ => Kind::Device,
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> PyErr {
        match failure.kind {
            Kind::Value => PyValueError::new_err(failure.text),
            Kind::Misaligned => Misaligned::new_err(failure.text),
            Kind::Unsupported => Unsupported::new_err(failure.text),
            Kind::Device => DeviceError::new_err(failure.text),
            Kind::Memory => Python::attach(|py| match out_of_memory_error(py) {
                Ok(kind) => PyErr::from_type(kind, failure.text),
                Err(_) => DeviceError::new_err(failure.text),
            }),
        }
    }
}

/// `torch.OutOfMemoryError`, which callers of torch catch.
pub(crate) fn out_of_memory_error(py: Python<'_>) -> PyResult<Bound<'_, PyType>> {
    Ok(py.import("torch")?.getattr("OutOfMemoryError")?.cast_into()?)
}

/// Does work that allocates on a GPU, and once more if there is no memory, after torch has given
/// back to the driver what it keeps of freed tensors: only its own allocations find that.
pub(crate) fn with_memory<T>(mut work: impl FnMut() -> Result<T>) -> Result<T> {
    let give_back = |py: Python<'_>| -> PyResult<()> {
        py.import("torch.cuda")?.call_method0("empty_cache").map(drop)
    };
    match work() {
        Err(Failure { kind: Kind::Memory, .. }) if Python::attach(give_back).is_ok() => work(),
        outcome => outcome,
    }
}
