//! The fingerprint of a kernel's sources, taken without running the compiler.

use crate::workspace::{list, read, root};
use anyhow::Result;
use blockflash_sys::Kernel;
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// Lower-case hexadecimal SHA-256.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Path of a kernel's source file, relative to the root of the repository.
pub fn source(kernel: &Kernel) -> String {
    format!("kernels/{}/kernel.cu", kernel.source())
}

/// Every CUDA file, sorted.
pub fn all() -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![root().join("kernels")];
    while let Some(folder) = folders.pop() {
        let (inner, files): (Vec<_>, Vec<_>) =
            list(&folder)?.into_iter().partition(|path| path.is_dir());
        folders.extend(inner);
        found.extend(files.into_iter().filter(|path| is_cuda(path)));
    }
    found.sort();
    Ok(found)
}

/// Whether a file is CUDA C++, judged by its name.
pub fn is_cuda(path: &Path) -> bool {
    path.extension().is_some_and(|extension| ["cu", "cuh", "h"].iter().any(|&e| extension == e))
}

/// Fingerprint of everything in this repository that determines a kernel, apart from the target:
/// its source file, the headers that it includes directly or indirectly, and its macros.
pub fn fingerprint(kernel: &Kernel) -> Result<String> {
    let mut text = String::new();
    for (path, content) in closure(&source(kernel))? {
        text += &format!("{path} {}\n", sha256(content.as_bytes()));
    }
    for (name, value) in kernel.macros() {
        text += &format!("{name}={value}\n");
    }
    Ok(sha256(text.as_bytes()))
}

/// A source file and all headers of this repository that it includes, directly or indirectly. An
/// `#include` counts even if a condition disables it. Headers that are not found here belong to the
/// toolkit, whose version is part of the build flags.
fn closure(source: &str) -> Result<BTreeMap<String, String>> {
    let root = root();
    let mut found = BTreeMap::new();
    let mut queue = vec![source.to_string()];
    while let Some(path) = queue.pop() {
        if found.contains_key(&path) {
            continue;
        }
        let content = read(&root.join(&path))?;
        let folder = PathBuf::from(&path).parent().map(PathBuf::from).unwrap_or_default();
        for name in includes(&content) {
            let candidates = [folder.join(name), PathBuf::from("kernels/include").join(name)];
            if let Some(header) = candidates.iter().find(|path| root.join(path).is_file()) {
                queue.push(header.to_string_lossy().into_owned());
            }
        }
        found.insert(path, content);
    }
    Ok(found)
}

/// Paths in the `#include` lines of a C++ file.
fn includes(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let name =
            line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?.trim_start();
        let close = match name.chars().next()? {
            '<' => '>',
            '"' => '"',
            _ => return None,
        };
        name[1..].split_once(close).map(|(name, _)| name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn include_lines() {
        let text = "#include <a/b.h> // why\n  # include \"c.cuh\"\n// include <no.h>\n\
            #define X <no.h>\n#include MACRO";
        assert_eq!(includes(text).collect::<Vec<_>>(), ["a/b.h", "c.cuh"]);
    }

    #[test]
    fn known_digest() {
        assert_eq!(
            sha256(b"abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
