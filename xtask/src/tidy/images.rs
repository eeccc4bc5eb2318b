//! Rules about the committed kernel images, without compiling anything.

use super::findings::Findings;
use crate::{
    kernels::{build_fingerprint, image_names, lock, sources, store, toolchain, violations},
    record,
};
use anyhow::Result;
use blockflash_sys::{Kernel, manifest};
use std::collections::BTreeMap;

/// All archives together, which a wheel carries: 1.7 MB more than before attention by an index.
/// `cargo xtask package` holds each of the two packages below a limit of its own.
const MAX_TOTAL_BYTES: u64 = 11_150_000;

/// Checks every kernel of the manifest, and the record of GPU passes.
pub fn check(findings: &mut Findings) -> Result<()> {
    let (lock, images) = (lock::load()?, store::load()?);
    let version = toolchain::pinned_version()?;
    // Most problems concern many images: each is named once.
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut problem = |what: String, image: String| found.entry(what).or_default().push(image);
    for kernel in manifest::kernels() {
        match problems(kernel, &lock, &images, &version) {
            Ok(problems) => {
                problems.into_iter().for_each(|what| problem(what, kernel.image_name()))
            }
            Err(error) => problem(format!("{error:#}"), kernel.image_name()),
        }
    }
    let names = image_names();
    let stale = images.keys().filter(|name| !names.contains(*name));
    stale.for_each(|image| problem("is not in the manifest".into(), image.clone()));
    let orphans = lock.keys().filter(|name| !names.contains(*name));
    orphans.for_each(|image| {
        problem("in kernels.lock, but not in the manifest".into(), image.clone())
    });
    let coverage = record::coverage(&lock, &record::load()?);
    let missing = coverage.missing.iter();
    missing
        .for_each(|image| problem("no GPU pass in tests/gpu-passed.jsonl".into(), image.clone()));
    for (what, images) in &found {
        let others = match images.len() {
            1 => String::new(),
            count => format!(" and {} other images", count - 1),
        };
        findings.errors.push(format!("{}{others}: {what}", images[0]));
    }

    let total = store::total_bytes()?;
    if total > MAX_TOTAL_BYTES {
        findings.errors.push(format!("the archives take {total} bytes, at most {MAX_TOTAL_BYTES}"));
    }
    findings.notes.push(format!("{coverage}; {:.2} MB of archives", total as f64 / 1e6));
    Ok(())
}

fn problems(
    kernel: &Kernel,
    lock: &lock::Lock,
    images: &store::Images,
    nvcc_version: &str,
) -> Result<Vec<String>> {
    let name = kernel.image_name();
    let Some(image) = images.get(&name) else { return Ok(vec!["has no image".into()]) };
    let Some(entry) = lock.get(&name) else {
        return Ok(vec!["has no line in kernels.lock".into()]);
    };
    let mut found = violations(kernel, entry);
    if sources::sha256(image) != entry.sha256 {
        found.push("is not the image that kernels.lock names".into());
    }
    if entry.source != sources::fingerprint(kernel)?
        || entry.build != build_fingerprint(kernel, nvcc_version)?
    {
        found.push("its sources or flags have changed: run `cargo xtask kernels`".into());
    }
    Ok(found)
}
