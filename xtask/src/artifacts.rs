//! Programs that cargo builds, and their paths.

use crate::workspace::cargo;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Feature of the `blockflash` that is profiled: it loads images from the folder that
/// `BLOCKFLASH_IMAGES` names.
pub const IMAGES_FEATURE: &str = "blockflash-bench/images-from-folder";

/// A compiled program.
pub struct Program {
    /// Name of the package's binary or test.
    pub name: String,
    /// Path of the executable.
    pub path: PathBuf,
    /// Whether it is a test program.
    pub is_test: bool,
}

/// Cargo's message about an artifact.
#[derive(Deserialize)]
struct Artifact {
    executable: Option<PathBuf>,
    target: Target,
    profile: Profile,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// Builds programs in release mode with the given arguments for cargo, whose progress messages go
/// to the terminal.
pub fn build(arguments: &[&str]) -> Result<Vec<Program>> {
    build_by(cargo(), arguments)
}

/// [`build`] by this cargo.
pub fn build_by(mut cargo: Command, arguments: &[&str]) -> Result<Vec<Program>> {
    cargo.args(arguments).args([
        "--release",
        "--locked",
        "--message-format=json-render-diagnostics",
    ]);
    let output = cargo.stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("the release build failed");
    }
    Ok(parse(&String::from_utf8_lossy(&output.stdout)))
}

fn parse(messages: &str) -> Vec<Program> {
    // Messages of other kinds lack one of the fields and are skipped.
    let artifacts = messages.lines().filter_map(|line| serde_json::from_str::<Artifact>(line).ok());
    let program = |artifact: Artifact| {
        Some(Program {
            name: artifact.target.name,
            path: artifact.executable?,
            is_test: artifact.profile.test,
        })
    };
    artifacts.filter_map(program).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn programs_in_the_messages_of_cargo() {
        let messages = r#"{"target":{"name":"a"},"profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","target":{"name":"b"},"profile":{"test":true},"executable":"/x/b-1"}
{"reason":"build-finished","success":true}"#;
        let programs = parse(messages);
        assert_eq!(programs.len(), 1);
        assert!(
            programs[0].is_test
                && programs[0].name == "b"
                && programs[0].path == Path::new("/x/b-1")
        );
    }
}
