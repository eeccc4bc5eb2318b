//! Runs Nsight Compute.

use super::{
    launch::Launch,
    page,
    raw::{self, Raw},
};
use crate::workspace::{create_dir, output};
use anyhow::{Context, Result, bail};
use blockflash_sys::image::IMAGES_VARIABLE;
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
};

const ABSENT: &str = "Nsight Compute was not found: there is no ncu in PATH, /usr/local/cuda*/bin \
    and /opt/nvidia/nsight-compute; it comes with the CUDA toolkit (--ncu names another place)";
const FORBIDDEN: &str = "the driver lets only root read the GPU's counters: run as root, or load \
    the nvidia module with NVreg_RestrictProfilingToAdminUsers=0";
/// Metrics that the page needs besides the ones it shows by name: peak rates, from which ceilings
/// are computed where none were measured.
const PEAKS: [&str; 6] = [
    "dram__bytes.sum.peak_sustained",
    "dram__cycles_elapsed.avg.per_second",
    "lts__t_bytes.sum.peak_sustained",
    "lts__cycles_elapsed.avg.per_second",
    "sm__ops_path_tensor_src_bf16_dst_fp32_sparsity_off.sum.peak_sustained",
    "sm__ops_path_tensor_src_fp16_dst_fp32_sparsity_off.sum.peak_sustained",
];

/// The profiler.
pub struct Ncu {
    program: PathBuf,
    /// Names of the counters that it supports on this GPU.
    known: BTreeSet<String>,
}

/// One launch to profile.
pub struct Job<'a> {
    /// The `blockflash` program.
    pub program: &'a Path,
    /// Id of the case that it computes.
    pub case: &'a str,
    /// The kernel.
    pub symbol: &'a str,
    /// Folder of images to use instead of the images in the program.
    pub images: Option<&'a Path>,
    /// Folder of the kernel sources.
    pub sources: &'a Path,
    /// Path of the report to write.
    pub report: &'a Path,
}

impl Ncu {
    /// Uses the given program, else the one in PATH, else the newest in the usual places.
    pub fn find(given: Option<&Path>) -> Result<Self> {
        let program = match given {
            Some(program) if program.is_file() => program.to_path_buf(),
            Some(program) => bail!("--ncu: {} is not a program", program.display()),
            None => candidates().into_iter().find(|path| path.is_file()).context(ABSENT)?,
        };
        // Without the list only the metrics of the predefined set are collected.
        let known = output(Command::new(&program).arg("--query-metrics"))
            .map(|text| names(&text))
            .unwrap_or_default();
        Ok(Self { program, known })
    }

    /// Profiles one launch, keeps the report, and returns the launch and its metrics.
    pub fn profile(&self, job: &Job) -> Result<(Launch, Raw)> {
        create_dir(job.report.parent().unwrap_or(Path::new(".")))?;
        let mut metrics: Vec<String> = page::metrics().chain(PEAKS.map(String::from)).collect();
        metrics.retain(|metric| is_known(metric, &self.known));
        let text = self.collect(job, &metrics)?;
        let launch = Launch::find(&text)
            .with_context(|| format!("{} does not say what it launched", job.program.display()))?;
        let mut import = Command::new(&self.program);
        import.env("LC_ALL", "C").arg("--import").arg(job.report);
        let csv = output(import.args(["--page", "raw", "--csv", "--print-units", "base"]))?;
        Ok((launch, raw::parse(&csv, job.symbol)?))
    }

    /// Runs ncu and returns its output mixed with the output of the profiled program.
    fn collect(&self, job: &Job, metrics: &[String]) -> Result<String> {
        let mut command = Command::new(&self.program);
        // Clocks and caches stay uncontrolled, as in normal use: an earlier launch has warmed them
        // up.
        let kernel = format!("regex:^{}$", job.symbol);
        command.args(["--force-overwrite", "--set", "full", "--import-source", "yes"]);
        command.args(["--clock-control", "none", "--cache-control", "none"]);
        command.args(["--kernel-name", &kernel, "--launch-skip", "1", "--launch-count", "1"]);
        if job.sources.is_dir() {
            command.arg("--source-folders").arg(job.sources);
        }
        if !metrics.is_empty() {
            command.args(["--metrics", &metrics.join(",")]);
        }
        command.arg("--export").arg(job.report).arg(job.program);
        command.args(["launch", "--case", job.case, "--kernel", job.symbol, "--launches", "3"]);
        match job.images {
            Some(folder) => command.env(IMAGES_VARIABLE, folder),
            None => command.env_remove(IMAGES_VARIABLE),
        };
        // The exit status is unreliable; whether a report exists afterwards decides.
        let _ = std::fs::remove_file(job.report);
        let output =
            command.output().with_context(|| format!("cannot start {}", self.program.display()))?;
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        if output.status.success() && job.report.is_file() {
            return Ok(text);
        }
        let status = || format!("ncu wrote no report ({})", output.status);
        bail!("{}: {}", job.symbol, refusal(&text).unwrap_or_else(status))
    }
}

/// Places where ncu may be installed, in order of preference.
fn candidates() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places: Vec<PathBuf> =
        std::env::split_paths(&path).map(|folder| folder.join("ncu")).collect();
    let toolkits = newest("/usr/local", "cuda").into_iter().map(|toolkit| toolkit.join("bin/ncu"));
    places.extend(toolkits);
    places.extend(
        newest("/opt/nvidia/nsight-compute", "").into_iter().map(|version| version.join("ncu")),
    );
    places
}

/// Folders whose names begin with a prefix, the highest version first.
fn newest(folder: &str, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    let name = |path: &PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    found.retain(|path| name(path).starts_with(prefix));
    found.sort_by_key(|path| std::cmp::Reverse(version(&name(path))));
    found
}

/// The numbers in a name, for ordering: 2025.10 comes after 2025.9.
fn version(name: &str) -> Vec<u32> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

/// Names of the counters in the output of `ncu --query-metrics`: the first word of every line that
/// describes a counter.
fn names(text: &str) -> BTreeSet<String> {
    text.lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(|word| word.contains("__"))
        .map(String::from)
        .collect()
}

/// Whether a metric, such as `dram__bytes.sum.per_second`, is derived from a known counter. Names
/// without a suffix are not counters; the predefined set contains them.
fn is_known(metric: &str, known: &BTreeSet<String>) -> bool {
    metric.split_once('.').is_some_and(|(counter, _)| known.contains(counter))
}

/// One line that explains why there is no profile; `None` if the output gives no reason.
fn refusal(text: &str) -> Option<String> {
    if text.contains("ERR_NVGPUCTRPERM") {
        return Some(FORBIDDEN.into());
    }
    let lines = || text.lines().map(str::trim);
    // Errors of the profiled program take precedence: the complaints of ncu follow from them.
    let own = lines().find_map(|line| line.strip_prefix("error: "));
    let by_ncu = || lines().find_map(|line| line.strip_prefix("==ERROR== "));
    let none = || {
        text.contains("No kernels were profiled")
            .then_some("it was not launched, so ncu profiled nothing")
    };
    own.or_else(by_ncu).or_else(none).map(String::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_one_clear_line() {
        let denied = "==PROF== Connected to process 1 (/x/blockflash)\n\
            ==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU \
            Performance Counters on the target device 0.\n";
        assert!(refusal(denied).unwrap().contains("NVreg_RestrictProfilingToAdminUsers=0"));
        let own = "==PROF== Connected\nerror: BLOCKFLASH_IMAGES is set, but x cannot be read\n\
            ==ERROR== The application returned an error code (1).\n";
        assert_eq!(refusal(own).unwrap(), "BLOCKFLASH_IMAGES is set, but x cannot be read");
        let nothing =
            "==PROF== Connected\n==PROF== Disconnected\n==WARNING== No kernels were profiled.\n";
        assert!(refusal(nothing).unwrap().contains("not launched"));
        let broken = "==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n";
        assert_eq!(refusal(broken).unwrap(), "Failed to initialize the profiler: LibraryNotLoaded");
        assert_eq!(refusal("==PROF== Profiling \"x\" - 0: 0%....100% - 41 passes\n"), None);
    }

    #[test]
    fn counters_of_the_gpu() {
        let text = "Device NVIDIA H200 (GH100)\n-----------  -----\nMetric Name  Metric Type\n\
            dram__bytes         Counter   byte  # of bytes\n\
            sm__warps_active    Counter   warp  x\n";
        let known = names(text);
        assert_eq!(known.len(), 2);
        assert!(is_known("dram__bytes.sum.peak_sustained", &known));
        assert!(!is_known("dram__bytes_read.sum", &known));
        assert!(!is_known("sm__warps_active", &known), "no suffix");
    }

    #[test]
    fn versions_are_numbers() {
        assert!(version("2025.10.1") > version("2025.9.3"));
        assert!(version("cuda-13.0") > version("cuda-12.8"));
    }
}
