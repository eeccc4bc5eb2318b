use super::convert::Stored;
use blockflash_sys::DType;
use std::path::PathBuf;

/// Text with its control characters and invisible ones escaped: what a file calls its tensors must
/// not move the cursor of a terminal, hide a part of a message or pretend to be another line.
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

/// What can be wrong with a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The operating system refuses.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// A folder, a pipe or a device.
    #[error("is not a regular file")]
    NotAFile,
    /// A file cannot be written where its folder is missing.
    #[error("its folder {} does not exist", .0.display())]
    NoFolder(PathBuf),
    /// Neither a NumPy array nor a safetensors file.
    #[error("is not a .npy or .safetensors file ({0})")]
    Format(String),
    /// A kind of file that is recognised and not supported.
    #[error("{0}")]
    Unsupported(String),
    /// The header contradicts the length of the file.
    #[error("is truncated or damaged: {what} needs {expected} bytes, the file has {found}")]
    Length {
        /// What part of the file.
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
    /// A `.npy` file, where tensors are told apart by their names.
    #[error("holds one array without a name, not the tensors {wanted} of a .safetensors file")]
    Unnamed {
        /// The names that are needed.
        wanted: String,
    },
    /// The element type cannot be turned into the wanted one.
    #[error("{tensor} holds {stored}, which cannot be converted to {wanted}")]
    Convert {
        /// Which tensor.
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
        /// Which tensor.
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
