use super::convert::Stored;
use blockflash_sys::DType;
use std::path::PathBuf;

/// Escapes control characters and invisible characters: names from a file must not move the cursor
/// of a terminal, hide a part of a message or imitate another line.
pub fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\'' | '"' | '\\' => out.push(character),
            other => out.extend(other.escape_debug()),
        }
    }
    out
}

/// What went wrong with which file.
#[derive(Debug, thiserror::Error)]
#[error("{}", printable(&format!("{}: {problem}", path.display())))]
pub struct Error {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub problem: Problem,
}

/// Kinds of problems with a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The operating system reports an error.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// A folder, a pipe or a device.
    #[error("is not a regular file")]
    NotAFile,
    /// The folder of a file to be written is missing.
    #[error("its folder {} does not exist", .0.display())]
    NoFolder(PathBuf),
    /// Neither a NumPy array nor a safetensors file.
    #[error("is not a .npy or .safetensors file ({0})")]
    Format(String),
    /// A kind of file that is recognised but not supported.
    #[error("{0}")]
    Unsupported(String),
    /// The header contradicts the length of the file.
    #[error("is truncated or damaged: {what} needs {expected} bytes, but the file has {found}")]
    Length {
        /// The affected part of the file.
        what: String,
        /// Bytes that it should have.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// No tensor of this name in the file.
    #[error("has no tensor `{name}` (it has {present})")]
    NoTensor {
        /// The name that was asked for.
        name: String,
        /// The names that exist.
        present: String,
    },
    /// A `.npy` file where named tensors are needed.
    #[error("holds one array without a name, not the tensors {wanted} of a .safetensors file")]
    Unnamed {
        /// The names that are needed.
        wanted: String,
    },
    /// The element type cannot be converted to the wanted one.
    #[error("{tensor} holds {stored}, which cannot be converted to {wanted}")]
    Convert {
        /// Name of the tensor.
        tensor: String,
        /// Type in the file.
        stored: Stored,
        /// Type that was asked for.
        wanted: DType,
    },
    /// A value that the wanted type cannot hold.
    #[error(
        "{tensor} has the value {value:e} at element {index}, beyond the range of {wanted} \
         (±{limit:e})"
    )]
    Overflow {
        /// Name of the tensor.
        tensor: String,
        /// Row-major position in the file.
        index: u64,
        /// The value.
        value: f64,
        /// Type that was asked for.
        wanted: DType,
        /// Largest magnitude of that type.
        limit: f64,
    },
    /// The array does not fit into this machine's memory.
    #[error("needs {0} bytes of memory, more than there is")]
    OutOfMemory(u64),
}

/// Result of the functions of this module.
pub type Result<T> = std::result::Result<T, Error>;
