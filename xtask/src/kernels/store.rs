//! The archives of both `prebuilt/` folders in the format of [`Archive`]: one for each source and
//! target, where sm_80 and sm_89 share one.

use crate::workspace::{list, prebuilt, prebuilt_others, read_bytes, write};
use anyhow::{Context, Result, anyhow};
use blockflash_sys::{
    Kernel,
    image::{Archive, Entry},
    manifest,
};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// The highest level that needs no extra memory to decompress.
const ZSTD_LEVEL: i32 = 19;

/// Uncompressed size of a frame, unless the variants of one tile are larger. A larger frame
/// compresses better and takes longer to unpack: with 1.25 MB the archives are 2 % larger, and the
/// slowest first use of a kernel takes 3.5 instead of 4.0 ms.
const FRAME_BYTES: usize = 1_510_000;

/// Uncompressed images by name.
pub type Images = BTreeMap<String, Vec<u8>>;

/// The content of an archive: frames of images with their names.
type Frames = Vec<Vec<(String, Vec<u8>)>>;

/// Loads all committed images through the decoder that users of the crate run.
pub fn load() -> Result<Images> {
    let mut images = Images::new();
    for path in archives()? {
        let found = images_of(&read_bytes(&path)?);
        images.extend(found.with_context(|| {
            format!(
                "{} is damaged: remove it, and `cargo xtask kernels` rebuilds it",
                path.display()
            )
        })?);
    }
    Ok(images)
}

/// The images of an archive.
pub fn images_of(archive: &[u8]) -> Result<Images> {
    Ok(frames_of(archive)?.into_iter().flatten().collect())
}

fn frames_of(archive: &[u8]) -> Result<Frames> {
    let archive = Archive::parse(archive).map_err(|what| anyhow!(what))?;
    let mut entries: Vec<_> = archive.entries().iter().collect();
    entries.sort_by_key(|(_, entry)| (entry.frame.start, entry.image.start));
    let frames = entries.chunk_by(|(_, one), (_, other)| one.frame == other.frame).map(|entries| {
        let frame = archive.unpack(&entries[0].1.frame).map_err(|what| anyhow!(what))?;
        let image = |(name, entry): &(&&str, &Entry)| {
            let image = frame.get(entry.image.clone()).context("an image ends beyond its frame")?;
            Ok((name.to_string(), image.to_vec()))
        };
        entries.iter().map(image).collect()
    });
    frames.collect()
}

/// Writes the archives of these images and returns the paths of changed archives. Images that no
/// kernel uses are dropped.
pub fn store(images: &Images) -> Result<Vec<PathBuf>> {
    let changes = changes(images)?;
    for (path, archive) in &changes {
        match archive {
            Some(frames) => write(path, pack(frames)?)?,
            None => fs::remove_file(path)
                .with_context(|| format!("cannot remove {}", path.display()))?,
        }
    }
    for folder in [prebuilt(), prebuilt_others()] {
        write(&folder.join("archives.rs"), table(&folder)?)?;
    }
    Ok(changes.into_iter().map(|(path, _)| path).collect())
}

/// The archives of a folder as a table in Rust, which the crate includes.
fn table(folder: &Path) -> Result<String> {
    let mut table = "// Written by `cargo xtask kernels`.\n&[\n".to_owned();
    for path in archives_in(folder)? {
        let name = path.file_stem().context("an archive has a name")?.to_string_lossy();
        table += &format!("    ({name:?}, include_bytes!(\"{name}.zst\")),\n");
    }
    Ok(table + "]\n")
}

/// Archives whose content differs from these images, with their new content; `None` for an archive
/// that no kernel uses. Compressed bytes are not compared, since another zstd version packs the
/// same frames differently.
fn changes(images: &Images) -> Result<Vec<(PathBuf, Option<Frames>)>> {
    let mut wanted: BTreeMap<PathBuf, Vec<(String, Vec<u8>)>> = BTreeMap::new();
    for kernel in manifest::kernels() {
        if let Some(image) = images.get(&kernel.image_name()) {
            wanted.entry(path(kernel)).or_default().push((kernel.image_name(), image.clone()));
        }
    }
    let stale = archives()?.into_iter().filter(|path| !wanted.contains_key(path));
    let mut changes: Vec<_> = stale.map(|path| (path, None)).collect();
    for (path, images) in wanted {
        let frames = layout(images);
        let present = read_bytes(&path).and_then(|archive| frames_of(&archive));
        if present.ok().as_ref() != Some(&frames) {
            changes.push((path, Some(frames)));
        }
    }
    Ok(changes)
}

/// The archive that holds the image of a kernel.
pub fn path(kernel: &Kernel) -> PathBuf {
    let folder = if kernel.target.is_always_embedded() { prebuilt() } else { prebuilt_others() };
    folder.join(format!("{}.zst", kernel.archive_name()))
}

/// What a name has more for a variant of the same tile.
const VARIANTS: [&str; 6] = ["_lse", "_sums", "_cache", "_ta", "_tb", "_c2"];

/// The name without target and element type.
fn tile(name: &str) -> String {
    let symbol = name.split('.').next().unwrap_or(name);
    symbol.replace("_bf16", "").replace("_f16", "")
}

/// The name of a tile without what tells its variants apart.
fn family(name: &str) -> String {
    let mut tile = tile(name);
    while let Some(rest) = VARIANTS.iter().find_map(|end| tile.strip_suffix(end)) {
        tile.truncate(rest.len());
    }
    tile
}

/// Divides the images of an archive into frames. Images that differ only in the element type, in
/// the target or in the variant of a tile compress well together, so they are neighbours and share
/// a frame, even a larger one.
fn layout(mut images: Vec<(String, Vec<u8>)>) -> Frames {
    images.sort_by_cached_key(|(name, _)| (family(name), tile(name), name.clone()));
    let (mut frames, mut size) = (Frames::new(), 0);
    for variants in images.chunk_by(|(one, _), (other, _)| family(one) == family(other)) {
        let more = variants.iter().map(|(_, image)| image.len()).sum::<usize>();
        match frames.last_mut() {
            Some(frame) if size + more <= FRAME_BYTES => {
                frame.extend_from_slice(variants);
                size += more;
            }
            _ => {
                frames.push(variants.to_vec());
                size = more;
            }
        }
    }
    frames
}

/// Packs frames into an archive in the format of [`Archive`].
fn pack(frames: &Frames) -> Result<Vec<u8>> {
    let (mut index, mut packed) = (String::new(), Vec::new());
    for frame in frames {
        let raw = frame.iter().map(|(_, image)| image.as_slice()).collect::<Vec<_>>().concat();
        let compressed = zstd::bulk::compress(&raw, ZSTD_LEVEL)?;
        let (start, length, mut offset) = (packed.len(), compressed.len(), 0);
        for (name, image) in frame {
            index += &format!("{name} {start} {length} {offset} {}\n", image.len());
            offset += image.len();
        }
        packed.extend(compressed);
    }
    let length = u32::try_from(index.len())?.to_le_bytes();
    Ok([&Archive::INDEX_MAGIC.to_le_bytes(), &length, index.as_bytes(), &packed].concat())
}

/// Paths of all archives.
fn archives() -> Result<Vec<PathBuf>> {
    Ok([archives_in(&prebuilt())?, archives_in(&prebuilt_others())?].concat())
}

/// Paths of the archives in a folder, sorted.
fn archives_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let paths = list(folder)?;
    Ok(paths.into_iter().filter(|path| path.extension().is_some_and(|end| end == "zst")).collect())
}

/// Total size of all archives in bytes.
pub fn total_bytes() -> Result<u64> {
    archives()?.iter().map(|path| Ok(fs::metadata(path)?.len())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(name: &str, size: usize) -> (String, Vec<u8>) {
        (name.to_owned(), name.bytes().cycle().take(size).collect())
    }

    #[test]
    fn equal_tiles_share_a_frame_and_archives_are_reproducible() {
        let images = vec![
            image("k_f16_d128.sm_90.cubin", 400_000),
            image("k_bf16_d64.sm_90.cubin", 300_000),
            image("k_bf16_d128.sm_90.cubin", 300_000),
            image("k_f16_d64.sm_90.cubin", 600_000),
        ];
        let frames = layout(images.clone());
        let names = |frame: &Vec<(String, Vec<u8>)>| {
            frame.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>()
        };
        let d = |dim| [format!("k_bf16_d{dim}.sm_90.cubin"), format!("k_f16_d{dim}.sm_90.cubin")];
        assert_eq!(frames.iter().map(names).collect::<Vec<_>>(), [d(128), d(64)]);

        let archive = pack(&frames).unwrap();
        assert_eq!(frames_of(&archive).unwrap(), frames);
        let other_order = images.iter().rev().cloned().collect();
        assert_eq!(pack(&layout(other_order)).unwrap(), archive);
        // The archives must be readable by every zstd tool.
        let raw: Vec<u8> = frames.into_iter().flatten().flat_map(|(_, image)| image).collect();
        assert_eq!(zstd::bulk::decompress(&archive, raw.len()).unwrap(), raw);
        assert!(frames_of(&archive[..archive.len() - 9]).is_err());
    }

    #[test]
    fn variants_of_a_tile_share_a_frame() {
        let images = ["k_d64_ta", "k_d64", "k_d64_x", "k_d64_ta_tb", "k_d64_lse"]
            .map(|name| image(name, FRAME_BYTES / 3))
            .to_vec();
        let names = |frame: Vec<(String, _)>| frame.into_iter().map(|(name, _)| name).collect();
        let frames: Vec<Vec<String>> = layout(images).into_iter().map(names).collect();
        assert_eq!(
            frames,
            [vec!["k_d64", "k_d64_lse", "k_d64_ta", "k_d64_ta_tb"], vec!["k_d64_x"]]
        );
    }

    #[test]
    fn committed_archives_are_what_would_be_written() {
        let mut images = load().unwrap();
        assert_eq!(changes(&images).unwrap(), []);
        for folder in [prebuilt(), prebuilt_others()] {
            let written = std::fs::read_to_string(folder.join("archives.rs")).unwrap();
            assert_eq!(written, table(&folder).unwrap());
        }
        let kernel = &manifest::kernels()[0];
        images.remove(&kernel.image_name());
        let [(path, Some(frames))] = &changes(&images).unwrap()[..] else { panic!("one archive") };
        assert!(path.ends_with(format!("{}.zst", kernel.archive_name())));
        assert!(frames.iter().flatten().all(|(name, _)| *name != kernel.image_name()));
    }
}
