//! Problems of blockflash with data, described once for tests, suites and the command line: an id,
//! random inputs or tensors from files, operands on a device, counted work, and the verification
//! against the f64 oracle of `blockflash-oracle`.
#![forbid(unsafe_code)]

pub mod block_pattern;
pub mod case;
pub mod document;
mod error;
pub mod io;
pub mod memory;
pub mod placement;
pub mod random;
mod words;

pub use error::{Error, Result};
