//! `cargo xtask record`: which kernel images have passed their tests on a GPU
//! (`tests/gpu-passed.jsonl`).

use crate::{
    kernels::lock::{self, Lock},
    workspace::{read, root, write},
};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

/// Add the GPU passes of a test run to tests/gpu-passed.jsonl.
#[derive(clap::Args)]
pub struct Args {
    /// File that a test run wrote to $BLOCKFLASH_GPU_RECORD, such as the bundle's gpu-passed.jsonl.
    file: PathBuf,
}

/// One image that passed one suite on one GPU. All fields but the number of cases identify the
/// pass.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pass {
    /// Image name.
    pub image: String,
    /// SHA-256 of the image before compression (PTX without a terminating NUL).
    pub sha256: String,
    /// Test suite.
    pub suite: String,
    /// Name of the GPU.
    pub gpu: String,
    /// Version of its driver.
    pub driver: String,
    /// Number of cases that were run and passed.
    pub cases: u64,
}

/// Number of images of the lock file with and without a GPU pass.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    /// Images that passed on a GPU themselves.
    pub direct: usize,
    /// Images for GPUs nobody had at hand: the same source and tiles passed when built for another
    /// target.
    pub equivalent: usize,
    /// Images without either.
    pub missing: Vec<String>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    merge(&args.file)
}

fn path() -> PathBuf {
    root().join("tests/gpu-passed.jsonl")
}

/// Reads the committed record; a missing one is empty.
pub fn load() -> Result<Vec<Pass>> {
    let path = path();
    if path.exists() { read_passes(&path) } else { Ok(Vec::new()) }
}

/// Adds the lines of a file to the committed record, and drops lines of images that are not
/// committed.
pub fn merge(file: &Path) -> Result<()> {
    let lock = lock::load()?;
    let passes = merged(&lock, load()?, read_passes(file)?);
    let lines = passes
        .iter()
        .map(|pass| Ok(serde_json::to_string(pass)? + "\n"))
        .collect::<Result<String>>()?;
    write(&path(), lines)?;
    println!("{}", coverage(&lock, &passes));
    Ok(())
}

fn read_passes(path: &Path) -> Result<Vec<Pass>> {
    parse(&read(path)?).with_context(|| format!("in {}", path.display()))
}

fn parse(text: &str) -> Result<Vec<Pass>> {
    let mut passes = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let pass: Pass =
            serde_json::from_str(line).with_context(|| format!("line {}", number + 1))?;
        ensure!(pass.cases > 0, "line {}: a pass without cases proves nothing", number + 1);
        passes.push(pass);
    }
    Ok(passes)
}

/// One line per committed image, suite, GPU and driver, the newest; sorted.
fn merged(lock: &Lock, old: Vec<Pass>, new: Vec<Pass>) -> Vec<Pass> {
    let committed: BTreeSet<&str> = lock.values().map(|entry| entry.sha256.as_str()).collect();
    let current =
        old.into_iter().chain(new).filter(|pass| committed.contains(pass.sha256.as_str()));
    let keyed = current.map(|pass| {
        let Pass { image, sha256, suite, gpu, driver, .. } = pass.clone();
        ([image, sha256, suite, gpu, driver], pass)
    });
    keyed.collect::<BTreeMap<_, _>>().into_values().collect()
}

/// Applies the rule: an image passes when it has a line itself, or when an image of the same symbol
/// and the same sources (that is, built for another target) has one.
pub fn coverage(lock: &Lock, passes: &[Pass]) -> Coverage {
    let passed: BTreeSet<&str> = passes.iter().map(|pass| pass.sha256.as_str()).collect();
    let sources: BTreeSet<(&str, &str)> = lock
        .values()
        .filter(|entry| passed.contains(entry.sha256.as_str()))
        .map(|entry| (symbol(&entry.image), entry.source.as_str()))
        .collect();
    let mut coverage = Coverage::default();
    for entry in lock.values() {
        if passed.contains(entry.sha256.as_str()) {
            coverage.direct += 1;
        } else if sources.contains(&(symbol(&entry.image), entry.source.as_str())) {
            coverage.equivalent += 1;
        } else {
            coverage.missing.push(entry.image.clone());
        }
    }
    coverage
}

/// The part of an image's name before the target.
fn symbol(image: &str) -> &str {
    image.split('.').next().unwrap_or(image)
}

impl std::fmt::Display for Coverage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} images passed on a GPU, {} by the same source built for another target, \
            {} without a pass",
            self.direct,
            self.equivalent,
            self.missing.len()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::lock::Entry;

    fn lock(images: &[(&str, &str, &str)]) -> Lock {
        let entry = |&(image, source, sha256): &(&str, &str, &str)| Entry {
            image: image.into(),
            source: source.into(),
            build: String::new(),
            sha256: sha256.into(),
            bytes: 0,
            registers: 0,
            spill_bytes: 0,
            smem_static: 0,
            smem_dynamic: 0,
        };
        images.iter().map(|image| (image.0.to_string(), entry(image))).collect()
    }

    fn pass(sha256: &str, cases: u64) -> Pass {
        let text = |text: &str| text.to_string();
        Pass {
            image: text("a.sm_90.cubin"),
            sha256: text(sha256),
            suite: text("s"),
            gpu: text("g"),
            driver: text("d"),
            cases,
        }
    }

    #[test]
    fn an_image_passes_itself_or_by_its_sources() {
        let lock = lock(&[
            ("a.sm_90.cubin", "source a", "1"),
            ("a.sm_89.cubin", "source a", "2"),
            ("a.ptx_80.ptx", "older source a", "3"),
            ("b.sm_90.cubin", "source a", "4"),
        ]);
        let expected = Coverage {
            direct: 1,
            equivalent: 1,
            missing: vec!["a.ptx_80.ptx".into(), "b.sm_90.cubin".into()],
        };
        assert_eq!(coverage(&lock, &[pass("1", 5)]), expected);
        assert_eq!(coverage(&lock, &[pass("an older image", 5)]).missing.len(), 4);
    }

    #[test]
    fn merging_keeps_the_newest_line_of_committed_images() {
        let lock = lock(&[("a.sm_90.cubin", "source a", "1")]);
        let passes = merged(&lock, vec![pass("1", 5), pass("gone", 5)], vec![pass("1", 7)]);
        assert_eq!(passes, [pass("1", 7)]);
    }

    #[test]
    fn a_line_states_its_cases() {
        let line = serde_json::to_string(&pass("1", 5)).unwrap();
        assert_eq!(parse(&line).unwrap(), [pass("1", 5)]);
        assert!(parse(&serde_json::to_string(&pass("1", 0)).unwrap()).is_err());
        assert!(parse("{}").is_err());
    }
}
