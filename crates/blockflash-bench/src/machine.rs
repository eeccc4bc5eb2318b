//! The machine of a measurement: the folder of suites, the GPU and its driver, the commit.

use crate::error::{Error, Result};
use blockflash_ops::Device;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Description of the machine in records.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Name of the GPU, or `cpu: ` and the name of the processor.
    pub gpu: String,
    /// Version of the NVIDIA driver.
    pub driver: Option<String>,
    /// Commit of the build, or `unknown`.
    pub commit: String,
    /// Identifier of the GPU for `nvidia-smi -i`; `None` for the CPU.
    pub smi_index: Option<String>,
}

impl Machine {
    /// Describes the device that is measured.
    pub fn of(device: &Device, benches: &Path) -> Self {
        let commit = commit(benches);
        let Some(gpu) = device.cuda_properties() else {
            let gpu = format!("cpu: {}", processor());
            return Self { gpu, driver: None, commit, smi_index: None };
        };
        let index = smi_index(gpu.ordinal, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref());
        let cuda = format!("CUDA {}.{}", gpu.driver_version / 1000, gpu.driver_version % 1000 / 10);
        let driver = match smi(&index, "driver_version") {
            Some(driver) => format!("{driver} ({cuda})"),
            None => cuda,
        };
        Self { gpu: gpu.name.clone(), driver: Some(driver), commit, smi_index: Some(index) }
    }

    /// Folder name for the machine: `nvidia-h200`; `cpu` for every processor.
    pub fn slug(&self) -> String {
        if self.smi_index.is_none() {
            return "cpu".to_owned();
        }
        let words = self.gpu.split(|c: char| !c.is_ascii_alphanumeric());
        let words: Vec<_> = words.filter(|word| !word.is_empty()).collect();
        words.join("-").to_ascii_lowercase()
    }
}

/// The folder `benches` with suites and competitors: `BLOCKFLASH_BENCHES`, else beside or above the
/// working directory, else beside or above the program.
///
/// # Errors
/// [`Error::NoBenches`].
pub fn benches() -> Result<PathBuf> {
    let valid = |folder: &PathBuf| folder.join("suites").is_dir();
    let from = std::env::current_dir().unwrap_or_default();
    let program = std::env::current_exe().unwrap_or_default();
    let found = match std::env::var_os("BLOCKFLASH_BENCHES") {
        Some(folder) => Some(PathBuf::from(folder)).filter(valid),
        None => {
            let above = from.ancestors().chain(program.ancestors().skip(1));
            above.map(|place| place.join("benches")).find(valid)
        }
    };
    found.ok_or(Error::NoBenches { from })
}

/// The commit: `BLOCKFLASH_COMMIT`, else a file `commit` beside the program or beside `benches`,
/// else the commit of the git repository.
fn commit(benches: &Path) -> String {
    let program = std::env::current_exe().unwrap_or_default();
    let beside = [program.parent(), benches.parent()];
    let file = || {
        let mut files = beside.iter().flatten().map(|folder| folder.join("commit"));
        files.find_map(|path| std::fs::read_to_string(path).ok())
    };
    let git = |arguments: &[&str]| {
        let mut git = Command::new("git");
        git.arg("-C").arg(benches).args(arguments).stderr(Stdio::null());
        output(git)
    };
    let of_git = || {
        let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
        // Records that this run appends must not mark the build as dirty.
        let but = [":/", ":(top,exclude)benches/results"];
        let status = ["status", "--porcelain", "--untracked-files=no", "--"];
        let changed = git(&[&status[..], &but[..]].concat())?;
        Some(if changed.is_empty() { commit } else { format!("{commit}-dirty") })
    };
    let found = std::env::var("BLOCKFLASH_COMMIT").ok().or_else(file);
    let found = found.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
    found.or_else(of_git).unwrap_or_else(|| "unknown".to_owned())
}

/// What a program prints, if it succeeds.
fn output(mut command: Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn processor() -> String {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let name = processor_name();
    format!("{}, {threads} threads", name.as_deref().unwrap_or(std::env::consts::ARCH))
}

/// The name of the processor in the words of the operating system; `None` where it has none.
pub fn processor_name() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let (_, name) =
        info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'))?;
    Some(name.trim().to_owned())
}

/// The GPU's entry in `CUDA_VISIBLE_DEVICES` (a number or a UUID, both of which nvidia-smi takes),
/// else its ordinal.
fn smi_index(ordinal: usize, visible: Option<&str>) -> String {
    let entry = visible.and_then(|list| list.split(',').nth(ordinal)).map(str::trim);
    entry.filter(|entry| !entry.is_empty()).map_or_else(|| ordinal.to_string(), str::to_owned)
}

/// Queries comma-separated properties from nvidia-smi; `None` if it is missing or does not know one
/// of them.
pub(crate) fn smi(index: &str, properties: &str) -> Option<String> {
    output(smi_command(index, properties))
}

pub(crate) fn smi_command(index: &str, properties: &str) -> Command {
    let mut command = Command::new("nvidia-smi");
    command.args(["-i", index, "--format=csv,noheader,nounits"]);
    command.arg(format!("--query-gpu={properties}"));
    command.stdin(Stdio::null()).stderr(Stdio::null());
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_are_renumbered() {
        assert_eq!(smi_index(1, None), "1");
        assert_eq!(smi_index(1, Some("3,GPU-abc")), "GPU-abc");
        assert_eq!(smi_index(2, Some("3,1")), "2");
    }

    #[test]
    fn folders_are_named_after_the_gpu() {
        let slug = |gpu: &str, smi_index: Option<&str>| {
            let smi_index = smi_index.map(str::to_owned);
            Machine { gpu: gpu.into(), driver: None, commit: String::new(), smi_index }.slug()
        };
        assert_eq!(slug("NVIDIA H200", Some("0")), "nvidia-h200");
        assert_eq!(slug("NVIDIA GeForce RTX 4090 (x)", Some("0")), "nvidia-geforce-rtx-4090-x");
        assert_eq!(slug("cpu: some", None), "cpu");
    }

    #[test]
    fn this_repository_is_found() {
        assert!(benches().unwrap().join("suites/smoke.toml").is_file());
        assert!(!commit(&benches().unwrap()).is_empty());
    }
}
