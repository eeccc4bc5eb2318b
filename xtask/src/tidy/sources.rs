//! Rules for source files and documents: length, width, and constructs that are allowed in one
//! place only.

use super::vocabulary::{GLOSSARY, Vocabulary};
use super::{columns::too_long, findings::Findings, links, spread, words};
use crate::workspace::{list, read, root};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// Written by `cargo xtask bindgen`.
const GENERATED: [&str; 2] =
    ["crates/blockflash-sys/src/params.rs", "crates/blockflash-foreign/src/xla/api.rs"];
/// The crates that may contain unsafe code, the files of front ends in which they promise what a
/// library keeps, the fakes, which tests alone use, a test that captures streams of candle, and
/// examples of engines with memory of their own.
const UNSAFE_PLACES: [&str; 10] = [
    "crates/blockflash-safe/",
    "crates/blockflash-foreign/",
    "tests/fake_driver/",
    "crates/blockflash-python/src/foreign.rs",
    "crates/blockflash-python/src/dispatcher/",
    "crates/blockflash-candle/src/line/foreign.rs",
    "crates/blockflash-candle/tests/tensors/line/order.rs",
    "crates/blockflash-ops/examples/raw_pointers.rs",
    "examples/ort/",
    "tests/fake_nccl/src/",
];
/// The one folder with inline PTX.
const PTX_FOLDER: &str = "kernels/include/blockflash/ptx/";
/// The one folder of headers that read the macros of a kernel.
const MACRO_FOLDER: &str = "kernels/include/blockflash/config/";

/// Ends of the names of the files that are looked at.
const SOURCES: [&str; 7] = [".rs", ".cu", ".cuh", ".h", ".md", ".py", ".pyi"];

const LINES_WARN: usize = 300;
const LINES_MAX: usize = 400;
/// What a visitor reads in two minutes.
const FRONT_PAGE_MAX: usize = 200;
/// How a kernel works. What was tried and measured is in NOTES.md beside it.
const KERNEL_README_MAX: usize = 50;

/// Checks every source file and document.
pub fn check(findings: &mut Findings) -> Result<()> {
    let mut files = Vec::new();
    collect(&root(), &mut files)?;
    let (vocabulary, wrong) = Vocabulary::of(&read(&root().join(GLOSSARY))?);
    findings.errors.extend(wrong.iter().map(|(line, what)| format!("{GLOSSARY}:{line}: {what}")));
    let mut texts = Vec::with_capacity(files.len());
    for file in &files {
        let name = file.strip_prefix(root()).unwrap_or(file).to_string_lossy().replace('\\', "/");
        let text = read(file)?;
        for (line, word) in vocabulary.refused(&name, &text) {
            findings.errors.push(format!("{name}:{line}: `{word}`: see {GLOSSARY}"));
        }
        check_file(&name, &text, findings).with_context(|| name.clone())?;
        texts.push((name, text));
    }
    spread::check(&texts, findings);
    Ok(())
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for path in list(folder)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_source = SOURCES.iter().any(|end| name.ends_with(end));
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            collect(&path, files)?;
        } else if path.is_file() && is_source {
            files.push(path);
        }
    }
    Ok(())
}

fn check_file(name: &str, text: &str, findings: &mut Findings) -> Result<()> {
    if GENERATED.contains(&name) {
        return Ok(());
    }
    let count = text.lines().count();
    let most = most_lines(name);
    if count > most {
        findings.errors.push(format!("{name}: {count} lines, at most {most}"));
    } else if count > LINES_WARN && name.ends_with(".rs") {
        findings.warnings.push(format!("{name}: {count} lines, better at most {LINES_WARN}"));
    }
    let mut forbid = |lines: Vec<usize>, what: &str| {
        findings.errors.extend(lines.iter().map(|line| format!("{name}:{line}: {what}")));
    };
    forbid(too_long(name, text), "a line has more than 100 columns");
    match name.rsplit('.').next() {
        Some("md") => {
            let wrong = links::wrong(name, text).into_iter();
            findings.errors.extend(wrong.map(|(line, what)| format!("{name}:{line}: {what}")));
            return Ok(());
        }
        Some("py" | "pyi") => {}
        Some("rs") => {
            if !UNSAFE_PLACES.iter().any(|place| name.starts_with(place)) {
                let found = words::in_rust(text, |word| word == "unsafe")?;
                forbid(found, "unsafe code belongs in blockflash-safe or blockflash-foreign");
            }
        }
        _ => {
            if !name.starts_with(PTX_FOLDER) {
                let found = words::in_cpp(text, |word| matches!(word, "asm" | "__asm__" | "__asm"));
                forbid(found, "inline PTX belongs in include/blockflash/ptx/");
            }
            if !name.starts_with(MACRO_FOLDER) {
                let found = words::in_cpp(text, |word| word.starts_with("VARIANT_"));
                forbid(found, "VARIANT_ macros are read in include/blockflash/config/");
            }
        }
    }
    Ok(())
}

fn most_lines(name: &str) -> usize {
    let kernel = name.strip_prefix("kernels/").and_then(|rest| rest.strip_suffix("/README.md"));
    match name {
        "README.md" => FRONT_PAGE_MAX,
        _ if kernel.is_some() => KERNEL_README_MAX,
        // Old records, reports and the changes of all versions grow with what they tell.
        _ if name.ends_with(".md") => usize::MAX,
        _ => LINES_MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(name: &str, text: &str) -> Vec<String> {
        let mut findings = Findings::default();
        check_file(name, text, &mut findings).unwrap();
        findings.errors
    }

    #[test]
    fn each_thing_has_its_place() {
        let code = "fn f() { unsafe { g() } }\n";
        assert_eq!(errors("crates/blockflash-ops/src/lib.rs", code).len(), 1);
        assert_eq!(errors("crates/blockflash-python/src/attention.rs", code).len(), 1);
        assert!(errors("crates/blockflash-safe/src/lib.rs", code).is_empty());
        assert!(errors("crates/blockflash-foreign/src/tensor.rs", code).is_empty());
        assert!(errors("crates/blockflash-python/src/foreign.rs", code).is_empty());
        let code = "asm volatile(\"bar.sync 0;\");\n";
        assert_eq!(
            errors("kernels/a/kernel.cu", code),
            ["kernels/a/kernel.cu:1: inline PTX belongs in include/blockflash/ptx/"]
        );
        assert!(errors("kernels/include/blockflash/ptx/mma.cuh", code).is_empty());
        let code = "#ifdef VARIANT_STAGES\n";
        assert_eq!(errors("kernels/include/blockflash/attention/mask.cuh", code).len(), 1);
        assert!(errors("kernels/include/blockflash/config/bsr.cuh", code).is_empty());
    }

    #[test]
    fn long_files_are_named() {
        assert_eq!(errors("benches/peers/a.py", &"asm = 0\n".repeat(401)).len(), 1);
        assert_eq!(errors("xtask/src/a.rs", &"\n".repeat(401)).len(), 1);
        assert!(errors("xtask/src/a.rs", &"\n".repeat(301)).is_empty());
        assert!(errors(GENERATED[0], &"\n".repeat(401)).is_empty());
        assert_eq!(errors("kernels/a/kernel.cu", &"\n".repeat(401)).len(), 1);
        for (name, most) in [("README.md", 200), ("kernels/a/README.md", 50)] {
            assert!(errors(name, &"\n".repeat(most)).is_empty());
            let error = format!("{name}: {} lines, at most {most}", most + 1);
            assert_eq!(errors(name, &"\n".repeat(most + 1)), [error]);
        }
        assert!(errors("kernels/README.md", &"\n".repeat(60)).is_empty());
    }
}
