//! The rows on trial: compiled and checked like released ones, into a folder for `BLOCKFLASH_IMAGES` rather than into `prebuilt/`.

use super::{
    Compiled, Problems, compile_all, is_among, print_usage, store, toolchain::Toolchain, violations,
};
use crate::workspace::{create_dir, target_dir, write};
use anyhow::{Context, Result};
use blockflash_sys::{Row, Target, manifest};
use std::path::{Path, PathBuf};

/// Where checks put such images.
pub fn scratch() -> Result<PathBuf> {
    target_dir("kernels/trial")
}

/// Compiles the rows on trial for some targets, or for all when there are none, into a folder. A row that does not compile, or
/// breaks a rule of released ones, is an error.
pub fn compile(arch: &[Target], folder: &Path) -> Result<()> {
    let rows: Vec<&Row> = manifest::trial_rows().iter().filter(|row| is_among(row.target, arch)).collect();
    if rows.is_empty() {
        println!("no row on trial is selected");
        return Ok(());
    }
    compile_rows(&rows, &Toolchain::pinned()?, None, folder)
}

/// Writes everything that a program loads from such a folder: the images of the rows on trial, and the released ones.
pub fn write_folder(folder: &Path, toolchain: &Toolchain, jobs: Option<usize>) -> Result<()> {
    let trial: Vec<&Row> = manifest::trial_rows().iter().collect();
    compile_rows(&trial, toolchain, jobs, folder)?;
    for row in manifest::released_rows() {
        let name = row.image_name();
        let image =
            store::load(&name)?.with_context(|| format!("no image {name}: run `cargo xtask kernels`"))?;
        write(&folder.join(name), image)?;
    }
    let released = manifest::released_rows().len();
    println!("{}: {} images on trial, {released} released ones", folder.display(), trial.len());
    Ok(())
}

fn compile_rows(rows: &[&Row], toolchain: &Toolchain, jobs: Option<usize>, folder: &Path) -> Result<()> {
    create_dir(folder)?;
    let mut problems = Problems::default();
    let mut images = Vec::new();
    for (row, result) in rows.iter().zip(compile_all(rows, toolchain, jobs)?) {
        match into_folder(row, result, folder) {
            Ok(image) => images.push(image),
            Err(error) => problems.add(row, format!("{error:#}")),
        }
    }
    print_usage(&images);
    for (row, image, _) in &images {
        violations(row, &image.entry).into_iter().for_each(|violation| problems.add(row, violation));
    }
    problems.report(" with rows on trial")
}

/// Writes what was compiled. An image that an earlier run left must not pass for one that no longer compiles.
fn into_folder<'r>(row: &'r Row, compiled: Compiled, folder: &Path) -> Result<super::Usage<'r>> {
    let path = folder.join(row.image_name());
    match compiled {
        Ok((image, time)) => write(&path, &image.bytes).map(|()| (row, image, time)),
        Err(error) => {
            let _ = std::fs::remove_file(&path);
            Err(error)
        }
    }
}
