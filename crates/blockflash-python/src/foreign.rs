//! Tensors and streams of torch as views and streams of `blockflash-ops`.
//!
//! torch publishes the table of DLPack's C exchange interface as
//! `torch.Tensor.__dlpack_c_exchange_api__`. It gives the address, shape, strides, type, device and
//! current stream of a tensor and owns nothing, so a [`Foreign`] borrows the Python object.

use crate::error::{Failure, Kind, Result};
use blockflash_ops::{DType, Device, Layout, Stream, Tensor, View, ViewMut};
use blockflash_safe::{Footprint, MAX_RANK};
use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLTensor};
use dlpark::python::consumer::exchange::ExchangeApi;
use pyo3::exceptions::{PyImportError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use std::ffi::c_void;
use std::fmt::Display;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

/// A description of memory that somebody else owns during `'a`. [`views`] gives access to it.
pub(crate) struct Foreign<'a> {
    what: &'static str,
    device: Device,
    dtype: DType,
    layout: Layout,
    address: usize,
    /// Addresses from the first element to the end of the last one, gaps included.
    span: Range<usize>,
    stream: usize,
    memory: PhantomData<&'a ()>,
}

/// What a library says about a tensor; strides are in elements.
pub(crate) struct Described<'d> {
    pub(crate) what: &'static str,
    pub(crate) device: Device,
    pub(crate) dtype: DType,
    pub(crate) shape: &'d [i64],
    pub(crate) strides: &'d [i64],
    pub(crate) address: usize,
    /// The stream on which the caller works; null on the CPU.
    pub(crate) stream: *mut c_void,
}

impl<'a> Foreign<'a> {
    /// The same as [`of`](Self::of) for a tensor that has not passed torch's dispatcher, which
    /// resolves the negative bit for the operands of operators. DLPack says nothing of the bit.
    pub(crate) fn direct(
        what: &'static str,
        object: &'a Bound<'_, PyAny>,
    ) -> PyResult<Foreign<'a>> {
        let foreign = Self::of(what, object)?;
        if object.call_method0(intern!(object.py(), "is_neg"))?.is_truthy()? {
            let text = format!("{what} is a view of what it negates: use resolve_neg()");
            return Err(Failure::value(text).into());
        }
        Ok(foreign)
    }

    /// The torch tensor behind a Python object; `what` names the operand in errors.
    ///
    /// # Errors
    /// `TypeError` for anything but a `torch.Tensor`; `ValueError` for a tensor without memory
    /// and for element types and devices that no operation takes.
    pub(crate) fn of(what: &'static str, object: &'a Bound<'_, PyAny>) -> PyResult<Foreign<'a>> {
        let py = object.py();
        let torch = Torch::get(py)?;
        torch.check_type(what, object)?;
        let read = |tensor: &DLTensor, stream| {
            // SAFETY: 1. torch wrote the descriptor, whose arrays live during this call. 2. The
            // borrow of the Python object keeps the tensor, and torch frees memory of a GPU in the
            // order of the stream. Only Python code that replaces the memory of a tensor while
            // another thread computes with it could free it too early, which is wrong for every
            // operator of torch. 3. It is torch's current stream.
            unsafe { Foreign::from_dlpack(what, tensor, stream) }
        };
        match torch.table.with_tensor_view_no_sync(object.as_borrowed(), read) {
            Ok(foreign) => Ok(foreign?),
            Err(error) => {
                let text = format!("{what} has no memory to compute with: {}", error.value(py));
                Err(Failure::value(text).into())
            }
        }
    }

    /// # Safety
    /// 1. The arrays of the descriptor are readable.
    /// 2. As [`Foreign::new`], 1.
    /// 3. As [`Foreign::new`], 2.
    unsafe fn from_dlpack(
        what: &'static str,
        tensor: &DLTensor,
        stream: *mut c_void,
    ) -> Result<Foreign<'a>> {
        let invalid = |error| Failure::value(format!("{what}: {error}"));
        // SAFETY: point 1 of this function.
        let (shape, strides) = unsafe { (tensor.shape(), tensor.strides_or_compact()) };
        let described = Described {
            what,
            device: device(what, tensor.device)?,
            dtype: dtype(what, tensor.dtype)?,
            shape: shape.map_err(invalid)?,
            strides: &strides.map_err(invalid)?,
            address: tensor.data.expose_provenance().wrapping_add(tensor.byte_offset as usize),
            stream,
        };
        // SAFETY: points 2 and 3 of this function.
        unsafe { Foreign::new(&described) }
    }

    /// # Safety
    /// 1. Unless the address is null, the described elements are memory of the device that stays
    ///    valid for `'a`, and on a GPU until the work is done that is queued on the stream during
    ///    `'a`.
    /// 2. The stream belongs to the device's primary context and lives at least as long.
    pub(crate) unsafe fn new(described: &Described<'_>) -> Result<Foreign<'a>> {
        let &Described { what, device, dtype, shape, strides, address, stream } = described;
        let refused = |error: &dyn Display| Failure::value(format!("{what}: {error}"));
        let sizes = |numbers: &[i64]| {
            let mut sizes = [0; MAX_RANK];
            let fit = numbers.len() <= MAX_RANK && numbers.iter().all(|&number| number >= 0);
            sizes.iter_mut().zip(numbers).for_each(|(size, &number)| *size = number as usize);
            fit.then_some(sizes)
        };
        let (Some(sizes), Some(steps)) = (sizes(shape), sizes(strides)) else {
            let text = format!("a tensor of sizes {shape:?} and strides {strides:?} is no operand");
            return Err(refused(&text));
        };
        let layout = Layout::strided(&sizes[..shape.len()], &steps[..strides.len()]);
        let layout = layout.map_err(|error| refused(&error))?;
        let span = Footprint { address, dtype, layout: &layout }.span();
        let stream = stream.expose_provenance();
        Ok(Foreign { what, device, dtype, layout, address, span, stream, memory: PhantomData })
    }

    /// The stream on which torch works now, on the device of this tensor.
    pub(crate) fn stream(&self) -> Result<Stream> {
        if self.device.is_cpu() {
            return Ok(self.device.stream()?);
        }
        if self.stream == PER_THREAD_DEFAULT_STREAM {
            let text = "the current stream is CUDA's per-thread default stream, which cannot be \
                        used here: choose another one with torch.cuda.stream";
            return Err(Failure::value(text));
        }
        // SAFETY: 1. Point 2 of `new`; the per-thread default stream is refused above. 2. Streams
        // of torch live as long as the process. 3. torch keeps the memory of the graphs that it
        // captures, masks and patterns outlive them (`Entry::outlive_capture`), launches are
        // ordered by the user as for every operator of torch, and captured work uses no memory in
        // turns (`pattern::workspace`) but what torch has allocated in the capture for one call
        // (`scratch`).
        Ok(unsafe { Stream::from_raw(&self.device, with_exposed_provenance_mut(self.stream)) }?)
    }

    /// The elements, for a call that writes no tensor.
    pub(crate) fn view(&self) -> Result<View<'a>> {
        let Foreign { what, device, dtype, layout, address, .. } = self;
        let pointer = with_exposed_provenance(*address);
        // SAFETY: 1. and 2. Point 1 of `new`. No tensor of the call that is written has memory of
        // the elements, or on the CPU of their span (`views`).
        let made = unsafe { View::from_raw(device, pointer, *dtype, *layout) };
        made.map_err(|error| Failure::value(format!("{what}: {error}")))
    }

    /// The memory of this tensor as a workspace of work that is queued on the stream, torch's
    /// current one, while `self` exists.
    pub(crate) fn scratch(&self, stream: &Stream) -> Result<Tensor> {
        let pointer = with_exposed_provenance_mut(self.address);
        // SAFETY: 1. The memory is valid for work that is queued during `'a`, and no other work
        // uses the tensor, which the caller drops when its call is queued. After that, torch reuses
        // the memory in the order of the same stream, and so does a graph. 2. torch has just
        // allocated the memory for this call alone.
        let tensor =
            unsafe { Tensor::from_raw(stream, pointer, self.dtype, self.layout.shape(), ()) };
        Ok(tensor?)
    }

    /// Refuses a tensor that is written if it shares memory with another one. On the CPU, where
    /// views are slices, one that only is in the gaps of the other is refused as something that
    /// a copy mends.
    fn apart_from(&self, other: &Foreign<'_>) -> Result<()> {
        let (own, others) = (&self.span, &other.span);
        // Nearly always.
        if own.start.max(others.start) >= own.end.min(others.end) || self.device != other.device {
            return Ok(());
        }
        let overlap = self.footprint().overlaps(&other.footprint());
        let (what, other) = (self.what, other.what);
        if overlap {
            return Err(Failure::value(format!("{what} shares memory with {other}")));
        }
        if self.device.is_cpu() {
            let text = format!("{what} is between elements of {other}");
            return Err(Failure { kind: Kind::Misaligned, text });
        }
        Ok(())
    }

    fn footprint(&self) -> Footprint<'_> {
        Footprint { address: self.address, dtype: self.dtype, layout: &self.layout }
    }
}

/// The views of one call: of the tensors that it reads, and of those that it writes.
///
/// # Errors
/// A tensor that is written must share no memory with another one of the call or with itself. One
/// that interleaves with another one is `Misaligned` on the CPU: a copy of that one does.
#[allow(clippy::type_complexity)]
pub(crate) fn views<'a, const R: usize, const W: usize>(
    read: &[Option<Foreign<'a>>; R],
    write: [Option<Foreign<'a>>; W],
) -> Result<([Option<View<'a>>; R], [Option<ViewMut<'a>>; W])> {
    for (at, written) in write.iter().enumerate() {
        let others = read.iter().chain(&write[..at]).flatten();
        for (written, other) in others.flat_map(|other| Some((written.as_ref()?, other))) {
            written.apart_from(other)?;
        }
    }
    let mut views = ([None; R], [const { None }; W]);
    for (view, foreign) in views.0.iter_mut().zip(read) {
        *view = foreign.as_ref().map(Foreign::view).transpose()?;
    }
    for (view, foreign) in views.1.iter_mut().zip(&write) {
        let Some(Foreign { what, device, dtype, layout, address, .. }) = foreign else { continue };
        let pointer = with_exposed_provenance_mut(*address);
        // SAFETY: 1. and 2. Point 1 of `Foreign::new`. No other tensor of the call has memory of
        // the elements, or on the CPU of their span.
        let made = unsafe { ViewMut::from_raw(device, pointer, *dtype, *layout) };
        *view = Some(made.map_err(|error| Failure::value(format!("{what}: {error}")))?);
    }
    Ok(views)
}

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD_DEFAULT_STREAM: usize = 2;

fn device(what: &'static str, device: DLDevice) -> Result<Device> {
    let ordinal = usize::try_from(device.device_id);
    match (device.device_type, ordinal) {
        (DLDeviceType::CPU | DLDeviceType::CUDAHOST, _) => Ok(Device::cpu()),
        (DLDeviceType::CUDA, Ok(ordinal)) => Ok(Device::cuda(ordinal)?),
        (DLDeviceType(number), _) => Err(Failure::value(format!(
            "{what} is on a device of another kind than CPU and CUDA (DLPack's number {number})"
        ))),
    }
}

fn dtype(what: &'static str, dtype: DLDataType) -> Result<DType> {
    Ok(match dtype {
        DLDataType::F16 => DType::F16,
        DLDataType::BF16 => DType::BF16,
        DLDataType::F32 => DType::F32,
        DLDataType::I32 => DType::I32,
        DLDataType::U8 => DType::U8,
        DLDataType { code, bits, .. } => {
            let class = match code {
                DLDataTypeCode::INT => "int",
                DLDataTypeCode::UINT => "uint",
                DLDataTypeCode::FLOAT => "float",
                DLDataTypeCode::COMPLEX => "complex",
                DLDataTypeCode::BOOL => "bool",
                _ => "of a type of bits: ",
            };
            return Err(unsupported_dtype(what, &format!("{class}{bits}")));
        }
    })
}

/// The error of an operand of this element type.
pub(crate) fn unsupported_dtype(what: &str, dtype: &str) -> Failure {
    Failure::value(format!(
        "{what} is {dtype}: float16, bfloat16 and float32 are possible, and int32 for indices and \
         offsets"
    ))
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
