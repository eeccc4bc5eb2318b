use super::array::Array;
use super::error::{Error, Problem, Result};
use super::replace::Replacement;
use super::{npy, safetensors};
use std::cmp::Reverse;
use std::io::{BufWriter, Write};
use std::path::Path;

/// File format, chosen by the file name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `.npy`: one array; bf16 is not supported.
    Npy,
    /// `.safetensors`: named tensors of any type.
    Safetensors,
}

impl Format {
    /// Format of an extension, in upper or lower case; `None` for any other extension.
    pub fn of(path: &Path) -> Option<Self> {
        let extension = path.extension()?.to_str()?;
        let is = |name: &str| extension.eq_ignore_ascii_case(name);
        (is("npy")).then_some(Self::Npy).or(is("safetensors").then_some(Self::Safetensors))
    }
}

/// Writes named arrays to a file, replacing it. A `.npy` file holds exactly one array, which must
/// not be bf16. After an error the old file is unchanged.
///
/// # Errors
/// [`Problem::Unsupported`] if the file name or the format does not allow it, and the errors of
/// [`Replacement`].
pub fn write(path: impl AsRef<Path>, tensors: &[(&str, &Array)]) -> Result<()> {
    write_all(&[(path.as_ref(), tensors)])
}

/// Writes several files as [`write()`] does. After an error all old files are unchanged.
///
/// # Errors
/// As for [`write()`].
pub fn write_all(files: &[(&Path, &[(&str, &Array)])]) -> Result<()> {
    let written: Result<Vec<_>> =
        files.iter().map(|(path, tensors)| beside(path, tensors)).collect();
    Replacement::commit(written?)
}

/// Writes the complete content to a temporary file beside the destination.
fn beside(path: &Path, tensors: &[(&str, &Array)]) -> Result<Replacement> {
    let failed = |problem| Error { path: path.to_owned(), problem };
    // The order of the reference library: each tensor then starts at a multiple of its element
    // size, which some readers require.
    let mut tensors = tensors.to_vec();
    tensors.sort_by_key(|(_, array)| Reverse(array.dtype().size()));
    let header = match (Format::of(path), &tensors[..]) {
        (Some(Format::Npy), [(_, array)]) => npy::header(array.dtype(), array.shape()),
        (Some(Format::Npy), _) => {
            Err(Problem::Unsupported("a .npy file holds exactly one array".to_owned()))
        }
        (Some(Format::Safetensors), _) => safetensors::header(&tensors),
        (None, _) => {
            Err(Problem::Unsupported("the name must end in .npy or .safetensors".to_owned()))
        }
    };
    let header = header.map_err(failed)?;
    let mut file = Replacement::begin(path)?;
    let write = |file: &mut dyn Write| {
        let mut file = BufWriter::new(file);
        file.write_all(&header)?;
        tensors.iter().try_for_each(|(_, array)| file.write_all(array.bytes()))?;
        file.flush()
    };
    write(&mut file).map_err(|error| failed(error.into()))?;
    Ok(file)
}
