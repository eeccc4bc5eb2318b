//! `cargo xtask candle`: type-checks what needs a CUDA toolkit, without one, or builds it with one
//! that it installs.

mod bundle;
mod toolkit;

use crate::bundle::make_executable;
use crate::workspace::{
    build_dir, cargo, read, root, run as run_command, shown, target_dir, write,
};
use anyhow::{Context, Result};
use std::{env, path::PathBuf, process::Command};

/// Type-check blockflash-candle with its feature `cuda`, and candle-transformers with it in place
/// of candle-flash-attn, for the newest line of candle: `cargo xtask clients` has all of them.
#[derive(clap::Args, Default)]
pub struct Args {
    /// Build its tests and its example with candle's kernels instead, into a folder for a GPU
    /// machine [default: target/candle/bundle]. This installs a toolkit of 1.2 GB under target/.
    #[arg(long, value_name = "FOLDER", num_args = 0..=1, default_missing_value = "")]
    bundle: Option<PathBuf>,
}

/// Where the workspace of the drop-ins is.
pub const DROP_IN: &str = "crates/blockflash-candle/drop-in";

/// Stands in for nvcc, which candle's kernels need even where nothing is linked: it says a version
/// and makes empty outputs.
const NVCC: &str = r#"#!/bin/sh
[ "$1" = --version ] && printf '\n\n\nCuda compilation tools, release 13.0, V13.0.88\n' && exit
[ "$1" = --list-gpu-code ] && echo sm_90 && exit
while [ $# -gt 0 ]; do
  case "$1" in
    -o) : > "$2" ;;
    --output-directory) folder="$2" ;;
    *.cu) name="$(basename "$1" .cu)" ;;
  esac
  shift
done
[ -z "$folder" ] || : > "$folder/$name.ptx"
"#;

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    match &args.bundle {
        None => check(),
        Some(folder) if folder.as_os_str().is_empty() => {
            bundle::write_to(&target_dir("candle/bundle")?)
        }
        Some(folder) => bundle::write_to(folder),
    }
}

/// Checks the workspace `drop-in`, which has both.
fn check() -> Result<()> {
    let mut check = cargo();
    check.args(["check", "--locked", "--features", "candle-0-11", "--manifest-path"]);
    check.arg(root().join(DROP_IN).join("Cargo.toml"));
    // With the profiles of this workspace and in its build directory: what `clippy` has checked of
    // the same dependencies is not checked again.
    let manifest = read(&root().join("Cargo.toml"))?;
    let profiles = target_dir("candle")?.join("profiles.toml");
    write(&profiles, &manifest[manifest.find("[profile.").context("no profile")?..])?;
    check.arg("--config").arg(profiles).arg("--target-dir").arg(build_dir());
    without_toolkit(&mut check)?;
    println!("{}", shown(&check));
    run_command(&mut check)
}

/// Lets a cargo check code for GPUs with the stand-in for nvcc.
pub fn without_toolkit(cargo: &mut Command) -> Result<()> {
    let tools = target_dir("candle/bin")?;
    let nvcc = tools.join("nvcc");
    write(&nvcc, NVCC)?;
    make_executable(&nvcc)?;
    let path = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths([tools].into_iter().chain(env::split_paths(&path)))?;
    cargo.env("PATH", path).env("NVCC", &nvcc).env("CUDA_COMPUTE_CAP", "90");
    // candle 0.9 looks for a folder with this header, of which nothing is read.
    write(&target_dir("candle/bin/include")?.join("cuda.h"), "")?;
    cargo.env("CUDA_ROOT", target_dir("candle/bin")?);
    Ok(())
}
