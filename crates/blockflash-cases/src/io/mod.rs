//! Tensor files: NumPy `.npy` and `.safetensors`, read and written without trusting a byte of them.
//!
//! Only the tensors that are asked for are read, in pieces, and converted on the way, so that one
//! tensor of a large file costs the memory of its converted form. Sizes claimed by a header are
//! compared with the length of the file before any allocation. What is written appears complete or
//! not at all, and text of a file that reaches an error has its control characters escaped.

mod array;
mod convert;
mod entry;
mod error;
mod npy;
mod read;
mod replace;
mod safetensors;
mod write;

pub use array::Array;
pub use convert::{Scalar, Stored};
pub use entry::Entry;
pub use error::{Error, Problem, Result, printable};
pub use read::TensorFile;
pub use replace::room;
pub use replace::{Replacement, destination, write_texts};
pub use write::{Format, write, write_all};

#[cfg(test)]
mod code_tests;
#[cfg(test)]
mod tests;
