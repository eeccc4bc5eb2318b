//! `blockflash report`.

use crate::failure::{Failure, Result};
use std::process::ExitCode;

/// Options of `blockflash report`.
#[derive(clap::Args)]
pub struct Args {}

/// Draws the record.
pub fn run(_: Args) -> Result<ExitCode> {
    Err(Failure::new("`report` is not part of this build"))
}
