//! Operands and results of a call.

use super::Refusal;
use super::api::*;
use crate::{Described, Error, Foreign, Result, layout};
use blockflash_safe::{DType, Device};
use std::slice;

/// Where the buffers of a call are.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) device: Device,
    /// The address of the `CUstream`; 0 on the CPU.
    pub(super) stream: usize,
}

/// A row-major buffer.
#[derive(Clone, Copy)]
pub(super) struct Buffer<'a> {
    dtype: XLA_FFI_DataType,
    address: usize,
    dims: &'a [i64],
    elements: usize,
    place: Place,
}

impl<'a> Buffer<'a> {
    /// # Safety
    /// The pointer is null, or that of a buffer whose dimensions can be read during `'a` and whose
    /// elements are memory of the place.
    pub(super) unsafe fn read(
        what: &str,
        buffer: *const XLA_FFI_Buffer,
        place: Place,
    ) -> Result<Self, Refusal> {
        let size = match buffer.is_null() {
            true => 0,
            // SAFETY: a struct that begins with its size.
            false => unsafe { (&raw const (*buffer).struct_size).read() },
        };
        if size < size_of::<XLA_FFI_Buffer>() {
            return Err(Refusal::frame(format!("{what} has {size} bytes")));
        }
        // SAFETY: it has all fields.
        let &XLA_FFI_Buffer { dtype, data, rank, dims, .. } = unsafe { &*buffer };
        let rank = usize::try_from(rank).ok().filter(|&rank| rank <= MAX_DIMS);
        let Some(rank) = rank.filter(|&rank| rank == 0 || !dims.is_null()) else {
            return Err(Refusal::frame(format!("{what} has no dimensions that can be read")));
        };
        // SAFETY: as many sizes as dimensions, which live during the call.
        let dims = if rank == 0 { &[] } else { unsafe { slice::from_raw_parts(dims, rank) } };
        let count = |product: usize, &size| product.checked_mul(usize::try_from(size).ok()?);
        let elements = if dims.contains(&0) { Some(0) } else { dims.iter().try_fold(1, count) };
        let elements = elements.filter(|&count| count <= isize::MAX as usize / 16);
        let Some(elements) = elements.filter(|_| dims.iter().all(|&size| size >= 0)) else {
            return Err(Refusal::frame(format!("{what} has shape {dims:?}")));
        };
        let address = data.expose_provenance();
        if address == 0 && elements > 0 {
            return Err(Refusal::frame(format!("{what} has no memory")));
        }
        Ok(Self { dtype, address, dims, elements, place })
    }

    /// Where the memory begins and ends. Nothing of an unknown type is ever accessed.
    pub(super) fn span(&self) -> [usize; 2] {
        let bytes = self.elements * dtype("", self.dtype).map_or(1, DType::size);
        [self.address, self.address.saturating_add(bytes)]
    }

    fn described(
        &self,
        what: &'static str,
        offset: usize,
        shape: &[i64],
        strides: &[i64],
    ) -> Result<Described> {
        let (dtype, layout) = (dtype(what, self.dtype)?, layout(what, shape, strides)?);
        if !layout.is_empty() && offset.saturating_add(layout.span()) > self.elements {
            let text = format!("{shape:?} does not fit into {:?}", self.dims);
            return Err(Error::Descriptor { what, text });
        }
        let address = if layout.is_empty() { 0 } else { self.address + offset * dtype.size() };
        let Place { device, stream } = self.place;
        Ok(Described { address, stream, ..Described::new(what, device, dtype, layout) })
    }
}

/// As many dimensions as XLA's arrays may sensibly have here.
const MAX_DIMS: usize = 64;

/// An operand of a call.
pub struct Operand<'a> {
    buffer: Buffer<'a>,
    /// The result that has its memory.
    pub(super) output: Option<usize>,
}

impl<'a> Operand<'a> {
    pub(super) fn new(buffer: Buffer<'a>) -> Self {
        Self { buffer, output: None }
    }

    pub(super) fn span(&self) -> [usize; 2] {
        self.buffer.span()
    }

    /// Its shape.
    pub fn dims(&self) -> &'a [i64] {
        self.buffer.dims
    }

    /// The number of the result that is in the same memory, if there is one: the operand cannot be
    /// read then, but its values are there before the call.
    pub fn output(&self) -> Option<usize> {
        self.output
    }

    /// The elements from `offset` on, with this shape and strides in elements; `what` names the
    /// operand in errors.
    ///
    /// # Errors
    /// [`Error::DType`]; [`Error::Layout`]; [`Error::Descriptor`] for elements that it has not, and
    /// for an operand whose memory is that of a result.
    pub fn part(
        &self,
        what: &'static str,
        offset: usize,
        shape: &[i64],
        strides: &[i64],
    ) -> Result<Foreign<'_>> {
        if let Some(output) = self.output {
            let text = format!("it is in the memory of result {output}, expected its own");
            return Err(Error::Descriptor { what, text });
        }
        let described = self.buffer.described(what, offset, shape, strides)?;
        // SAFETY: 1. Elements of the buffer, which XLA keeps during the call and on a GPU in the
        // order of the stream. 2. XLA's streams are of the primary context and live as long as its
        // client, and no call is captured (no handler says that it can be). 3. Nobody writes to
        // operands during a call but through a result, of which `call::read` has seen that they
        // share no memory.
        Ok(unsafe { Foreign::new(described) })
    }
}

/// A result of a call.
pub struct Output<'a>(pub(super) Buffer<'a>);

impl<'a> Output<'a> {
    /// Its shape.
    pub fn dims(&self) -> &'a [i64] {
        self.0.dims
    }

    /// As [`Operand::part`], to be written.
    ///
    /// # Errors
    /// As [`Operand::part`].
    pub fn part(
        &mut self,
        what: &'static str,
        offset: usize,
        shape: &[i64],
        strides: &[i64],
    ) -> Result<Foreign<'_>> {
        let described = self.0.described(what, offset, shape, strides)?;
        // SAFETY: 1. and 2. As for operands. 3. The result is borrowed, and shares no memory with
        // others nor with operands that can be read.
        Ok(unsafe { Foreign::new(described) })
    }
}

#[allow(non_upper_case_globals)]
fn dtype(what: &'static str, dtype: XLA_FFI_DataType) -> Result<DType> {
    Ok(match dtype {
        XLA_FFI_DataType_F16 => DType::F16,
        XLA_FFI_DataType_BF16 => DType::BF16,
        XLA_FFI_DataType_F32 => DType::F32,
        XLA_FFI_DataType_S32 => DType::I32,
        // A truth value is a byte that is 0 or 1.
        XLA_FFI_DataType_U8 | XLA_FFI_DataType_PRED => DType::U8,
        XLA_FFI_DataType_S8 => DType::I8,
        XLA_FFI_DataType_F8E4M3FN => DType::E4M3,
        XLA_FFI_DataType_F8E5M2 => DType::E5M2,
        other => return Err(Error::DType { what, dtype: format!("XLA's type {other}") }),
    })
}
