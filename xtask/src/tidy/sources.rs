//! Rules about source files: their length and width, and what may be written where.

use super::{
    Findings,
    columns::too_long,
    scan::{code_only, lines_with_word},
};
use crate::{
    kernels::sources::is_cuda,
    workspace::{list, read, root},
};
use anyhow::Result;
use std::path::{Path, PathBuf};

/// Folders with source files and documents; documents also lie in the root.
const FOLDERS: [&str; 6] = ["crates", "kernels", "tests", "benches", "examples", "xtask"];
/// Written by `cargo xtask bindgen`.
const GENERATED: &str = "crates/blockflash-sys/src/params.rs";
/// The one crate that may contain unsafe code.
const UNSAFE_CRATE: &str = "crates/blockflash-safe/";
/// The one folder with inline PTX.
const PTX_FOLDER: &str = "kernels/include/blockflash/ptx/";
/// The one reader of the macros that a manifest row defines.
const MACRO_READER: &str = "kernels/include/blockflash/config.cuh";

const RUST_LINES_WARN: usize = 300;
const RUST_LINES_MAX: usize = 400;
const KERNEL_LINES_MAX: usize = 400;

/// Checks every source file.
pub fn check(findings: &mut Findings) -> Result<()> {
    let root = root();
    let mut files = list(&root)?;
    files.retain(|path| path.is_file() && is_source(path));
    for folder in FOLDERS.map(|folder| root.join(folder)).iter().filter(|folder| folder.is_dir()) {
        collect(folder, &mut files)?;
    }
    for file in &files {
        let name = file.strip_prefix(&root).unwrap_or(file).to_string_lossy().replace('\\', "/");
        check_file(&name, &read(file)?, findings);
    }
    Ok(())
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for path in list(folder)? {
        if path.is_dir() && !path.ends_with("target") {
            collect(&path, files)?;
        } else if is_source(&path) {
            files.push(path);
        }
    }
    Ok(())
}

fn is_source(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "rs" || extension == "md")
        || is_cuda(path)
}

fn check_file(name: &str, text: &str, findings: &mut Findings) {
    if name == GENERATED {
        return;
    }
    let count = text.lines().count();
    let code = code_only(text);
    let mut forbid = |lines: Vec<usize>, what: &str| {
        lines.iter().for_each(|line| findings.error(format!("{name}:{line}: {what}")));
    };
    forbid(too_long(name, text), "a line has more than 100 columns");
    if name.ends_with(".md") {
        return;
    }
    if name.ends_with(".rs") {
        if !name.starts_with(UNSAFE_CRATE) {
            let found = lines_with_word(&code, |word| word == "unsafe");
            forbid(found, "unsafe code belongs into blockflash-safe");
        }
        if count > RUST_LINES_MAX {
            findings.error(format!("{name}: {count} lines, at most {RUST_LINES_MAX}"));
        } else if count > RUST_LINES_WARN {
            findings.warning(format!("{name}: {count} lines, better at most {RUST_LINES_WARN}"));
        }
        return;
    }
    if !name.starts_with(PTX_FOLDER) {
        let found = lines_with_word(&code, |word| matches!(word, "asm" | "__asm__" | "__asm"));
        forbid(found, "inline PTX belongs into include/blockflash/ptx/");
    }
    if name != MACRO_READER {
        let found = lines_with_word(&code, |word| word.starts_with("VARIANT_"));
        forbid(found, "VARIANT_ macros are read in config.cuh only");
    }
    if count > KERNEL_LINES_MAX {
        findings.error(format!("{name}: {count} lines, at most {KERNEL_LINES_MAX}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(name: &str, text: &str) -> Vec<String> {
        let mut findings = Findings::default();
        check_file(name, text, &mut findings);
        findings.errors
    }

    #[test]
    fn each_thing_has_its_place() {
        let code = "fn f() { unsafe { g() } }\n";
        assert_eq!(errors("crates/blockflash-ops/src/lib.rs", code).len(), 1);
        assert!(errors("crates/blockflash-safe/src/lib.rs", code).is_empty());
        let code = "asm volatile(\"bar.sync 0;\");\n";
        assert_eq!(
            errors("kernels/a/kernel.cu", code),
            ["kernels/a/kernel.cu:1: inline PTX belongs into include/blockflash/ptx/"]
        );
        assert!(errors("kernels/include/blockflash/ptx/mma.cuh", code).is_empty());
        let code = "#ifdef VARIANT_STAGES\n";
        assert_eq!(errors("kernels/include/blockflash/attention/mask.cuh", code).len(), 1);
        assert!(errors("kernels/include/blockflash/config.cuh", code).is_empty());
    }

    #[test]
    fn long_files_are_named() {
        assert_eq!(errors("xtask/src/a.rs", &"\n".repeat(401)).len(), 1);
        assert!(errors("xtask/src/a.rs", &"\n".repeat(301)).is_empty());
        assert!(errors(GENERATED, &"\n".repeat(401)).is_empty());
        assert_eq!(errors("kernels/a/kernel.cu", &"\n".repeat(401)).len(), 1);
    }
}
