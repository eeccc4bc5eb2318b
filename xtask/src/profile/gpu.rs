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
        let query = "--query-gpu=name,compute_cap,driver_version";
        let output = Command::new("nvidia-smi")
            .args(["--format=csv,noheader", query, "-i", first(&visible)])
            .output()
            .context("no GPU: nvidia-smi cannot be started, so no NVIDIA driver is installed")?;
        let text = String::from_utf8_lossy(&output.stdout);
        match parse(&text) {
            Some(gpu) if output.status.success() => Ok(gpu),
            _ => bail!("no GPU: nvidia-smi says {:?}", text.lines().next().unwrap_or_default()),
        }
    }
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
        assert_eq!((gpu.name.as_str(), gpu.driver.as_str()), ("NVIDIA H200", "580.159.04"));
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
