//! The embedded kernel images.

use crate::Row;
use std::io::Read;

static IMAGES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// Why an image cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The crate was built from a tree whose `prebuilt/` lacks this image.
    #[error("no precompiled image {0}: run `cargo xtask kernels`")]
    Missing(String),
    /// The embedded bytes are not a zstd frame.
    #[error("the precompiled image {0} is damaged: {1}")]
    Damaged(String, String),
}

/// The zstd frame of one image, as it is stored in `prebuilt/`.
pub fn compressed(row: &Row) -> Result<&'static [u8], ImageError> {
    let name = row.image_name();
    IMAGES
        .binary_search_by(|(key, _)| (*key).cmp(name.as_str()))
        .map(|at| IMAGES[at].1)
        .map_err(|_| ImageError::Missing(name))
}

/// The cubin of a row, or its NUL-terminated PTX, ready for `cuModuleLoadData`.
pub fn load(row: &Row) -> Result<Vec<u8>, ImageError> {
    let damaged = |error: &dyn std::fmt::Display| ImageError::Damaged(row.image_name(), error.to_string());
    let mut bytes = Vec::new();
    ruzstd::decoding::StreamingDecoder::new(compressed(row)?)
        .map_err(|error| damaged(&error))?
        .read_to_end(&mut bytes)
        .map_err(|error| damaged(&error))?;
    if row.target.is_ptx() {
        bytes.push(0);
    }
    Ok(bytes)
}

/// Names of all embedded images, sorted.
pub fn names() -> impl Iterator<Item = &'static str> {
    IMAGES.iter().map(|(name, _)| *name)
}
