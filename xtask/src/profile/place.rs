//! The environment of the command: the repository, or a bundle on a machine without Rust.

use crate::{
    artifacts::{self, IMAGES_FEATURE},
    kernels::with_line_information,
    workspace::{head, list, read, root},
};
use anyhow::{Context, Result, ensure};
use blockflash_sys::Kernel;
use std::path::{Path, PathBuf};

/// The environment.
#[derive(Debug, PartialEq, Eq)]
pub enum Place {
    /// The root of the repository: programs and images are built.
    Repository(PathBuf),
    /// A folder that `cargo xtask bundle` wrote: programs and images are beside this program.
    Bundle(PathBuf),
}

impl Place {
    /// The bundle that contains this program, else the repository from which it was built.
    pub fn find() -> Result<Self> {
        let program = std::env::current_exe().unwrap_or_default();
        let folder = program.parent().unwrap_or(Path::new("."));
        if folder.join("run-all").is_file() {
            return Ok(Self::Bundle(folder.into()));
        }
        let shown = program.display();
        ensure!(
            root().join("kernels").is_dir(),
            "{shown} is neither in a bundle nor in a repository"
        );
        Ok(Self::Repository(root()))
    }

    fn folder(&self) -> &Path {
        let (Self::Repository(folder) | Self::Bundle(folder)) = self;
        folder
    }

    /// Default folder for reports.
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
    pub fn commit(&self) -> Result<String> {
        match self {
            Self::Repository(_) => head(),
            Self::Bundle(folder) => Ok(read(&folder.join("commit"))?.trim().to_string()),
        }
    }

    /// The `blockflash` program, built first in the repository.
    pub fn program(&self) -> Result<PathBuf> {
        if let Self::Bundle(folder) = self {
            let program = folder.join("blockflash");
            ensure!(program.is_file(), "{} is missing: is the bundle complete?", program.display());
            return Ok(program);
        }
        let package = ["build", "--package", "blockflash-bench", "--bin", "blockflash"];
        let programs = artifacts::build(&[&package[..], &["--features", IMAGES_FEATURE]].concat())?;
        let program = programs.into_iter().find(|program| program.name == "blockflash");
        Ok(program.context("cargo built no program `blockflash`")?.path)
    }

    /// The folder with the kernel's image with line information. In the repository it is compiled
    /// first. `None` for a bundle that lacks it; then the program's own image is profiled.
    pub fn images(&self, kernel: &Kernel) -> Result<Option<PathBuf>> {
        let folder = match self {
            Self::Repository(_) => {
                let folder = self.results().join("images");
                eprintln!("compiling {}", kernel.image_name());
                with_line_information(&[kernel], &folder)?;
                folder
            }
            Self::Bundle(bundle) => bundle.join("images"),
        };
        Ok(folder.join(kernel.image_name()).is_file().then_some(folder))
    }

    /// Files that may contain measured ceilings; the bundle's own measurements come first.
    pub fn ceilings(&self) -> Vec<PathBuf> {
        let gpus = list(&self.folder().join("benches/results")).unwrap_or_default();
        let folders = [self.folder().join("out"), self.folder().into()].into_iter().chain(gpus);
        folders.map(|folder| folder.join("ceilings.jsonl")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_is_the_repository() {
        assert_eq!(Place::find().unwrap(), Place::Repository(root()));
    }

    #[test]
    fn a_bundle_brings_its_programs() {
        let folder = tempfile::tempdir().unwrap();
        let bundle = Place::Bundle(folder.path().into());
        assert!(bundle.program().unwrap_err().to_string().contains("is missing"));
        std::fs::write(folder.path().join("commit"), "0123456789ab\n").unwrap();
        assert_eq!(bundle.commit().unwrap(), "0123456789ab");
        let kernel = &blockflash_sys::manifest::kernels()[0];
        assert_eq!(bundle.images(kernel).unwrap(), None);
        std::fs::create_dir(folder.path().join("images")).unwrap();
        std::fs::write(folder.path().join("images").join(kernel.image_name()), "").unwrap();
        assert_eq!(bundle.images(kernel).unwrap(), Some(folder.path().join("images")));
    }
}
