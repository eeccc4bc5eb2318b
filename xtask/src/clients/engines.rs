//! Engines in Python, at the versions that `clients.toml` of the Python package pins: their wheels
//! are unpacked, not installed, and the tests of our adapters run beside them, on the CPU.

use super::checkout::Checkout;
use crate::python::{PACKAGE, installed};
use crate::venv::Venv;
use crate::workspace::{read, root, run, shown, write};
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::env;
use std::path::Path;

/// What is pinned of an engine.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Engine {
    /// Requirements with their versions.
    packages: Vec<String>,
    /// The engine itself, if no registry has it.
    source: Option<Source>,
}

/// A repository on GitHub, whose folders are modules.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Source {
    repository: String,
    revision: String,
}

/// Runs the tests of every engine, also when those of an earlier one failed.
pub fn engines(work: &Path, mirror: Option<&Path>) -> Result<()> {
    let engines = parse(&read(&root().join(PACKAGE).join("clients.toml"))?)?;
    let venv = installed()?;
    let mut failed = Vec::new();
    for (name, engine) in &engines {
        if let Err(error) = tests(name, engine, &venv, work, mirror) {
            eprintln!("error: {name}: {error:#}");
            failed.push(name.as_str());
        }
    }
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

fn parse(text: &str) -> Result<BTreeMap<String, Engine>> {
    let engines: BTreeMap<String, Engine> = toml::from_str(text).context("clients.toml")?;
    for (name, engine) in &engines {
        if let Some(loose) = engine.packages.iter().find(|package| !package.contains("==")) {
            bail!("clients.toml: {name}: {loose} has no version, expected NAME==VERSION");
        }
    }
    Ok(engines)
}

fn tests(
    name: &str,
    engine: &Engine,
    venv: &Venv,
    work: &Path,
    mirror: Option<&Path>,
) -> Result<()> {
    let folder = work.join("engines").join(name);
    let (stamp, wanted) = (folder.join("packages.txt"), engine.packages.join("\n"));
    if std::fs::read_to_string(&stamp).ok().as_ref() != Some(&wanted) {
        if folder.is_dir() {
            std::fs::remove_dir_all(&folder)?;
        }
        let target = folder.to_string_lossy();
        let mut arguments = vec!["--target", &*target];
        arguments.extend(engine.packages.iter().map(String::as_str));
        venv.pip(&arguments)?;
        write(&stamp, &wanted)?;
    }
    let folder_of_tests = root().join(PACKAGE).join("tests/engines");
    let mut files = crate::workspace::list(&folder_of_tests)?;
    let prefix = format!("test_{name}");
    files.retain(|file| {
        file.file_stem().is_some_and(|stem| stem.to_string_lossy().starts_with(&prefix))
    });
    ensure!(!files.is_empty(), "no file {prefix}*.py in {}", folder_of_tests.display());
    let mut path = vec![folder];
    if let Some(Source { repository, revision }) = &engine.source {
        path.push(Checkout { repository, revision, without: &[] }.files(work, mirror)?);
    }
    path.extend(env::var_os("PYTHONPATH").iter().flat_map(env::split_paths));
    let mut pytest = venv.program("pytest");
    pytest.args(files).env("PYTHONPATH", env::join_paths(path)?);
    // Without the engine they fail rather than be skipped.
    pytest.env("BLOCKFLASH_REQUIRE_ENGINE", name);
    println!("{}", shown(&pytest));
    run(&mut pytest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_package_has_a_version() {
        assert!(parse(&read(&root().join(PACKAGE).join("clients.toml")).unwrap()).is_ok());
        let error = parse("[engine]\npackages = [\"a==1\", \"b>=2\"]").err().unwrap();
        assert!(format!("{error:#}").contains("engine: b>=2 has no version"));
        assert!(parse("[engine]\npackage = []").is_err());
        assert!(parse("[engine]\npackages = []\n[engine.source]\nrepository = \"a/b\"").is_err());
    }
}
