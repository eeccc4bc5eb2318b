//! The safetensors format: header length, JSON header, data (<https://huggingface.co/docs/safetensors>).

use super::read::byte_length;
use super::{Array, Entry, Problem, Stored};
use blockflash_sys::DType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Read;

/// The limit of the reference implementation.
const MAX_HEADER: u64 = 100_000_000;

#[derive(Serialize, Deserialize)]
struct Info {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// Reads the header that follows the first eight bytes.
pub(super) fn entries(source: &mut dyn Read, first: [u8; 8], length: u64) -> Result<Vec<Entry>, Problem> {
    let header_length = u64::from_le_bytes(first);
    // A text file is the likeliest mistake: its first eight characters are a length of more than 10^18.
    let start = header_length.saturating_add(8);
    if header_length > MAX_HEADER || start > length {
        return Err(Problem::Format(format!("no NumPy magic, and no header of {header_length} bytes")));
    }
    let mut header = vec![0; header_length as usize];
    source.read_exact(&mut header)?;
    let mut map: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(&header).map_err(|error| Problem::Format(format!("header: {error}")))?;
    map.remove("__metadata__");
    let mut entries = Vec::with_capacity(map.len());
    for (name, value) in map {
        let info: Info = serde_json::from_value(value)
            .map_err(|error| Problem::Format(format!("header of tensor `{name}`: {error}")))?;
        entries.push(entry(name, info, start, length)?);
    }
    entries.sort_by_key(|entry| entry.offset);
    Ok(entries)
}

fn entry(name: String, info: Info, start: u64, length: u64) -> Result<Entry, Problem> {
    let (begin, end) = info.data_offsets;
    let what = || format!("tensor `{name}`");
    if name.is_empty() {
        return Err(Problem::Format("a tensor without a name".to_owned()));
    }
    let last = start.saturating_add(end);
    if begin > end || last > length {
        return Err(Problem::Length { what: what(), expected: last, found: length });
    }
    let stored = match info.dtype.as_str() {
        "F16" => Ok(Stored::F16),
        "BF16" => Ok(Stored::Bf16),
        "F32" => Ok(Stored::F32),
        "F64" => Ok(Stored::F64),
        "I32" => Ok(Stored::I32),
        "I64" => Ok(Stored::I64),
        "BOOL" => Ok(Stored::Bool),
        _ => Err(info.dtype),
    };
    // The size of a type that is not read here is of no interest.
    if let Ok(stored) = stored {
        let expected = byte_length(&info.shape, 8 * stored.size() as u64).ok_or_else(|| {
            Problem::Format(format!("{} has the impossible shape {:?}", what(), info.shape))
        })?;
        if expected != end - begin {
            let what = format!("{} of shape {:?}", what(), info.shape);
            return Err(Problem::Length { what, expected, found: end - begin });
        }
    }
    Ok(Entry { name, stored, shape: info.shape, offset: start + begin, column_major: false })
}

/// Everything before the data; the tensors follow in the given order.
pub(super) fn header(tensors: &[(&str, &Array)]) -> Result<Vec<u8>, Problem> {
    let mut map = BTreeMap::new();
    let mut begin = 0;
    for (name, array) in tensors {
        let dtype = match array.dtype() {
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::F32 => "F32",
            DType::I32 => "I32",
            DType::U8 => "U8",
        };
        let end = begin + array.bytes().len() as u64;
        let info =
            Info { dtype: dtype.to_owned(), shape: array.shape().to_vec(), data_offsets: (begin, end) };
        map.insert(*name, info);
        begin = end;
    }
    let mut text = serde_json::to_vec(&map).map_err(|error| Problem::Format(error.to_string()))?;
    // The data starts at a multiple of eight bytes.
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut text);
    Ok(bytes)
}
