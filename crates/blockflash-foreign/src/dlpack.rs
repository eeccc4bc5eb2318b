//! Descriptors of DLPack.

use crate::{Described, Error, Foreign, Result, layout};
use blockflash_safe::{DType, Device};
pub use dlpark::ffi::DLTensor;
use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType};
use std::ffi::c_void;
use std::fmt::Display;

impl<'a> Foreign<'a> {
    /// The tensor of a descriptor of DLPack; memory of the host that is pinned counts as the CPU's.
    ///
    /// # Safety
    /// 1. The arrays of the descriptor are readable.
    /// 2. As [`Foreign::new`].
    ///
    /// # Errors
    /// [`Error::DType`], [`Error::Device`], and the errors of [`layout`].
    pub unsafe fn from_dlpack(
        what: &'static str,
        tensor: &DLTensor,
        stream: *mut c_void,
    ) -> Result<Foreign<'a>> {
        // SAFETY: point 1 of this function.
        let (shape, strides) = unsafe { (tensor.shape(), tensor.strides_or_compact()) };
        let address = match tensor.data.expose_provenance() {
            0 => 0,
            data => data.wrapping_add(tensor.byte_offset as usize),
        };
        let described = Described {
            what,
            device: device(what, tensor.device)?,
            dtype: dtype(what, tensor.dtype)?,
            layout: layout(what, valid(what, shape)?, &valid(what, strides)?)?,
            address,
            stream: stream.expose_provenance(),
        };
        // SAFETY: point 2 of this function.
        Ok(unsafe { Foreign::new(described) })
    }
}

fn valid<T>(what: &'static str, found: Result<T, impl Display>) -> Result<T> {
    found.map_err(|error| Error::Descriptor { what, text: error.to_string() })
}

fn device(what: &'static str, device: DLDevice) -> Result<Device> {
    let ordinal = usize::try_from(device.device_id);
    match (device.device_type, ordinal) {
        (DLDeviceType::CPU | DLDeviceType::CUDAHOST, _) => Ok(Device::cpu()),
        (DLDeviceType::CUDA, Ok(ordinal)) => Ok(Device::cuda(ordinal)?),
        (DLDeviceType(number), _) => {
            Err(Error::Device { what, kind: format!(" (DLPack's number {number})") })
        }
    }
}

fn dtype(what: &'static str, dtype: DLDataType) -> Result<DType> {
    Ok(match dtype {
        DLDataType::F16 => DType::F16,
        DLDataType::BF16 => DType::BF16,
        DLDataType::F32 => DType::F32,
        DLDataType::I32 => DType::I32,
        DLDataType::U8 => DType::U8,
        DLDataType { code: DLDataTypeCode::FLOAT8_E4M3FN, bits: 8, lanes: 1 } => DType::E4M3,
        DLDataType { code: DLDataTypeCode::FLOAT8_E5M2, bits: 8, lanes: 1 } => DType::E5M2,
        DLDataType { code: DLDataTypeCode::INT, bits: 8, lanes: 1 } => DType::I8,
        DLDataType { code, bits, .. } => {
            let class = match code {
                DLDataTypeCode::INT => "int",
                DLDataTypeCode::UINT => "uint",
                DLDataTypeCode::FLOAT => "float",
                DLDataTypeCode::COMPLEX => "complex",
                DLDataTypeCode::BOOL => "bool",
                _ => "of a type of bits: ",
            };
            return Err(Error::DType { what, dtype: format!("{class}{bits}") });
        }
    })
}

#[cfg(test)]
#[path = "dlpack_tests.rs"]
mod tests;
