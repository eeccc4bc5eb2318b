//! Compiles one kernel.

use super::{
    lock::Entry,
    ptxas,
    sources::{fingerprint, sha256, source},
    toolchain::{Toolchain, identity},
};
use crate::workspace::{read_bytes, root};
use anyhow::{Context, Result, bail};
use blockflash_sys::Kernel;
use std::{path::Path, process::Command};

/// Flags of every kernel. Line information is left out because it makes images differ from build to
/// build.
const FLAGS: &[&str] = &[
    "-std=c++20",
    "-O3",
    "--expt-relaxed-constexpr",
    "--Werror",
    "all-warnings",
    "-Xptxas",
    "-v",
    "-I",
    "kernels/include",
];

/// A freshly compiled image.
pub struct Image {
    /// Machine code or PTX text.
    pub bytes: Vec<u8>,
    /// The entry for the lock file.
    pub entry: Entry,
}

/// Arguments of nvcc that determine the output, apart from the macros and the source.
fn flags(kernel: &Kernel) -> Vec<String> {
    let kind = if kernel.target.is_ptx() { "-ptx" } else { "-cubin" };
    // Names of internal functions contain the source's file name and a hash of its path. Fixed
    // names tell the kernels apart and keep images identical wherever the repository is.
    let path = format!("/kernels/{}.cu", kernel.source());
    let place = ["--orig_src_file_name", &path[1..], "--orig_src_path_name", &path]
        .map(|word| ["-Xcicc", word])
        .concat();
    [&["-gencode", kernel.target.gencode(), kind], FLAGS, &place[..]]
        .concat()
        .into_iter()
        .map(String::from)
        .collect()
}

/// Fingerprint of the compiler's version and of the flags of a kernel.
pub fn build_fingerprint(kernel: &Kernel, nvcc_version: &str) -> Result<String> {
    Ok(sha256(format!("{}\n{}", identity(nvcc_version)?, flags(kernel).join(" ")).as_bytes()))
}

/// Compiles a kernel, with additional flags if there are any; scratch files go to `scratch`. The
/// error contains the compiler's own message.
pub fn compile(
    kernel: &Kernel,
    toolchain: &Toolchain,
    scratch: &Path,
    more_flags: &[&str],
) -> Result<Image> {
    let name = kernel.image_name();
    let object = scratch.join(&name);
    let source = source(kernel);
    if !root().join(&source).is_file() {
        bail!("{source} does not exist");
    }
    let mut command = Command::new(&toolchain.nvcc);
    command.args(flags(kernel)).args(more_flags);
    command.args(kernel.macros().iter().map(|(name, value)| format!("-D{name}={value}")));
    let mut report = complete(command.arg(&source).arg("-o").arg(&object))?;
    if kernel.target.is_ptx() {
        // PTX has no register counts or spills before it is assembled. It is assembled for the
        // oldest GPU that accepts it, which stands for the others.
        let arch =
            kernel.target.gencode().rsplit_once('_').map(|(_, number)| number).unwrap_or_default();
        let cubin = scratch.join(format!("{name}.cubin"));
        let mut assemble = Command::new(&toolchain.ptxas);
        assemble
            .args(["-v", "-O3", &format!("-arch=sm_{arch}")])
            .arg(&object)
            .arg("-o")
            .arg(&cubin);
        report = complete(&mut assemble)?;
    }
    let usage = ptxas::parse(&report)?;
    let bytes = read_bytes(&object)?;
    let entry = Entry {
        image: name,
        source: fingerprint(kernel)?,
        build: build_fingerprint(kernel, &toolchain.version)?,
        sha256: sha256(&bytes),
        bytes: bytes.len() as u64,
        registers: usage.registers,
        spill_bytes: usage.spill_bytes,
        smem_static: usage.smem_static,
        smem_dynamic: kernel.smem_bytes(),
    };
    Ok(Image { bytes, entry })
}

/// Violations of a compiled kernel: register spills, or too much shared memory.
pub fn violations(kernel: &Kernel, entry: &Entry) -> Vec<String> {
    let mut found = Vec::new();
    if entry.spill_bytes > 0 {
        found.push(format!("spills {} bytes ({} registers)", entry.spill_bytes, entry.registers));
    }
    let smem = entry.smem_static + entry.smem_dynamic;
    let limit = kernel.target.smem_limit();
    if smem > limit {
        found.push(format!(
            "needs {smem} bytes of shared memory, but {} has {limit}",
            kernel.target
        ));
    }
    found
}

fn complete(command: &mut Command) -> Result<String> {
    command.current_dir(root()).env_remove("NVCC_PREPEND_FLAGS").env_remove("NVCC_APPEND_FLAGS");
    let output =
        command.output().with_context(|| format!("cannot start {:?}", command.get_program()))?;
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if !output.status.success() {
        bail!("{}", ptxas::complaints(&text).trim());
    }
    Ok(text)
}
