//! Files of others' repositories at a pinned revision.

use crate::workspace::{create_dir, output, run};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A revision of a repository.
pub struct Checkout<'a> {
    /// `OWNER/NAME` on GitHub.
    pub repository: &'a str,
    pub revision: &'a str,
    /// Folders that nobody needs.
    pub without: &'a [&'a str],
}

impl Checkout<'_> {
    /// Writes the files anew into a folder of their own below `work`, and returns it. What was
    /// built before stays.
    pub fn files(&self, work: &Path, mirror: Option<&Path>) -> Result<PathBuf> {
        let name = self.repository.rsplit('/').next().unwrap_or(self.repository);
        let (git, folder) = (work.join(format!("{name}.git")), work.join(name));
        let local = mirror.map(|mirror| mirror.join(self.repository));
        let git = match local {
            Some(git) => git,
            None => {
                self.fetch(&git)?;
                git
            }
        };
        if folder.is_dir() {
            std::fs::remove_dir_all(&folder)?;
        }
        create_dir(&folder)?;
        let archive = work.join(format!("{name}.tar"));
        let mut pack = Command::new("git");
        pack.arg("--git-dir").arg(&git).args(["archive", "--output"]).arg(&archive);
        pack.args([self.revision, "--", "."]);
        pack.args(self.without.iter().map(|folder| format!(":(exclude){folder}")));
        output(&mut pack)?;
        run(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&folder))?;
        std::fs::remove_file(&archive).with_context(|| format!("{}", archive.display()))?;
        Ok(folder)
    }

    /// Only the files of the revision, unless they are there already.
    fn fetch(&self, git: &Path) -> Result<()> {
        let command = || {
            let mut command = Command::new("git");
            command.arg("--git-dir").arg(git);
            command
        };
        let found = command().args(["cat-file", "-e", self.revision]).output();
        if git.is_dir() && found.is_ok_and(|found| found.status.success()) {
            return Ok(());
        }
        run(Command::new("git").args(["init", "--quiet", "--bare"]).arg(git))?;
        let url = format!("https://github.com/{}", self.repository);
        run(command().args(["fetch", "--quiet", "--depth", "1", &url, self.revision]))
    }
}
