//! A folder with the programs of blockflash-candle for a GPU machine.

use super::toolkit::Toolkit;
use crate::{
    artifacts,
    bundle::{make_executable, pack},
    workspace::{cargo, create_dir, target_dir, write},
};
use anyhow::{Context, Result};
use std::path::Path;

/// Runs the tests and the example.
const RUN_ALL: &str = include_str!("run-all.sh");

/// Builds tests and example with candle's kernels and copies them into the folder.
pub fn write_to(folder: &Path) -> Result<()> {
    let toolkit = Toolkit::pinned()?;
    let mut build = cargo();
    toolkit.apply(&mut build)?;
    // candle's kernels take minutes, and are compiled anew when the compiler has another path.
    build.env("CARGO_TARGET_DIR", target_dir("candle/build")?);
    let what = "build --package blockflash-candle --features cuda --test tensors --example llama";
    let what: Vec<&str> = what.split_whitespace().collect();
    create_dir(folder)?;
    for program in artifacts::build_by(build, &what)? {
        let to = folder.join(&program.name);
        std::fs::copy(&program.path, &to).with_context(|| format!("{}", to.display()))?;
    }
    let script = folder.join("run-all");
    write(&script, RUN_ALL)?;
    make_executable(&script)?;
    println!("{}: start ./run-all there", pack(folder)?.display());
    Ok(())
}
