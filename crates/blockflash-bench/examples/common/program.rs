//! How the examples start and end.

use blockflash_ops::Device;
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
