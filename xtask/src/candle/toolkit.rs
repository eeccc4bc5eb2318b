//! What candle needs of a CUDA toolkit, from the pinned wheels.

use crate::{
    venv::Venv,
    workspace::{list, output, run, target_dir, write},
};
use anyhow::{Context, Result};
use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The pinned packages.
const REQUIREMENTS: &str = "xtask/src/candle/requirements.txt";

/// What candle links besides the driver, by the names for the linker.
const LIBRARIES: [&str; 5] = ["cublas", "cublasLt", "cudart", "curand", "nvrtc"];

/// A compiler, and a folder with the libraries.
pub struct Toolkit {
    compilers: PathBuf,
    home: PathBuf,
}

impl Toolkit {
    /// The pinned one; it is installed if it is missing.
    pub fn pinned() -> Result<Self> {
        let wheels = Venv::new("candle", REQUIREMENTS)?.site_packages()?.join("nvidia/cu13");
        let (home, lib) = (target_dir("candle/toolkit")?, target_dir("candle/toolkit/lib64")?);
        let files = list(&wheels.join("lib"))?;
        for library in LIBRARIES {
            let start = format!("lib{library}.so.");
            let named = |file: &&PathBuf| {
                file.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&start))
            };
            let file = files.iter().find(named).with_context(|| format!("no wheel has {start}"))?;
            link(file, &lib.join(format!("lib{library}.so")))?;
        }
        driver(&wheels.join("include/cuda.h"), &lib)?;
        Ok(Self { compilers: wheels.join("bin"), home })
    }

    /// Lets a cargo use it, for the GPU that `CUDA_COMPUTE_CAP` names, else for Hopper and newer
    /// ones.
    pub fn apply(&self, cargo: &mut Command) -> Result<()> {
        let path = env::var_os("PATH").unwrap_or_default();
        let path = [self.compilers.clone()].into_iter().chain(env::split_paths(&path));
        cargo.env("PATH", env::join_paths(path)?).env("NVCC", self.compilers.join("nvcc"));
        cargo.env("CUDA_HOME", &self.home);
        if env::var_os("CUDA_COMPUTE_CAP").is_none() {
            cargo.env("CUDA_COMPUTE_CAP", "90");
        }
        Ok(())
    }
}

/// The file under another name. The files are large, and links by name are not everywhere.
fn link(file: &Path, to: &Path) -> Result<()> {
    if !to.exists() {
        fs::hard_link(file, to).with_context(|| format!("cannot link {}", to.display()))?;
    }
    Ok(())
}

/// A libcuda for the linker, with empty functions of the names in the header. The real one comes
/// with a driver.
fn driver(header: &Path, lib: &Path) -> Result<()> {
    let text = output(Command::new("cc").args(["-E", "-P"]).arg(header))?;
    let functions: String =
        functions(&text).iter().map(|name| format!("void {name}(void) {{}}\n")).collect();
    let source = lib.join("cuda.c");
    write(&source, functions)?;
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"]).arg(lib.join("libcuda.so"));
    run(cc.arg(source))
}

/// The names in a preprocessed header that functions of the driver have: types start with `CU`.
fn functions(header: &str) -> BTreeSet<&str> {
    let words = header.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    let function = |word: &&str| {
        let rest = word.strip_prefix("cu").unwrap_or_default();
        rest.starts_with(|letter: char| letter.is_ascii_uppercase())
    };
    words.filter(function).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_a_header() {
        let header = "typedef int CUresult; CUresult cuInit(int cut); CUresult\ncuMemFree_v2(long)";
        assert_eq!(Vec::from_iter(functions(header)), ["cuInit", "cuMemFree_v2"]);
    }
}
