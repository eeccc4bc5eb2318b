//! The safetensors format (<https://huggingface.co/docs/safetensors>). Its reference library reads
//! and checks headers; the data is read and written here, piece by piece.

use super::array::Array;
use super::convert::Stored;
use super::entry::Entry;
use super::error::Problem;
use blockflash_sys::DType;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, SafeTensorError, TensorInfo};
use std::io::Read;

/// The limit of the reference library.
const MAX_HEADER: u64 = 100_000_000;

/// Reads the header that follows the first eight bytes. The tensors cover the rest of the file
/// without overlap, hole or rest.
pub(super) fn entries(
    source: &mut dyn Read,
    first: [u8; 8],
    length: u64,
) -> Result<Vec<Entry>, Problem> {
    let header_length = u64::from_le_bytes(first);
    // A text file is the likeliest mistake: its first eight characters are a length of more than
    // 10^18.
    let start = header_length.saturating_add(8);
    if header_length > MAX_HEADER || start > length {
        return Err(Problem::Format(format!(
            "no NumPy magic, and no header of {header_length} bytes"
        )));
    }
    let mut header = vec![0; header_length as usize];
    source.read_exact(&mut header)?;
    let metadata: Metadata = serde_json::from_slice(&header)
        .map_err(|error| Problem::Format(format!("header: {error}")))?;
    let expected = start.saturating_add(metadata.data_len() as u64);
    if expected > length {
        return Err(Problem::Length {
            what: "the data of its tensors".to_owned(),
            expected,
            found: length,
        });
    }
    if expected < length {
        let trailing = length - expected;
        return Err(Problem::Format(format!(
            "{trailing} bytes after the last tensor belong to none"
        )));
    }
    let names = metadata.offset_keys();
    let entry = |name: String| {
        if name.is_empty() {
            return Err(Problem::Format("a tensor without a name".to_owned()));
        }
        let info =
            metadata.info(&name).ok_or_else(|| Problem::Format(format!("no tensor `{name}`")))?;
        let (shape, offset) = (info.shape.clone(), start + info.data_offsets.0 as u64);
        Ok(Entry { stored: stored(info.dtype), shape, offset, column_major: false, name })
    };
    names.into_iter().map(entry).collect()
}

fn stored(dtype: Dtype) -> Result<Stored, String> {
    match dtype {
        Dtype::F16 => Ok(Stored::F16),
        Dtype::BF16 => Ok(Stored::Bf16),
        Dtype::F32 => Ok(Stored::F32),
        Dtype::F64 => Ok(Stored::F64),
        Dtype::I32 => Ok(Stored::I32),
        Dtype::I64 => Ok(Stored::I64),
        Dtype::BOOL => Ok(Stored::Bool),
        Dtype::F8_E4M3 => Ok(Stored::E4m3),
        Dtype::F8_E5M2 => Ok(Stored::E5m2),
        Dtype::I8 => Ok(Stored::I8),
        other => Err(other.to_string()),
    }
}

/// Everything before the data; the tensors follow in the given order.
pub(super) fn header(tensors: &[(&str, &Array)]) -> Result<Vec<u8>, Problem> {
    let mut begin = 0;
    let infos = tensors.iter().map(|(name, array)| {
        let dtype = match array.dtype() {
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
            DType::F32 => Dtype::F32,
            DType::I32 => Dtype::I32,
            DType::U8 => Dtype::U8,
            DType::E4M3 => Dtype::F8_E4M3,
            DType::E5M2 => Dtype::F8_E5M2,
            DType::I8 => Dtype::I8,
            other => return Err(Problem::Unsupported(format!("cannot hold {other}"))),
        };
        let data_offsets = (begin, begin + array.bytes().len());
        begin = data_offsets.1;
        let info = TensorInfo { dtype, shape: array.shape().to_vec(), data_offsets };
        Ok(((*name).to_owned(), info))
    });
    let failed = |error: SafeTensorError| Problem::Unsupported(error.to_string());
    let metadata = Metadata::new(None, infos.collect::<Result<_, _>>()?).map_err(failed)?;
    if metadata.offset_keys().len() < tensors.len() {
        return Err(Problem::Unsupported("cannot hold two tensors with the same name".to_owned()));
    }
    let mut text = serde_json::to_vec(&metadata).map_err(|error| failed(error.into()))?;
    // The data starts at a multiple of eight bytes.
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut text);
    Ok(bytes)
}
