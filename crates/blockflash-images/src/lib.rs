#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

/// The archives of `prebuilt/` by name without `.zst`, sorted. blockflash-sys describes the format
/// and unpacks them.
pub static ARCHIVES: &[(&str, &[u8])] = include!("../prebuilt/archives.rs");
