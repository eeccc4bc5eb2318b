//! `prebuilt/kernels.lock`: one JSON object per line and image, sorted by image name.

use crate::workspace::{prebuilt, read, write};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::PathBuf};

/// Fingerprints of an image's inputs, and properties of the image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Image name.
    pub image: String,
    /// SHA-256 of the source file, every header of this repository that it includes, and the
    /// variant's macros. Equal for all targets of a symbol.
    pub source: String,
    /// SHA-256 of the compiler's version and flags, target included.
    pub build: String,
    /// SHA-256 of the image before compression (PTX without a terminating NUL).
    pub sha256: String,
    /// Size of the image before compression.
    pub bytes: u64,
    /// Registers per thread. PTX is assembled for the oldest GPU that accepts it to count them.
    pub registers: u32,
    /// Bytes of spill stores plus spill loads.
    pub spill_bytes: u32,
    /// Statically allocated shared memory in bytes.
    pub smem_static: u32,
    /// Dynamic shared memory in bytes, set at launch.
    pub smem_dynamic: u32,
}

/// All entries by image name.
pub type Lock = BTreeMap<String, Entry>;

fn path() -> PathBuf {
    prebuilt().join("kernels.lock")
}

/// Reads the lock file; a missing one is empty.
pub fn load() -> Result<Lock> {
    let path = path();
    if !path.exists() {
        return Ok(Lock::new());
    }
    parse(&read(&path)?).with_context(|| format!("in {}", path.display()))
}

/// Writes the lock file.
pub fn store(lock: &Lock) -> Result<()> {
    write(&path(), format(lock)?)
}

fn parse(text: &str) -> Result<Lock> {
    let mut lock = Lock::new();
    for (number, line) in text.lines().enumerate() {
        let entry: Entry =
            serde_json::from_str(line).with_context(|| format!("line {}", number + 1))?;
        lock.insert(entry.image.clone(), entry);
    }
    Ok(lock)
}

fn format(lock: &Lock) -> Result<String> {
    let mut text = String::new();
    for entry in lock.values() {
        text += &serde_json::to_string(entry)?;
        text.push('\n');
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_sorted_and_survives_a_round_trip() {
        let entry = |image: &str| Entry {
            image: image.into(),
            source: "5".into(),
            build: "b".into(),
            sha256: "6".into(),
            bytes: 7,
            registers: 255,
            spill_bytes: 0,
            smem_static: 16,
            smem_dynamic: 49152,
        };
        let lock: Lock =
            ["b.cubin", "a.cubin"].map(|image| (image.to_string(), entry(image))).into();
        let text = format(&lock).unwrap();
        assert!(text.starts_with(r#"{"image":"a.cubin","#));
        assert_eq!(parse(&text).unwrap(), lock);
        assert!(parse("{}").is_err());
    }
}
