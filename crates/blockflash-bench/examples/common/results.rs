//! What the examples say and leave behind.
#![allow(dead_code)] // Not every example calls everything.

use blockflash_bench::plot::Drawing;
use blockflash_ops::Device;
use std::path::{Path, PathBuf};

/// The GPU, or that there is none.
pub fn device_name(device: &Device) -> String {
    device.cuda_properties().map_or("CPU".to_owned(), |gpu| gpu.name.clone())
}

/// TFLOP/s; of a CPU there are few.
pub fn rate(tflops: f64) -> String {
    let decimals = if tflops >= 10.0 { 0 } else { 3 };
    format!("{tflops:.decimals$}")
}

/// Writes texts as `name.extension` and each drawing as SVG into a folder, which is made if
/// it is not there. Returns the files.
///
/// # Errors
/// What cannot be drawn or written.
pub fn write(
    folder: &Path,
    name: &str,
    texts: &[(&str, String)],
    drawings: &[(&str, Drawing)],
) -> Result<Vec<PathBuf>, Box<dyn std::error::Error>> {
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut files = Vec::new();
    for (extension, text) in texts {
        let path = folder.join(format!("{name}.{extension}"));
        std::fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
        files.push(path);
    }
    for (name, drawing) in drawings {
        let path = folder.join(format!("{name}.svg"));
        drawing.write(&[&path])?;
        files.push(path);
    }
    Ok(files)
}
