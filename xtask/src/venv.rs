//! Virtual environments under `target/` with the pinned packages of a requirements file.

use crate::workspace::{list, read, root, run, target_dir, write};
use anyhow::{Context, Result};
use std::{path::PathBuf, process::Command};

/// A virtual environment.
pub struct Venv(PathBuf);

impl Venv {
    /// The environment `target/<name>/venv` with exactly the packages of a requirements file, which
    /// names their dependencies, too. It is created anew when that file has changed.
    pub fn new(name: &str, requirements: &str) -> Result<Self> {
        let wanted = read(&root().join(requirements))?;
        let venv = target_dir(name)?.join("venv");
        let stamp = venv.join("requirements.txt");
        if std::fs::read_to_string(&stamp).ok().as_ref() != Some(&wanted) {
            eprintln!("Installing {requirements} into {}", venv.display());
            run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv)).context(
                "a virtual environment is needed (Debian and Ubuntu: apt install python3-venv)",
            )?;
            Self(venv.clone()).pip(&["--requirement", requirements])?;
            write(&stamp, wanted)?;
        }
        Ok(Self(venv))
    }

    /// A program of the environment, to be run in the root of the workspace. What Python compiles
    /// is kept, whatever the caller's environment says: importing torch takes three times as long
    /// without that.
    pub fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.0.join("bin").join(name));
        command.current_dir(root()).env("VIRTUAL_ENV", &self.0);
        command.env_remove("PYTHONDONTWRITEBYTECODE");
        command.env("PYTHONPYCACHEPREFIX", self.0.join("pycache"));
        command
    }

    /// Installs packages without their dependencies. Python compiles a module when it is imported:
    /// most of them never are.
    pub fn pip(&self, arguments: &[&str]) -> Result<()> {
        let install = "-m pip install --quiet --disable-pip-version-check --no-input --no-deps";
        let mut pip = self.program("python");
        run(pip.args(install.split(' ')).arg("--no-compile").args(arguments))
    }

    /// The folder in which its packages are.
    pub fn site_packages(&self) -> Result<PathBuf> {
        let found = list(&self.0.join("lib"))?
            .into_iter()
            .map(|python| python.join("site-packages"))
            .find(|path| path.is_dir());
        found.with_context(|| format!("no site-packages in {}", self.0.display()))
    }
}
