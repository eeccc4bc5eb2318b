//! NumPy's format: magic, version, a Python dictionary literal, data
//! (<https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>).

use super::convert::Stored;
use super::entry::{Entry, byte_length};
use super::error::Problem;
use blockflash_sys::DType;
use std::io::Read;

pub(super) const MAGIC: &[u8] = b"\x93NUMPY";

/// NumPy itself refuses headers beyond 10,000 bytes by default.
const MAX_HEADER: u64 = 64 << 10;

/// Reads the header that follows the first eight bytes.
pub(super) fn entry(source: &mut dyn Read, first: [u8; 8], length: u64) -> Result<Entry, Problem> {
    let version = (first[6], first[7]);
    let (prefix, header_length) = match version {
        (1, 0) => {
            let mut bytes = [0; 2];
            source.read_exact(&mut bytes).map_err(|_| truncated("the header", 10, length))?;
            (10, u64::from(u16::from_le_bytes(bytes)))
        }
        (2 | 3, 0) => {
            let mut bytes = [0; 4];
            source.read_exact(&mut bytes).map_err(|_| truncated("the header", 12, length))?;
            (12, u64::from(u32::from_le_bytes(bytes)))
        }
        (major, minor) => {
            let problem = format!("is a .npy file of the unknown version {major}.{minor}");
            return Err(Problem::Unsupported(problem));
        }
    };
    let offset = prefix + header_length;
    if offset > length {
        return Err(truncated("the header", offset, length));
    }
    if header_length > MAX_HEADER {
        return Err(Problem::Unsupported(format!(
            "has a header of {header_length} bytes, more than {MAX_HEADER}"
        )));
    }
    let mut header = vec![0; header_length as usize];
    source.read_exact(&mut header)?;
    let header = std::str::from_utf8(&header)
        .map_err(|_| Problem::Format("the header is not text".to_owned()))?;
    let Header { descr, column_major, shape } = Header::parse(header)
        .ok_or_else(|| Problem::Format(format!("unexpected header {:?}", abbreviated(header))))?;
    let stored = stored(&descr)?;
    let bytes = byte_length(&shape, 8 * stored.size() as u64)
        .ok_or_else(|| Problem::Format(format!("impossible shape {shape:?}")))?;
    let expected = offset.saturating_add(bytes);
    if expected != length {
        return Err(truncated(&format!("shape {shape:?} of {stored}"), expected, length));
    }
    Ok(Entry { name: String::new(), stored: Ok(stored), shape, offset, column_major })
}

/// Everything before the data of a row-major array.
pub(super) fn header(dtype: DType, shape: &[usize]) -> Result<Vec<u8>, Problem> {
    let descr = match dtype {
        DType::F16 => "<f2",
        DType::F32 => "<f4",
        DType::I32 => "<i4",
        DType::U8 => "|u1",
        DType::I8 => "|i1",
        other => {
            let what = format!("cannot hold {other}: .npy has no such type");
            return Err(Problem::Unsupported(what));
        }
    };
    let sizes: String = shape.iter().map(|size| format!("{size}, ")).collect();
    let mut text = format!(
        "{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}",
        sizes.trim_end()
    );
    // The data starts at a multiple of 64 bytes, after a newline.
    while (10 + text.len() + 1) % 64 != 0 {
        text.push(' ');
    }
    text.push('\n');
    let mut bytes = MAGIC.to_vec();
    bytes.extend([1, 0]);
    bytes.extend((text.len() as u16).to_le_bytes());
    bytes.extend(text.as_bytes());
    Ok(bytes)
}

fn truncated(what: &str, expected: u64, found: u64) -> Problem {
    Problem::Length { what: what.to_owned(), expected, found }
}

fn stored(descr: &str) -> Result<Stored, Problem> {
    match descr {
        "<f2" => Ok(Stored::F16),
        "<f4" => Ok(Stored::F32),
        "<f8" => Ok(Stored::F64),
        "<i4" => Ok(Stored::I32),
        "<i8" => Ok(Stored::I64),
        "|b1" => Ok(Stored::Bool),
        "|i1" => Ok(Stored::I8),
        // What NumPy writes for the bfloat16 of ml_dtypes: two bytes without a meaning.
        "<V2" | "|V2" => Err(Problem::Unsupported(
            "holds 2-byte items without a type: .npy has no bf16, save f32 or use .safetensors"
                .to_owned(),
        )),
        _ => Err(Problem::Unsupported(format!(
            "has the element type '{descr}'; supported are little-endian f2, f4, f8, i4, i8, and \
             b1, i1"
        ))),
    }
}

struct Header {
    descr: String,
    column_major: bool,
    shape: Vec<usize>,
}

impl Header {
    /// `{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }`: these keys in any order, all
    /// of them and no others, as NumPy asks for.
    fn parse(text: &str) -> Option<Self> {
        let (mut descr, mut column_major, mut shape) = (None, None, None);
        let mut rest = text.trim().strip_prefix('{')?.trim_start();
        while rest != "}" {
            let (key, after) = string(rest)?;
            let value = after.trim_start().strip_prefix(':')?.trim_start();
            rest = match key {
                "descr" => {
                    let (found, rest) = string(value)?;
                    descr = Some(found.to_owned());
                    rest
                }
                "fortran_order" => {
                    column_major = Some(value.starts_with("True"));
                    value.strip_prefix("True").or_else(|| value.strip_prefix("False"))?
                }
                "shape" => {
                    let (sizes, rest) = value.strip_prefix('(')?.split_once(')')?;
                    shape = Some(tuple(sizes)?);
                    rest
                }
                _ => return None,
            };
            rest = rest.trim_start();
            if rest != "}" {
                rest = rest.strip_prefix(',')?.trim_start();
            }
        }
        Some(Self { descr: descr?, column_major: column_major?, shape: shape? })
    }
}

/// A string in Python, and what follows it.
fn string(text: &str) -> Option<(&str, &str)> {
    let quote = text.chars().next().filter(|quote| matches!(quote, '\'' | '"'))?;
    text[1..].split_once(quote)
}

/// The sizes between the parentheses of a tuple: one size has a comma behind it.
fn tuple(text: &str) -> Option<Vec<usize>> {
    let text = text.trim();
    if text.is_empty() {
        return Some(Vec::new());
    }
    let sizes = text.strip_suffix(',').or_else(|| text.contains(',').then_some(text))?;
    // Python 2 wrote 3L.
    let size = |size: &str| {
        let size = size.trim();
        size.strip_suffix('L').unwrap_or(size).parse().ok()
    };
    sizes.split(',').map(size).collect()
}

fn abbreviated(text: &str) -> String {
    text.trim_end().chars().take(80).collect()
}
