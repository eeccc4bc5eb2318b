//! The compiler: pinned wheels in a virtual environment under `target/`, or an nvcc that is already
//! installed.

use crate::{
    venv::Venv,
    workspace::{output, read, root},
};
use anyhow::{Context, Result, bail};
use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// The pinned packages.
const REQUIREMENTS: &str = "kernels/requirements.txt";

/// Those among them that influence the images.
const COMPILER_PACKAGES: [&str; 5] = [
    "nvidia-cuda-nvcc",
    "nvidia-nvvm",
    "nvidia-cuda-crt",
    "nvidia-cuda-cccl",
    "nvidia-cuda-runtime",
];

/// A CUDA compiler.
pub struct Toolchain {
    /// The compiler driver.
    pub nvcc: PathBuf,
    /// The assembler beside it.
    pub ptxas: PathBuf,
    /// Its version, as in `13.0.88`.
    pub version: String,
}

impl Toolchain {
    /// The pinned compiler; it is installed if it is missing.
    pub fn pinned() -> Result<Self> {
        Self::at(&site_packages()?.join("nvidia/cu13/bin/nvcc"))
    }

    /// The compiler at a path.
    pub fn at(nvcc: &Path) -> Result<Self> {
        let text = output(Command::new(nvcc).arg("--version"))?;
        let version = parse_version(&text)
            .with_context(|| format!("{} prints no version", nvcc.display()))?;
        let ptxas = nvcc.with_file_name("ptxas");
        Ok(Self { nvcc: nvcc.to_path_buf(), ptxas, version })
    }
}

/// Identity of the compiler in `kernels.lock`: its version, and the pinned versions of its headers.
pub fn identity(version: &str) -> Result<String> {
    let requirements = requirements()?;
    let pins = COMPILER_PACKAGES.iter().map(|package| pin(&requirements, package));
    Ok(format!("nvcc {version}\n{}", pins.collect::<Result<Vec<_>>>()?.join("\n")))
}

/// The version of nvcc that `requirements.txt` asks for.
pub fn pinned_version() -> Result<String> {
    let line = pin(&requirements()?, COMPILER_PACKAGES[0])?;
    Ok(line.split_once("==").map(|(_, version)| version.to_string()).unwrap_or_default())
}

/// The `site-packages` folder of the virtual environment with the packages of `requirements.txt`.
pub fn site_packages() -> Result<PathBuf> {
    Venv::new("kernels", REQUIREMENTS)?.site_packages()
}

fn requirements() -> Result<String> {
    read(&root().join(REQUIREMENTS))
}

fn pin(requirements: &str, package: &str) -> Result<String> {
    let is_pin =
        |line: &&str| line.strip_prefix(package).is_some_and(|rest| rest.starts_with("=="));
    match requirements.lines().map(str::trim).find(is_pin) {
        Some(line) => Ok(line.to_string()),
        None => bail!("{REQUIREMENTS} does not pin {package}"),
    }
}

fn parse_version(text: &str) -> Option<String> {
    text.split(|c: char| c.is_whitespace() || c == ',')
        .filter_map(|word| word.strip_prefix('V'))
        .find(|version| {
            version.split('.').count() == 3
                && version.split('.').all(|part| part.parse::<u32>().is_ok())
        })
        .map(str::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_of_nvcc() {
        let text = "nvcc: NVIDIA (R) Cuda compiler driver\n\
            Cuda compilation tools, release 13.0, V13.0.88\nBuild x";
        assert_eq!(parse_version(text).as_deref(), Some("13.0.88"));
        assert_eq!(parse_version("Volume 1.2"), None);
    }

    #[test]
    fn every_compiler_package_is_pinned() {
        assert!(identity(&pinned_version().unwrap()).unwrap().lines().count() == 6);
        assert!(pin("nvidia-cuda-nvcc>=13", "nvidia-cuda-nvcc").is_err());
    }
}
