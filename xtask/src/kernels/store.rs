//! The zstd files of `prebuilt/`.

use super::sources::sha256;
use crate::workspace::{list, prebuilt, read_bytes, write};
use anyhow::{Context, Result};
use std::{io::Read, path::PathBuf};

/// The highest level that costs no extra memory to decode; images are read once per process and
/// row.
const ZSTD_LEVEL: i32 = 19;

fn path(image: &str) -> PathBuf {
    prebuilt().join(format!("{image}.zst"))
}

/// The image before compression, `None` when there is none. Decoded with the decoder that users of
/// the crate run.
pub fn load(image: &str) -> Result<Option<Vec<u8>>> {
    let path = path(image);
    if !path.exists() {
        return Ok(None);
    }
    let image =
        unpack(&read_bytes(&path)?).with_context(|| format!("{} is damaged", path.display()))?;
    Ok(Some(image))
}

/// What a file of `prebuilt/` holds.
pub fn unpack(compressed: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    ruzstd::decoding::StreamingDecoder::new(compressed)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// SHA-256 of the image before compression, `None` when there is none.
pub fn digest(image: &str) -> Result<Option<String>> {
    Ok(load(image)?.map(|bytes| sha256(&bytes)))
}

/// Writes an image, unless the same bytes are there already (another zstd could compress them
/// differently).
pub fn store(image: &str, bytes: &[u8]) -> Result<()> {
    if load(image).ok().flatten().as_deref() == Some(bytes) {
        return Ok(());
    }
    write(&path(image), zstd::bulk::compress(bytes, ZSTD_LEVEL)?)
}

/// Removes an image.
pub fn remove(image: &str) -> Result<()> {
    let path = path(image);
    std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
}

/// Names of the images that are there, sorted.
pub fn names() -> Result<Vec<String>> {
    let paths = list(&prebuilt())?;
    let name = |path: &PathBuf| Some(path.file_name()?.to_str()?.strip_suffix(".zst")?.to_string());
    Ok(paths.iter().filter_map(name).collect())
}

/// Bytes of all compressed images.
pub fn total_bytes() -> Result<u64> {
    names()?.iter().map(|image| Ok(std::fs::metadata(path(image))?.len())).sum()
}
