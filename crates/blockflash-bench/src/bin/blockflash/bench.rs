//! `blockflash bench`.

use crate::failure::{Failure, Result};
use std::process::ExitCode;

/// Options of `blockflash bench`.
#[derive(clap::Args)]
pub struct Args {}

/// Measures the suites.
pub fn run(_: Args) -> Result<ExitCode> {
    Err(Failure::new("`bench` is not part of this build"))
}
