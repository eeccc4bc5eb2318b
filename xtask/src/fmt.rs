//! `cargo xtask fmt`: rustfmt for Rust, and the pinned clang-format for the kernels and their
//! emulator.

use crate::{
    emulate,
    kernels::{sources, toolchain::site_packages},
    workspace::{cargo, run as run_command},
};
use anyhow::Result;
use std::process::Command;

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Write nothing: fail unless every file is formatted.
    #[arg(long)]
    pub check: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let mut rustfmt = cargo();
    rustfmt.args(["fmt", "--all"]);
    let mut clang_format =
        Command::new(site_packages()?.join("clang_format/data/bin/clang-format"));
    clang_format.arg("--style=file").args(sources::all()?).args(emulate::files()?);
    if args.check {
        rustfmt.arg("--check");
        clang_format.args(["--dry-run", "--Werror"]);
    } else {
        clang_format.arg("-i");
    }
    run_command(&mut rustfmt)?;
    run_command(&mut clang_format)
}
