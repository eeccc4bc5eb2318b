//! `cargo xtask package`: makes the archives for crates.io and checks their size and what is in
//! them.

use crate::candle::DROP_IN;
use crate::workspace::{self, cargo, create_dir, list, output, read, root, target_dir, write};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Make the archives for crates.io and check them.
#[derive(clap::Args, Default)]
pub struct Args {
    /// Also compile each package from its archive.
    #[arg(long)]
    verify: bool,
}

/// Size limit of a package: a little below that of crates.io, 10 MB.
const MAX_BYTES: u64 = 9_500_000;
/// Files that every archive has.
const NEEDED: [&str; 3] = ["LICENSE-APACHE", "LICENSE-MIT", "README.md"];
/// In a registry the names of the drop-ins are candle's, so ours start with this.
const PREFIX: &str = "blockflash-";

/// Rehearses the release, and packages every crate that it publishes. The crates' dependencies on
/// each other need not be published yet.
pub fn run(args: &Args) -> Result<()> {
    let target = target_dir("packages")?;
    let archives = target.join("package");
    // None of a package or version that there was before.
    if archives.is_dir() {
        std::fs::remove_dir_all(&archives)?;
    }
    // Everything that a release does but uploading: `.github/workflows/release.yml`.
    let mut rehearsal = cargo();
    rehearsal.args(["publish", "--quiet", "--workspace", "--dry-run", "--no-verify", "--locked"]);
    workspace::run(rehearsal.args(["--allow-dirty", "--target-dir"]).arg(&target))?;
    let mut command = package(args, &target);
    command.args(["--workspace", "--locked"]);
    for name in unpublished()? {
        command.args(["--exclude", &name]);
    }
    workspace::run(&mut command)?;
    for drop_in in drop_ins()? {
        let manifest = renamed(&drop_in, &target)?;
        let mut command = package(&Args { verify: false }, &target);
        command.arg("--manifest-path").arg(manifest);
        for crate_name in ["images", "sys", "safe", "foreign", "ops", "candle"] {
            let path = root().join(format!("crates/blockflash-{crate_name}"));
            let patch =
                format!("patch.crates-io.blockflash-{crate_name}.path={:?}", path.display());
            command.args(["--config", &patch]);
        }
        workspace::run(&mut command)?;
    }
    let mut wrong = Vec::new();
    for archive in list(&archives)? {
        if archive.extension().is_some_and(|extension| extension == "crate") {
            let bytes = std::fs::metadata(&archive)?.len();
            let name = archive.file_name().unwrap_or_default().to_string_lossy().into_owned();
            println!("{:>8.1} kB  {name}", bytes as f64 / 1e3);
            if bytes > MAX_BYTES {
                wrong.push(format!("{name} has over {MAX_BYTES} bytes"));
            }
            let files = output(Command::new("tar").arg("-tzf").arg(&archive))?;
            for needed in NEEDED.iter().filter(|needed| !has(&files, needed)) {
                wrong.push(format!("{name} lacks {needed}"));
            }
        }
    }
    if !wrong.is_empty() {
        bail!("{}", wrong.join("; "));
    }
    Ok(())
}

fn package(args: &Args, target: &Path) -> Command {
    let mut command = cargo();
    command.args(["package", "--quiet", "--allow-dirty", "--target-dir"]).arg(target);
    if !args.verify {
        command.arg("--no-verify");
    }
    command
}

/// Members of the workspace that say `publish = false`.
fn unpublished() -> Result<Vec<String>> {
    #[derive(serde::Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    #[derive(serde::Deserialize)]
    struct Package {
        name: String,
        publish: Option<Vec<String>>,
    }
    let mut command = cargo();
    command.args(["metadata", "--format-version", "1", "--no-deps", "--locked"]);
    let metadata: Metadata = serde_json::from_str(&output(&mut command)?)?;
    let members = metadata.packages.into_iter();
    let unpublished = members.filter(|member| member.publish.as_ref().is_some_and(Vec::is_empty));
    Ok(unpublished.map(|member| member.name).collect())
}

/// Whether the listing of an archive, whose files are in one folder, has a file.
fn has(listing: &str, file: &str) -> bool {
    listing.lines().any(|line| line.split_once('/').is_some_and(|(_, name)| name == file))
}

/// The folders of the packages with candle's names.
pub fn drop_ins() -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for line in list(&root().join(DROP_IN))? {
        if line.file_name().is_some_and(|name| name.to_string_lossy().starts_with("0.")) {
            found.extend(list(&line)?);
        }
    }
    Ok(found)
}

/// A copy of a drop-in under the name that it has in a registry; returns its manifest.
fn renamed(drop_in: &Path, target: &Path) -> Result<PathBuf> {
    let line = drop_in.parent().and_then(Path::file_name).context("a drop-in has a line")?;
    let name = drop_in.file_name().context("a drop-in has a name")?;
    let folder = target.join("drop-in").join(line).join(name);
    create_dir(&folder.join("src"))?;
    for file in ["LICENSE-APACHE", "LICENSE-MIT", "src/lib.rs"] {
        std::fs::copy(drop_in.join(file), folder.join(file)).with_context(|| file.to_owned())?;
    }
    let dependency = root().join("crates/blockflash-candle");
    let manifest = read(&drop_in.join("Cargo.toml"))?
        .replace("name = \"candle", &format!("name = \"{PREFIX}candle"))
        .replace("publish = false\n", "")
        .replace("\"../../../README.md\"", &format!("{:?}", dependency.join("README.md")))
        .replace("\"../../..\"", &format!("{dependency:?}"));
    let to = folder.join("Cargo.toml");
    write(&to, manifest + "\n[workspace]\n")?;
    Ok(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_an_archive_are_in_its_folder() {
        let listing = "a-0.1.0/LICENSE-MIT\na-0.1.0/src/README.md\n";
        assert!(has(listing, "LICENSE-MIT"));
        assert!(!has(listing, "README.md") && !has(listing, "MIT"));
    }

    /// The command checks its results by the oracle, so whoever installs it needs that, too.
    #[test]
    fn what_a_release_publishes() {
        let unpublished = unpublished().unwrap();
        let is_published = |name: &&str| !unpublished.iter().any(|other| other == name);
        let crates = [
            "images", "sys", "safe", "foreign", "ops", "dist", "candle", "cases", "oracle", "bench",
        ];
        assert!(
            crates
                .map(|name| format!("blockflash-{name}"))
                .iter()
                .all(|n| is_published(&n.as_str()))
        );
        for name in ["xtask", "blockflash-tests", "blockflash-fake-driver", "blockflash-python"] {
            assert!(!is_published(&name), "{name}");
        }
    }

    /// The notes of a release are the section of its version.
    #[test]
    fn the_changelog_has_this_version() {
        let changes = read(&root().join("CHANGELOG.md")).unwrap();
        let start = format!("\n## {} - ", env!("CARGO_PKG_VERSION"));
        let (_, section) = changes.split_once(&start).expect("a section of this version");
        let lines = section.split("\n## ").next().unwrap_or(section).lines().count();
        assert!(lines < 60, "{lines} lines");
    }

    #[test]
    fn each_line_of_candle_has_both_drop_ins() {
        let found = drop_ins().unwrap();
        assert_eq!(found.len(), 6, "{found:?}");
        assert_eq!(
            found.iter().filter(|folder| folder.ends_with("candle-flash-attn-v3")).count(),
            3
        );
    }
}
