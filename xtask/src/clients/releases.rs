//! Programs outside of the checkout that depend on the packages in each of the ways that the
//! READMEs name.

use super::cargo_in;
use crate::candle::{DROP_IN, without_toolkit};
use crate::package;
use crate::workspace::{create_dir, head, list, output, read, root, run, write};
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::Command;

/// The lines of candle, each with its oldest version that works. It and the newest are checked.
const CANDLE: [(&str, &str); 3] = [("0.9", "0.9.2"), ("0.10", "0.10.0"), ("0.11", "0.11.0")];

/// The oldest cudarc that works, the one that mistral.rs' lock has, and the newest; with other
/// bindings than the default ones; and what is said without any.
pub fn cudarc(work: &Path) -> Result<()> {
    for version in ["=0.19.6", "=0.19.8", "0.19.6"] {
        let dependencies = format!(
            "cudarc = {{ version = \"{version}\", default-features = false }}\n\
             blockflash-ops = {{ {}, default-features = false, features = [\"cuda-12080\"] }}\n\
             blockflash-dist = {{ {}, default-features = false, features = [\"cuda-12080\"] }}",
            path("ops"),
            path("dist")
        );
        let folder = program(work, "cudarc", &dependencies, "")?;
        run(cargo_in(&folder, work).args(["check", "--quiet"]))?;
        println!("cudarc {version}: ok");
    }
    let without = format!("blockflash-ops = {{ {}, default-features = false }}", path("ops"));
    let folder = program(work, "cudarc", &without, "")?;
    let error = match output(cargo_in(&folder, work).args(["check", "--quiet"])) {
        Ok(_) => bail!("a build without bindings of CUDA"),
        Err(error) => format!("{error:#}"),
    };
    if !error.contains("no version of CUDA's bindings is chosen") {
        bail!("a build without bindings of CUDA does not say so: {error}");
    }
    Ok(())
}

/// The workspace of the drop-ins with patches by git: of the commit, as a user gets it.
pub fn drop_ins(work: &Path) -> Result<()> {
    if head()?.ends_with("-dirty") {
        println!("note: this is the last commit, without the changes of the working tree");
    }
    let repository = work.join("blockflash.git");
    if repository.is_dir() {
        std::fs::remove_dir_all(&repository)?;
    }
    // One commit without history, which cargo copies.
    run(Command::new("git").args(["init", "--quiet", "--bare"]).arg(&repository))?;
    let url = format!("file://{}", root().display());
    let mut fetch = Command::new("git");
    fetch.arg("--git-dir").arg(&repository).args(["fetch", "--quiet", "--depth", "1", &url]);
    run(fetch.arg("HEAD:refs/heads/main"))?;
    let manifest = read(&root().join(DROP_IN).join("Cargo.toml"))?;
    let source = |line: &str| {
        let (before, path) = line.split_once("path = \"")?;
        let (version, _) = path.split_once('/')?;
        let url = repository.display();
        Some(format!(
            "{before}git = \"file://{url}\", branch = \"main\", version = \"{version}\" }}"
        ))
    };
    let lines = manifest.lines().map(|line| source(line).unwrap_or_else(|| line.to_owned()));
    let folder = work.join("drop-ins");
    create_dir(&folder.join("src"))?;
    write(&folder.join("Cargo.toml"), lines.collect::<Vec<_>>().join("\n"))?;
    write(&folder.join("src/lib.rs"), read(&root().join(DROP_IN).join("src/lib.rs"))?)?;
    // Its entries for the repository are of an earlier commit.
    let _ = std::fs::remove_file(folder.join("Cargo.lock"));
    let mut check = cargo_in(&folder, work);
    without_toolkit(&mut check)?;
    run(check.args(["check", "--all-features"]))
}

/// Programs that name the packages as a registry has them, from their archives.
pub fn published(work: &Path) -> Result<()> {
    package::run(&package::Args::default())?;
    let unpacked = work.join("packages");
    if unpacked.is_dir() {
        std::fs::remove_dir_all(&unpacked)?;
    }
    create_dir(&unpacked)?;
    let mut patches = String::from("[patch.crates-io]\n");
    for (number, archive) in list(&root().join("target/packages/package"))?.iter().enumerate() {
        let name = archive.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some(name) = name.strip_suffix(".crate") else { continue };
        run(Command::new("tar").arg("-xzf").arg(archive).arg("-C").arg(&unpacked))?;
        let (package, _) = name.rsplit_once('-').context("an archive has a version")?;
        let folder = unpacked.join(name);
        patches += &format!("p{number} = {{ package = \"{package}\", path = {folder:?} }}\n");
    }
    let versions = CANDLE.into_iter().flat_map(|(line, oldest)| {
        [format!("={oldest}"), oldest.to_owned()].map(|version| (line, version))
    });
    for (line, candle) in versions {
        let dependencies = format!(
            "candle-core = \"{candle}\"\n\
             candle-flash-attn = {{ package = \"blockflash-candle-flash-attn\", version = \
             \"{line}\" }}\n\
             candle-flash-attn-v3 = {{ package = \"blockflash-candle-flash-attn-v3\", version = \
             \"{line}\" }}\n{patches}"
        );
        let folder = program(work, "published", &dependencies, CALLS)?;
        let mut check = cargo_in(&folder, work);
        without_toolkit(&mut check)?;
        run(check.args(["check", "--quiet"]))?;
        println!("candle {candle}: ok");
    }
    Ok(())
}

/// Functions of both packages, as code for candle's own calls them.
const CALLS: &str = "
use candle_core::{Result, Tensor};

pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, hopper: bool) -> Result<Tensor> {
    if hopper {
        candle_flash_attn_v3::flash_attn(q, k, v, 0.1, true, true)
    } else {
        candle_flash_attn::flash_attn_windowed(q, k, v, 0.1, Some(100), Some(0))
    }
}
";

fn path(package: &str) -> String {
    format!("path = {:?}", root().join(format!("crates/blockflash-{package}")))
}

/// A program with these dependencies, in a workspace of its own.
fn program(work: &Path, name: &str, dependencies: &str, code: &str) -> Result<std::path::PathBuf> {
    let folder = work.join(name);
    create_dir(&folder.join("src"))?;
    let _ = std::fs::remove_file(folder.join("Cargo.lock"));
    write(
        &folder.join("Cargo.toml"),
        format!(
            "[workspace]\n[package]\nname = \"{name}\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\
             [dependencies]\n{dependencies}\n"
        ),
    )?;
    write(&folder.join("src/lib.rs"), code)?;
    Ok(folder)
}
