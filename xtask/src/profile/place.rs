//! Where the command runs: in the repository, or in a bundle on a machine without Rust.

use crate::{
    artifacts::{self, IMAGES_FEATURE},
    git,
    workspace::{list, read, root},
};
use anyhow::{Context, Result, bail, ensure};
use std::path::{Path, PathBuf};

/// The place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// The root of the repository; programs and images are built.
    Repository(PathBuf),
    /// A folder that `cargo xtask bundle` wrote; programs and images lie beside this one.
    Bundle(PathBuf),
}

impl Place {
    /// The bundle that this program lies in, else the repository that it was built in.
    pub fn find() -> Result<Self> {
        let program = std::env::current_exe().unwrap_or_default();
        match Self::bundle(program.parent().unwrap_or(Path::new("."))) {
            Some(bundle) => Ok(bundle),
            None if root().join("kernels").is_dir() => Ok(Self::Repository(root())),
            None => {
                bail!("{} lies neither in a bundle nor beside its repository", program.display())
            }
        }
    }

    fn bundle(folder: &Path) -> Option<Self> {
        folder.join("run-all").is_file().then(|| Self::Bundle(folder.to_path_buf()))
    }

    fn folder(&self) -> &Path {
        let (Self::Repository(folder) | Self::Bundle(folder)) = self;
        folder
    }

    /// Where reports and images go unless `--out` says otherwise.
    pub fn results(&self) -> PathBuf {
        match self {
            Self::Repository(root) => root.join("target/profile"),
            Self::Bundle(folder) => folder.join("out/profile"),
        }
    }

    /// The kernels' sources, for reports that quote them.
    pub fn sources(&self) -> PathBuf {
        self.folder().join("kernels")
    }

    /// The commit of the working tree or of the bundle.
    pub fn label(&self) -> Result<String> {
        match self {
            Self::Repository(_) => git::head(),
            Self::Bundle(folder) => Ok(read(&folder.join("commit"))?.trim().to_string()),
        }
    }

    /// The commit that a name stands for: in a bundle, one whose images it holds.
    pub fn commit(&self, name: &str) -> Option<String> {
        match self {
            Self::Repository(_) => git::commit(name),
            Self::Bundle(folder) => {
                let folders = list(&folder.join("images")).unwrap_or_default();
                let names = folders.iter().filter_map(|folder| folder.file_name()?.to_str());
                let mut fits = names.filter(|held| name.len() >= 4 && held.starts_with(name));
                fits.next().map(String::from).filter(|_| fits.next().is_none())
            }
        }
    }

    /// The `blockflash` program, built first in the repository.
    pub fn program(&self) -> Result<PathBuf> {
        match self {
            Self::Repository(_) => {
                let package = ["build", "--package", "blockflash-bench", "--bin", "blockflash"];
                let programs =
                    artifacts::build(&[&package[..], &["--features", IMAGES_FEATURE]].concat())?;
                let program = programs.into_iter().find(|program| program.name == "blockflash");
                Ok(program.context("cargo built no program `blockflash`")?.path)
            }
            Self::Bundle(folder) => {
                let program = folder.join("blockflash");
                ensure!(
                    program.is_file(),
                    "{} is missing: is this a whole bundle?",
                    program.display()
                );
                Ok(program)
            }
        }
    }

    /// Files that may hold measured ceilings of a GPU, the newest measurement first.
    pub fn ceilings(&self, gpu: &str) -> Vec<PathBuf> {
        let folder = self.folder();
        let recorded = folder.join("benches/results").join(gpu).join("ceilings.jsonl");
        vec![folder.join("out/ceilings.jsonl"), folder.join("ceilings.jsonl"), recorded]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn this_is_the_repository() {
        assert_eq!(Place::find().unwrap(), Place::Repository(root()));
        assert_eq!(Place::bundle(&root()), None);
    }

    #[test]
    fn a_bundle_holds_commits() {
        let folder = std::env::temp_dir().join(format!("xtask-bundle-{}", std::process::id()));
        for name in ["work", "0123456789ab", "0123ffffffff"] {
            fs::create_dir_all(folder.join("images").join(name)).unwrap();
        }
        fs::write(folder.join("run-all"), "").unwrap();
        fs::write(folder.join("commit"), "0123456789ab\n").unwrap();
        let bundle = Place::bundle(&folder).unwrap();
        let found = ["01234", "0123", "abcd", "work"].map(|name| bundle.commit(name));
        assert_eq!(found.map(|name| name.is_some()), [true, false, false, true]);
        assert_eq!(bundle.label().unwrap(), "0123456789ab");
        assert!(bundle.program().unwrap_err().to_string().contains("is missing"));
        fs::remove_dir_all(folder).unwrap();
    }
}
