//! How the examples start and end.
#![allow(dead_code)] // Not every example calls everything.

use blockflash_ops::{DType, Device};
use clap::Parser;
use std::process::ExitCode;

/// Why an example ends early: one line.
pub type Failure = Box<dyn std::error::Error>;

/// Parses the options and runs. What fails is said on stderr, with exit code 2.
pub fn main<A: Parser>(run: impl FnOnce(A) -> Result<(), Failure>) -> ExitCode {
    match run(A::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

/// The device of this name, or the best one.
///
/// # Errors
/// A name that is none, a device that is not there.
pub fn device(name: Option<&str>) -> Result<Device, Failure> {
    Ok(match name {
        Some(name) => name.parse()?,
        None => Device::best(),
    })
}

/// The floating-point type of this name.
///
/// # Errors
/// Any other name.
pub fn dtype(name: &str) -> Result<DType, String> {
    let types = [DType::F16, DType::BF16, DType::F32];
    types
        .into_iter()
        .find(|dtype| dtype.name() == name)
        .ok_or_else(|| "expected f16, bf16 or f32".to_owned())
}
