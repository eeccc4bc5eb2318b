use super::{Array, Error, Problem, Result, npy, safetensors};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// What a file name asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `.npy`: one array, no bf16.
    Npy,
    /// `.safetensors`: named tensors of any type.
    Safetensors,
}

impl Format {
    /// From the extension, in any case; `None` for another one.
    pub fn of(path: &Path) -> Option<Self> {
        let extension = path.extension()?.to_str()?;
        let is = |name: &str| extension.eq_ignore_ascii_case(name);
        (is("npy")).then_some(Self::Npy).or(is("safetensors").then_some(Self::Safetensors))
    }
}

/// Writes named arrays to a file, replacing it. A `.npy` file takes exactly one, and no bf16.
///
/// # Errors
/// [`Problem::Unsupported`] if the file name or the format does not allow it, [`Problem::Io`].
pub fn write(path: impl AsRef<Path>, tensors: &[(&str, &Array)]) -> Result<()> {
    let path = path.as_ref();
    let header = match (Format::of(path), tensors) {
        (Some(Format::Npy), [(_, array)]) => npy::header(array.dtype(), array.shape()),
        (Some(Format::Npy), _) => Err(Problem::Unsupported("a .npy file holds exactly one array".to_owned())),
        (Some(Format::Safetensors), _) => safetensors::header(tensors),
        (None, _) => Err(Problem::Unsupported("the name must end in .npy or .safetensors".to_owned())),
    };
    let write = |header: &[u8]| -> std::io::Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
        file.write_all(header)?;
        for (_, array) in tensors {
            file.write_all(array.bytes())?;
        }
        file.flush()
    };
    header.and_then(|header| Ok(write(&header)?)).map_err(|problem| Error { path: path.to_owned(), problem })
}
