//! The GPU that is profiled.

use anyhow::{Context, Result, bail};
use blockflash_sys::ComputeCapability;
use std::process::Command;

/// The GPU, as nvidia-smi describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its name.
    pub name: String,
    /// What code it runs.
    pub capability: ComputeCapability,
    /// Version of its driver.
    pub driver: String,
}

impl Gpu {
    /// The first GPU that programs see.
    pub fn find() -> Result<Self> {
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
        let mut command = Command::new("nvidia-smi");
        command.args([
            "--format=csv,noheader",
            "--query-gpu=name,compute_cap,driver_version",
            "-i",
            first(&visible),
        ]);
        let output = command
            .output()
            .context("no GPU: nvidia-smi cannot be started, so no NVIDIA driver is installed")?;
        let text = String::from_utf8_lossy(&output.stdout);
        match parse(&text) {
            Some(gpu) if output.status.success() => Ok(gpu),
            _ => bail!("no GPU: nvidia-smi says {:?}", text.lines().next().unwrap_or_default()),
        }
    }
}

/// The name of a GPU as a folder: `nvidia-h200`.
pub fn slug(name: &str) -> String {
    let words = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_ascii_lowercase).collect::<Vec<_>>().join("-")
}

/// The first entry of CUDA_VISIBLE_DEVICES, a number or a UUID.
fn first(visible: &str) -> &str {
    match visible.split(',').next().map(str::trim) {
        Some(entry) if !entry.is_empty() => entry,
        _ => "0",
    }
}

fn parse(text: &str) -> Option<Gpu> {
    let mut fields = text.lines().next()?.split(',').map(str::trim);
    let (name, capability, driver) = (fields.next()?, fields.next()?, fields.next()?);
    let (major, minor) = capability.split_once('.')?;
    let capability = ComputeCapability::new(major.parse().ok()?, minor.parse().ok()?);
    Some(Gpu { name: name.into(), capability, driver: driver.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nvidia_smi_says() {
        let gpu = parse("NVIDIA H200, 9.0, 580.159.04\n").unwrap();
        assert_eq!(gpu.capability, ComputeCapability::new(9, 0));
        assert_eq!((slug(&gpu.name).as_str(), gpu.driver.as_str()), ("nvidia-h200", "580.159.04"));
        assert_eq!(parse("No devices were found"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn the_first_visible_gpu() {
        assert_eq!(
            [first(""), first("2,1"), first("GPU-abc"), first(" ")],
            ["0", "2", "GPU-abc", "0"]
        );
    }
}
