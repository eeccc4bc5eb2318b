//! Images with line information, for profiles. They are never committed: with it, images differ
//! from build to build.

use super::{compile::compile, toolchain::Toolchain};
use crate::workspace::{create_dir, target_dir, write};
use anyhow::{Context, Result};
use blockflash_sys::Kernel;
use rayon::prelude::*;
use std::path::Path;

/// Compiles kernels as `cargo xtask kernels` does, with line information, into a folder for
/// `BLOCKFLASH_IMAGES`.
pub fn with_line_information(kernels: &[&Kernel], folder: &Path) -> Result<()> {
    let toolchain = Toolchain::pinned()?;
    let scratch = target_dir("profile/scratch")?;
    create_dir(folder)?;
    kernels.par_iter().try_for_each(|kernel| {
        let image = compile(kernel, &toolchain, &scratch, &["-lineinfo"])
            .with_context(|| format!("{} does not compile", kernel.image_name()))?;
        write(&folder.join(kernel.image_name()), image.bytes)
    })
}
