//! What git says of the repository.

use crate::workspace::{output, output_bytes, root};
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

/// The commit that a name, a tag or the beginning of a hash stands for; `None` when git knows none.
pub fn commit(name: &str) -> Option<String> {
    let name = format!("{name}^{{commit}}");
    let found = git(&["rev-parse", "--verify", "--quiet", "--short=12", "--end-of-options", &name])
        .output()
        .ok()?;
    let hash = String::from_utf8_lossy(&found.stdout).trim().to_string();
    (found.status.success() && !hash.is_empty()).then_some(hash)
}

/// A file as it was in a commit.
pub fn file_at(commit: &str, path: &str) -> Result<Vec<u8>> {
    output_bytes(&mut git(&["show", &format!("{commit}:{path}")]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commits_have_names() {
        let Some(head) = commit("HEAD") else {
            return println!("SKIPPED (no git): commits_have_names");
        };
        assert_eq!(commit(&head[..8]), Some(head.clone()));
        assert_eq!(commit("no-such-branch"), None);
        assert_eq!(commit("--all"), None);
        assert!(file_at(&head, "Cargo.toml").unwrap().starts_with(b"[workspace]"));
        assert!(file_at(&head, "no/such/file").is_err());
    }
}
