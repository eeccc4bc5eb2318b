//! Tells the program what it is built from.

use std::{env, fmt::Write, fs, path::Path, process::Command};

fn main() {
    let target = env::var("TARGET").unwrap_or_default();
    println!("cargo::rustc-env=BLOCKFLASH_TARGET={target}");
    println!("cargo::rustc-env=BLOCKFLASH_BUILD_COMMIT={}", commit());
    println!("cargo::rerun-if-changed=build.rs");
    suites();
}

/// Lists the suites as `[(name, text)]`, so that an installed program has them. A package has them
/// in its own folder, which is a link to `benches/suites` in the repository; not every checkout can
/// have links.
fn suites() {
    let package = env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    let own = Path::new(&package).join("suites");
    let folder = if own.is_dir() { own } else { Path::new(&package).join("../../benches/suites") };
    println!("cargo::rerun-if-changed={}", folder.display());
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| {
        panic!("{}: {error}; it holds the suites of `blockflash bench`", folder.display())
    });
    let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    files.sort();
    let mut list = String::from("[");
    for path in files {
        let name = path.file_stem().unwrap_or_default();
        // Writing into a string does not fail.
        let _ = write!(list, "({name:?}, include_str!({:?})),", path.display().to_string());
    }
    let out = Path::new(&env::var("OUT_DIR").unwrap_or_default()).join("suites.rs");
    fs::write(&out, list + "]").unwrap_or_else(|error| panic!("{}: {error}", out.display()));
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
