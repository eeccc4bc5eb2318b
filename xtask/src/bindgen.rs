//! `cargo xtask bindgen`: the parameter structs of `params.h`, or the C interface of XLA's FFI, in
//! Rust.

use crate::{
    kernels::toolchain::site_packages,
    workspace::{build_dir, cargo, output, read, root, run as run_command, write},
};
use anyhow::{Result, bail};
use std::{path::PathBuf, process::Command};

/// Generate crates/blockflash-sys/src/params.rs from kernels/include/blockflash/params.h.
#[derive(clap::Args)]
pub struct Args {
    /// Write nothing: fail unless the committed file is exactly what the header gives.
    #[arg(long)]
    check: bool,
    /// Generate crates/blockflash-foreign/src/xla/api.rs instead, from xla/ffi/api/c_api.h in this
    /// folder, which `jax.ffi.include_dir()` tells.
    #[arg(long, value_name = "FOLDER")]
    xla: Option<PathBuf>,
}

const PARAMS: &str = "crates/blockflash-sys/src/params.rs";
const XLA: &str = "crates/blockflash-foreign/src/xla/api.rs";

/// Runs the generator (`src/bin/params.rs`) with the pinned libclang.
pub fn run(args: &Args) -> Result<()> {
    // As a part of the whole workspace it shares dependencies with the tests.
    let build = "build --quiet --locked --workspace --features xtask/bindgen --bin params";
    run_command(cargo().args(build.split(' ')))?;
    let mut generator = Command::new(build_dir().join("debug/params"));
    generator.current_dir(root()).env("LIBCLANG_PATH", site_packages()?.join("clang/native"));
    let (name, header) = if args.xla.is_some() { (XLA, "c_api.h") } else { (PARAMS, "params.h") };
    let (generated, path) = (output(generator.args(&args.xla))?, root().join(name));
    if !args.check {
        write(&path, generated)?;
        println!("wrote {name}");
    } else if read(&path)? == generated {
        println!("{name} is what {header} gives");
    } else {
        bail!("{name} is not what {header} gives: run `cargo xtask bindgen`");
    }
    Ok(())
}
