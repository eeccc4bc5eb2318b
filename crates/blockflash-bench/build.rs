//! Tells the program what it is built from.

use std::{env, fs, path::Path, process::Command};

fn main() {
    let target = env::var("TARGET").unwrap_or_default();
    println!("cargo::rustc-env=BLOCKFLASH_TARGET={target}");
    println!("cargo::rustc-env=BLOCKFLASH_BUILD_COMMIT={}", commit());
    println!("cargo::rerun-if-changed=build.rs");
}

/// The commit of the package from a registry, or of the checkout. A debug build, which changes more
/// often than commits do, does not look for it, and so is not made anew after each one.
fn commit() -> String {
    let package = env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    // `{"git": {"sha1": "…"}, …}`, which cargo writes into each package.
    let info = fs::read_to_string(Path::new(&package).join(".cargo_vcs_info.json"));
    if let Some(commit) = info.as_deref().ok().and_then(|info| {
        let (_, rest) = info.split_once("\"sha1\"")?;
        rest.split('"').nth(1)?.get(..12)
    }) {
        return format!("commit {commit}");
    }
    if env::var("PROFILE").is_ok_and(|profile| profile == "debug") {
        return "debug build".to_owned();
    }
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(&package).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    // It is written whenever HEAD becomes another commit.
    if let Some(log) = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    let commit = git(&["rev-parse", "--short=12", "HEAD"]);
    commit.map_or_else(|| "unknown commit".to_owned(), |commit| format!("commit {commit}"))
}
