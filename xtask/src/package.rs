//! `cargo xtask package`: makes the archives for crates.io and checks their size.

use crate::workspace::{self, cargo, list, target_dir};
use anyhow::{Result, bail};

/// Make the archives for crates.io and check their size.
#[derive(clap::Args, Default)]
pub struct Args {
    /// Also compile each package from its archive.
    #[arg(long)]
    verify: bool,
}

/// Size limit of a package: a little below that of crates.io, 10 MB.
const MAX_BYTES: u64 = 9_500_000;

/// Packages every publishable crate. The crates' dependencies on each other need not be published
/// yet.
pub fn run(args: &Args) -> Result<()> {
    let target = target_dir("packages")?;
    let mut command = cargo();
    command.args(["package", "--quiet", "--allow-dirty", "--locked", "--workspace"]);
    command
        .args(["--exclude", "xtask", "--exclude", "blockflash-tests"])
        .args(["--exclude", "blockflash-fake-driver", "--exclude", "blockflash-fake-nccl"])
        .args(["--exclude", "blockflash-python", "--target-dir"])
        .arg(&target);
    if !args.verify {
        command.arg("--no-verify");
    }
    workspace::run(&mut command)?;
    let mut too_large = Vec::new();
    for archive in list(&target.join("package"))? {
        if archive.extension().is_some_and(|extension| extension == "crate") {
            let bytes = std::fs::metadata(&archive)?.len();
            let name = archive.file_name().unwrap_or_default().to_string_lossy().into_owned();
            println!("{:>8.1} kB  {name}", bytes as f64 / 1e3);
            if bytes > MAX_BYTES {
                too_large.push(name);
            }
        }
    }
    if !too_large.is_empty() {
        bail!("{} over {MAX_BYTES} bytes", too_large.join(", "));
    }
    Ok(())
}
