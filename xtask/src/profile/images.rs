//! The kernel images that are profiled.

use super::place::Place;
use crate::{
    git,
    kernels::{store, with_line_information},
    workspace::{create_dir, write},
};
use anyhow::{Context, Result, ensure};
use blockflash_sys::Row;
use std::path::{Path, PathBuf};

/// What a bundle calls the images of the tree that it was made from, and `--diff` those of this
/// tree.
pub const WORK: &str = "work";

/// Images of one origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Images {
    /// Short name of the origin; a part of file names.
    pub label: String,
    /// What the page says about them.
    pub description: String,
    /// The folder for `BLOCKFLASH_IMAGES`; `None` for those in the program.
    pub folder: Option<PathBuf>,
}

impl Images {
    /// Those of the present tree, with line information: compiled, or in a bundle what it brought
    /// for this row; else those in the program.
    pub fn of_tree(place: &Place, row: &Row) -> Result<Self> {
        let label = place.label()?;
        let folder = match place {
            Place::Repository(_) => {
                let folder = place.results().join(&label).join("images");
                eprintln!("compiling {}", row.image_name());
                with_line_information(&[row], &folder)?;
                folder
            }
            Place::Bundle(bundle) => bundle.join("images").join(WORK),
        };
        if folder.join(row.image_name()).is_file() {
            let description = format!("{label}, with line information");
            return Ok(Self { label, description, folder: Some(folder) });
        }
        Ok(Self { description: format!("{label}, without line information"), label, folder: None })
    }

    /// The committed ones of a commit.
    pub fn of_commit(place: &Place, commit: &str, row: &Row) -> Result<Self> {
        let folder = match place {
            Place::Repository(_) => {
                let folder = place.results().join(commit).join("images");
                unpack(commit, row, &folder)?;
                folder
            }
            Place::Bundle(bundle) => bundle.join("images").join(commit),
        };
        ensure!(
            folder.join(row.image_name()).is_file(),
            "commit {commit} has no image {}",
            row.image_name()
        );
        Ok(Self {
            label: commit.into(),
            description: format!("commit {commit}"),
            folder: Some(folder),
        })
    }

    /// Those of a folder.
    pub fn of_folder(folder: &Path) -> Result<Self> {
        ensure!(folder.is_dir(), "{} is no folder of images", folder.display());
        // The program that reads them runs elsewhere.
        let folder = std::path::absolute(folder)?;
        let label = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self {
            label,
            description: format!("folder {}", folder.display()),
            folder: Some(folder),
        })
    }
}

/// Writes the committed image of a commit, not compressed, into a folder.
pub fn unpack(commit: &str, row: &Row, folder: &Path) -> Result<()> {
    let name = row.image_name();
    let path = archive(row);
    let images = match git::file_at(commit, &path) {
        Ok(archive) => store::images_of(&archive)
            .with_context(|| format!("{path} of commit {commit} is damaged"))?,
        Err(_) => store::Images::new(),
    };
    let image =
        images.get(&name).with_context(|| format!("commit {commit} has no image {name}"))?;
    create_dir(folder)?;
    write(&folder.join(&name), image)
}

fn archive(row: &Row) -> String {
    format!("crates/blockflash-sys/prebuilt/{}.zst", row.archive_name())
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockflash_sys::manifest;

    #[test]
    fn images_of_a_commit_are_unpacked() {
        let folder = std::env::temp_dir().join(format!("xtask-images-{}", std::process::id()));
        let row = manifest::rows().iter().find(|row| git::file_at("HEAD", &archive(row)).is_ok());
        let Some(row) = row else {
            return println!("SKIPPED (no git): images_of_a_commit_are_unpacked");
        };
        unpack("HEAD", row, &folder).unwrap();
        let image = std::fs::read(folder.join(row.image_name())).unwrap();
        assert!(image.starts_with(b"\x7fELF"));
        let label = folder.file_name().unwrap().to_string_lossy().into_owned();
        assert_eq!(Images::of_folder(&folder).unwrap().label, label);
        let error = unpack("HEAD~0:nowhere", row, &folder).unwrap_err();
        assert!(error.to_string().contains("has no image"));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
