//! Tensors of torch as operands.
//!
//! torch publishes the table of DLPack's C exchange interface as
//! `torch.Tensor.__dlpack_c_exchange_api__`. It gives the address, shape, strides, type, device and
//! current stream of a tensor and owns nothing, so a [`Foreign`] borrows the Python object.

use crate::error::{Failure, Kind, Result};
use blockflash_foreign::{DLTensor, Error};
pub(crate) use blockflash_foreign::{Foreign, Operands, views};
use blockflash_ops::{Stream, Tensor};
use dlpark::python::consumer::exchange::ExchangeApi;
use pyo3::exceptions::{PyImportError, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use pyo3::{Borrowed, intern};

/// The torch tensor behind a Python object; `what` names the operand in errors.
///
/// # Errors
/// `TypeError` for anything but a `torch.Tensor`; `ValueError` for a tensor without memory and for
/// element types and devices that no operation takes.
pub(crate) fn of<'a, 'py>(
    what: &'static str,
    object: impl Into<Borrowed<'a, 'py, PyAny>>,
) -> PyResult<Foreign<'a>> {
    let object = object.into();
    let py = object.py();
    let torch = Torch::get(py)?;
    torch.check_type(what, &object)?;
    let read = |tensor: &DLTensor, stream| {
        // SAFETY: 1. torch wrote the descriptor, whose arrays live during this call. 2. The borrow
        // of the Python object keeps the tensor, and torch frees memory of a GPU in the order of
        // the stream, which is its current one. Only Python code that replaces the memory of a
        // tensor while another thread computes with it could free it too early, which is wrong for
        // every operator of torch. Streams of torch live as long as the process. torch keeps the
        // memory of the graphs that it captures, masks and patterns outlive them
        // (`Entry::outlive_capture`), launches are ordered by the user as for every operator of
        // torch, and captured work uses no memory in turns (`pattern::workspace`) but what torch
        // has allocated in the capture for one call (`scratch`). All tensors of a call go into one
        // call of `views`.
        unsafe { Foreign::from_dlpack(what, tensor, stream) }
    };
    match torch.table.with_tensor_view_no_sync(object, read) {
        Ok(foreign) => Ok(foreign.map_err(Failure::from)?),
        Err(error) => {
            let text = format!("{what} has no memory to compute with: {}", error.value(py));
            Err(Failure::value(text).into())
        }
    }
}

/// The same for a tensor that has not passed torch's dispatcher, which resolves the negative bit
/// for the operands of operators. DLPack says nothing of the bit.
pub(crate) fn direct<'a>(
    what: &'static str,
    object: &'a Bound<'_, PyAny>,
) -> PyResult<Foreign<'a>> {
    let foreign = of(what, object)?;
    if object.call_method0(intern!(object.py(), "is_neg"))?.is_truthy()? {
        let text = format!("{what} is a view of what it negates: use resolve_neg()");
        return Err(Failure::value(text).into());
    }
    Ok(foreign)
}

/// The same for a tensor that may be missing.
pub(crate) fn optional<'a>(
    what: &'static str,
    object: Option<&'a Bound<'_, PyAny>>,
) -> PyResult<Option<Foreign<'a>>> {
    object.map(|object| of(what, object)).transpose()
}

/// Memory that torch or XLA has just allocated for one call, as a workspace of work that is queued
/// on the stream, the current one of the library, while the memory is kept.
pub(crate) fn scratch(memory: &Foreign<'_>, stream: &Stream) -> Result<Tensor> {
    // SAFETY: 1. The library has allocated the memory for this call alone, and reuses it in the
    // order of the same stream, and so does a graph of torch. 2. The caller drops the tensor when
    // its call is queued.
    Ok(unsafe { memory.scratch(stream) }?)
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        match error {
            Error::Safe(error) => error.into(),
            Error::Interleaved { .. } => {
                Failure { kind: Kind::Misaligned, text: error.to_string() }
            }
            Error::PerThreadStream => Failure::value(format!("{error} with torch.cuda.stream")),
            error => Failure::value(error.to_string()),
        }
    }
}

/// What is needed of torch, found once.
struct Torch {
    tensor: Py<PyType>,
    table: ExchangeApi,
}

// SAFETY: the table is read only, torch keeps it for the life of the process, and its functions are
// called by threads that are attached to the interpreter, as every `Bound` proves.
unsafe impl Send for Torch {}
// SAFETY: as above.
unsafe impl Sync for Torch {}

impl Torch {
    fn get(py: Python<'_>) -> PyResult<&Torch> {
        static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
        TORCH.get_or_try_init(py, || {
            let tensor = py.import("torch")?.getattr("Tensor")?.cast_into::<PyType>()?;
            let example = py.import("torch")?.getattr("empty")?.call1((0,))?;
            let table = ExchangeApi::from_object(example.as_borrowed())?.ok_or_else(|| {
                PyImportError::new_err("this torch has no DLPack C exchange API: use 2.10 or newer")
            })?;
            Ok(Torch { tensor: tensor.unbind(), table })
        })
    }

    /// torch's functions take its own tensors only, which subclasses such as `Parameter` are, too.
    fn check_type(&self, what: &str, object: &Bound<'_, PyAny>) -> PyResult<()> {
        let (found, tensor) = (object.get_type(), self.tensor.bind(object.py()));
        if found.is(tensor) || found.is_subclass(tensor)? {
            return Ok(());
        }
        let text = format!("{what} must be a torch.Tensor, not {}", found.fully_qualified_name()?);
        Err(PyTypeError::new_err(text))
    }
}
