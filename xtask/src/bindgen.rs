//! `cargo xtask bindgen`: the parameter structs of `params.h`, in Rust.

use crate::{
    kernels::toolchain::site_packages,
    workspace::{build_dir, cargo, output, read, root, run as run_command, write},
};
use anyhow::{Result, bail};
use std::process::Command;

/// Generate crates/blockflash-sys/src/params.rs from kernels/include/blockflash/params.h.
#[derive(clap::Args)]
pub struct Args {
    /// Write nothing: fail unless the committed file is exactly what the header gives.
    #[arg(long)]
    check: bool,
}

const OUTPUT: &str = "crates/blockflash-sys/src/params.rs";

/// Runs the generator (`src/bin/params.rs`) with the pinned libclang.
pub fn run(args: &Args) -> Result<()> {
    // As a part of the whole workspace it shares dependencies with the tests.
    let build = "build --quiet --locked --workspace --features xtask/bindgen --bin params";
    run_command(cargo().args(build.split(' ')))?;
    let mut generator = Command::new(build_dir().join("debug/params"));
    generator.current_dir(root()).env("LIBCLANG_PATH", site_packages()?.join("clang/native"));
    let (generated, path) = (output(&mut generator)?, root().join(OUTPUT));
    if !args.check {
        write(&path, generated)?;
        println!("wrote {OUTPUT}");
    } else if read(&path)? == generated {
        println!("{OUTPUT} is what params.h gives");
    } else {
        bail!("{OUTPUT} is not what params.h gives: run `cargo xtask bindgen`");
    }
    Ok(())
}
