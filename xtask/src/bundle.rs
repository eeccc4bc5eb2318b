//! `cargo xtask bundle`: makes one folder, also packed, that tests and measures on a GPU machine
//! without Rust.

use crate::{
    artifacts::{self, IMAGES_FEATURE, Program},
    kernels,
    workspace::{create_dir, head, list, read_bytes, root, write},
};
use anyhow::{Context, Result, ensure};
use blockflash_sys::{Kernel, Target, manifest};
use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// Write a folder that runs the tests and benchmarks on a GPU machine without Rust.
#[derive(clap::Args)]
pub struct Args {
    /// Folder to write. An earlier bundle there is replaced [default: target/bundle].
    folder: Option<PathBuf>,
    /// Add the images whose name contains this text, with line information for `./xtask profile`;
    /// may be repeated.
    #[arg(long, value_name = "PATTERN")]
    profile: Vec<String>,
    /// Restrict --profile to images for this target; may be repeated [default: all targets].
    #[arg(long, value_name = "TARGET", value_parser = kernels::parse_target)]
    profile_arch: Vec<Target>,
}

/// Size limit of the packed bundle.
const MAX_BYTES: u64 = 60_000_000;

/// Packages whose GPU tests are bundled. These tests need no file of the repository at run time.
const TESTED: [&str; 3] = ["blockflash-safe", "blockflash-ops", "blockflash-tests"];

/// Variable that every test program with GPU tests reads, and no other program: its name is
/// searched in the binary.
const ASKS_FOR_GPU: &[u8] = b"BLOCKFLASH_REQUIRE_GPU";

/// The linker strips the symbols, so that the dependencies of the usual release build are reused.
/// Panic messages still contain the source location.
const STRIP: &[&str] = &["--config", "profile.release.strip=\"symbols\""];

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let folder = match &args.folder {
        Some(folder) => folder.clone(),
        None => root().join("target/bundle"),
    };
    let present = kernels::store::load()?;
    let missing = kernels::image_names().iter().filter(|name| !present.contains_key(*name)).count();
    if missing > 0 {
        eprintln!("warning: {missing} kernel images are missing: run `cargo xtask kernels` first");
    }
    let with_lines = profiled(args)?;
    clear(&folder)?;
    // The script is written first: it marks the folder as a bundle even if a later step fails.
    let script = folder.join("run-all");
    write(&script, RUN_ALL)?;
    make_executable(&script)?;
    let programs = build()?;
    create_dir(&folder.join("tests"))?;
    for program in &programs {
        let path = if program.is_test {
            folder.join("tests").join(&program.name)
        } else {
            folder.join(&program.name)
        };
        copy(&program.path, &path)?;
    }
    copy_folder(&root().join("examples"), &folder.join("examples"))?;
    for part in ["suites", "peers"] {
        copy_folder(&root().join("benches").join(part), &folder.join("benches").join(part))?;
    }
    if !with_lines.is_empty() {
        println!("compiling {} images with line information", with_lines.len());
        kernels::with_line_information(&with_lines, &folder.join("images"))?;
        // A profile report quotes the sources.
        copy_tree(&root().join("kernels"), &folder.join("kernels"))?;
    }
    ceilings(&folder)?;
    write(&folder.join("commit"), format!("{}\n", head()?))?;
    let archive = pack(&folder)?;
    let bytes = archive.metadata().with_context(|| archive.display().to_string())?.len();
    println!(
        "{}: {} programs, packed {:.1} MB in {}; start ./run-all there",
        folder.display(),
        programs.len(),
        bytes as f64 / 1e6,
        archive.display()
    );
    ensure!(bytes < MAX_BYTES, "a bundle of {bytes} bytes is too large, at most {MAX_BYTES}");
    Ok(())
}

/// Packs the folder into one file, `FOLDER.tar.xz`. All programs contain the same images, which the
/// compressor finds only with a large window.
pub fn pack(folder: &Path) -> Result<PathBuf> {
    let mut archive = folder.as_os_str().to_owned();
    archive.push(".tar.xz");
    let status = Command::new("tar")
        .args(["--use-compress-program", "xz --lzma2=preset=6,dict=192MiB", "-cf"])
        .args([archive.as_os_str(), "-C".as_ref(), folder.as_os_str(), ".".as_ref()])
        .status();
    ensure!(status.context("cannot run tar")?.success(), "tar failed");
    Ok(archive.into())
}

fn build() -> Result<Vec<Program>> {
    let programs = "build --package blockflash-bench --package blockflash-dist --package xtask \
        --bin blockflash --bin xtask --example long_context --example block_sparse_training \
        --example block_sparse_attention --example generation --example several_gpus";
    let features = ["--features", IMAGES_FEATURE];
    let programs: Vec<&str> = programs.split_whitespace().chain(features).collect();
    let mut programs = artifacts::build(&[&programs, STRIP].concat())?;
    programs.retain(|program| !program.is_test);
    // No documentation tests and no `--tests`, which would also build the programs of the package.
    let tests = ["test", "--no-run", "--lib", "--test", "*"];
    let packages = TESTED.iter().flat_map(|package| ["--package", package]).collect::<Vec<_>>();
    let tests = artifacts::build(&[&tests, STRIP, &packages].concat())?;
    for program in tests.into_iter().filter(|program| program.is_test) {
        // Tests that need no GPU have run where the bundle is made.
        if contains(&read_bytes(&program.path)?, ASKS_FOR_GPU) {
            programs.push(program);
        }
    }
    ensure!(programs.iter().any(|program| program.is_test), "no test program asks for a GPU");
    Ok(programs)
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    let starts = bytes.iter().enumerate().filter(|(_, byte)| **byte == part[0]);
    starts.into_iter().any(|(at, _)| bytes[at..].starts_with(part))
}

/// The kernels whose images with line information are bundled.
fn profiled(args: &Args) -> Result<Vec<&'static Kernel>> {
    let named =
        |kernel: &Kernel| args.profile.iter().any(|part| kernel.image_name().contains(part));
    let selects =
        |kernel: &&Kernel| kernels::is_among(kernel.target, &args.profile_arch) && named(kernel);
    let profiled: Vec<&Kernel> = manifest::kernels().iter().filter(selects).collect();
    let found = args.profile.is_empty() || !profiled.is_empty();
    ensure!(found, "--profile and --profile-arch select no image");
    Ok(profiled)
}

/// Copies the measured ceilings of every GPU: they are small, and the GPU is not known yet.
fn ceilings(folder: &Path) -> Result<()> {
    for gpu in list(&root().join("benches/results")).unwrap_or_default() {
        let measured = gpu.join("ceilings.jsonl");
        if measured.is_file() {
            let to = folder.join("benches/results").join(gpu.file_name().unwrap_or_default());
            create_dir(&to)?;
            copy(&measured, &to.join("ceilings.jsonl"))?;
        }
    }
    Ok(())
}

/// Removes an earlier bundle, but refuses to remove any other folder.
fn clear(folder: &Path) -> Result<()> {
    if folder.exists() && !list(folder)?.is_empty() {
        ensure!(folder.join("run-all").exists(), "{} exists and is not a bundle", folder.display());
        std::fs::remove_dir_all(folder)
            .with_context(|| format!("cannot clear {}", folder.display()))?;
    }
    create_dir(folder)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::copy(from, to)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    create_dir(to)?;
    for path in list(from)?.iter().filter(|path| path.is_file()) {
        copy(path, &to.join(path.file_name().unwrap_or_default()))?;
    }
    Ok(())
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    copy_folder(from, to)?;
    for path in list(from)?.iter().filter(|path| path.is_dir()) {
        copy_tree(path, &to.join(path.file_name().unwrap_or_default()))?;
    }
    Ok(())
}

/// Lets everybody run a file; does nothing where files have no such right.
#[cfg(unix)]
pub fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    Ok(std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))?)
}

#[cfg(not(unix))]
pub fn make_executable(_: &Path) -> Result<()> {
    Ok(())
}

/// Script that runs everything: it continues after a failure and then exits with a non-zero status.
const RUN_ALL: &str = include_str!("run-all.sh");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_programs() {
        assert!(contains(b"..BLOCKBLOCKFLASH_REQUIRE_GPU..", ASKS_FOR_GPU));
        assert!(!contains(b"BLOCKFLASH_REQUIRE", ASKS_FOR_GPU) && !contains(b"", ASKS_FOR_GPU));
    }

    #[test]
    fn only_a_bundle_is_cleared() {
        assert!(clear(&root().join("xtask")).is_err());
    }
}
