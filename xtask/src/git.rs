//! What git says of the repository.

use crate::workspace::{output, root};
use anyhow::Result;
use std::process::Command;

fn git(arguments: &[&str]) -> Command {
    let mut command = Command::new("git");
    command.current_dir(root()).args(arguments);
    command
}

/// The commit that a build comes from, with `-dirty` when tracked files differ from it.
pub fn head() -> Result<String> {
    let commit = output(&mut git(&["rev-parse", "--short=12", "HEAD"]))?;
    let changed = output(&mut git(&["status", "--porcelain", "--untracked-files=no"]))?;
    Ok(format!("{}{}", commit.trim(), if changed.is_empty() { "" } else { "-dirty" }))
}
