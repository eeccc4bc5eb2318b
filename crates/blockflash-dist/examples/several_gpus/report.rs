//! Rows, and pictures of what the GPUs did when.

use crate::Failure;
use crate::measure::Bars;
use crate::watch::Kind;
use blockflash_dist::Communicator;
use blockflash_ops::Device;
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A case and scheme.
#[derive(Debug, Serialize)]
pub struct Row {
    pub case: String,
    pub gpus: usize,
    /// Whether it may gather keys, and all-gathers of a rank in a call.
    pub gather: bool,
    pub gathers: usize,
    pub scheme: String,
    /// Milliseconds of one GPU that does everything, and of all, of which the slowest counts.
    pub one_ms: f64,
    pub ms: f64,
    /// The same of calls that follow others of their kind, in the later half of a turn, where `ms`
    /// follows another scheme or one GPU.
    pub one_repeated_ms: f64,
    pub repeated_ms: f64,
    /// Useful work of all GPUs together.
    pub tflops: f64,
    /// `one_ms / (gpus · ms)`.
    pub scaling: f64,
    /// What a rank sends.
    pub sent_mb: f64,
    /// The same without exchanges, and what they add.
    pub computing_ms: f64,
    pub exposed_ms: f64,
    /// What the planner says, given the rate of one GPU and those of the links.
    pub forecast_ms: Option<f64>,
    pub forecast_exposed_ms: Option<f64>,
    /// ‖several − one‖ / ‖one‖, of the worst result of the worst rank.
    pub error: f64,
    /// Whether a repeat has the same bits.
    pub repeats: bool,
    /// Of a block mask: visited pairs, and keys of other ranks that come.
    pub visited: Option<f64>,
    pub keys_come: Option<f64>,
    /// Milliseconds in which the ranks have told each other their lists.
    pub lists_ms: Option<f64>,
    /// ‖chosen blocks − dense‖ / ‖dense‖, on a sample of queries.
    pub error_of_choice: Option<f64>,
}

#[derive(Serialize)]
struct Link {
    gpus: usize,
    link_bytes: usize,
    us: f64,
    gb_per_s: f64,
}

/// Where results go.
pub struct Report {
    folder: PathBuf,
    file: File,
    gpu: String,
    driver: Option<String>,
    commit: Option<String>,
}

impl Report {
    /// Opens the file of rows; a folder that is not there is made.
    pub fn new(folder: &Path, device: &Device) -> Result<Report, Failure> {
        std::fs::create_dir_all(folder)?;
        let path = folder.join("several_gpus.ndjson");
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        // A bundle has its commit in a file beside the program.
        let beside = std::env::current_exe()?.with_file_name("commit");
        let commit = std::fs::read_to_string(beside).ok().map(|text| text.trim().to_owned());
        Ok(Report {
            folder: folder.to_owned(),
            file,
            gpu: device.cuda_properties().map_or_else(String::new, |gpu| gpu.name.clone()),
            driver: said("nvidia-smi", &["--query-gpu=driver_version", "--format=csv,noheader"]),
            commit: commit.or_else(|| said("git", &["rev-parse", "--short=12", "HEAD"])),
        })
    }

    /// Writes a row of a rate, once for all ranks.
    pub fn link(
        &mut self,
        comm: &dyn Communicator,
        bytes: usize,
        seconds: f64,
    ) -> Result<(), Failure> {
        if comm.rank() == 0 {
            let gpus = comm.world();
            let gb_per_s = bytes as f64 / seconds * 1e-9;
            println!("exchange of {bytes} bytes: {:.1} us, {gb_per_s:.1} GB/s", seconds * 1e6);
            self.line(&Link { gpus, link_bytes: bytes, us: seconds * 1e6, gb_per_s })?;
        }
        Ok(())
    }

    /// Says and writes a row, and draws its timeline.
    pub fn row(&mut self, row: Row, bars: &Bars) -> Result<(), Failure> {
        println!(
            "{} {}, {} all-gathers: {:.2} ms, repeated {:.2} ms ({:.0} TFLOP/s), one GPU {:.2} ms, \
             scaling {:.3}; exposed {:.2} ms; forecast {:.2} ms; error {:.1e}, repeats {}",
            row.case,
            row.scheme,
            row.gathers,
            row.ms,
            row.repeated_ms,
            row.tflops,
            row.one_ms,
            row.scaling,
            row.exposed_ms,
            row.forecast_ms.unwrap_or(f64::NAN),
            row.error,
            if row.repeats { "equal" } else { "DIFFER" }
        );
        self.line(&row)?;
        let title = format!(
            "{}, {}: {} · scaling {:.2} on {} GPUs · {:.2} of {:.2} ms are exposed exchange",
            row.case, row.scheme, self.gpu, row.scaling, row.gpus, row.exposed_ms, row.ms
        );
        let words = row.scheme.replace(", ", " ").replace(' ', "_");
        let path = self.folder.join(format!("timeline.{}.{words}.svg", row.case));
        Ok(std::fs::write(path, timeline(&title, bars))?)
    }

    fn line(&mut self, row: &impl Serialize) -> Result<(), Failure> {
        #[derive(Serialize)]
        struct Line<'a, T> {
            gpu: &'a str,
            driver: Option<&'a str>,
            commit: Option<&'a str>,
            #[serde(flatten)]
            row: &'a T,
        }
        let Report { gpu, driver, commit, .. } = self;
        let line = Line { gpu, driver: driver.as_deref(), commit: commit.as_deref(), row };
        Ok(writeln!(self.file, "{}", serde_json::to_string(&line)?)?)
    }
}

/// The first line that a program prints.
fn said(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.lines().next().map(|line| line.trim().to_owned()))?
}

/// Two lanes for each GPU, attention above exchanges, over milliseconds.
fn timeline(title: &str, bars: &Bars) -> String {
    let [left, full, lane] = [150.0, 1000.0, 22.0];
    let end = bars.iter().flatten().map(|(_, [_, end])| *end).fold(1e-3, f64::max);
    let height = 60.0 + 2.0 * lane * bars.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1200\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" \
         fill=\"white\"/>\n<text x=\"8\" y=\"20\">{title}</text>\n"
    );
    for (rank, bars) in bars.iter().enumerate() {
        let kinds =
            [(Kind::Attention, "attention", "#2a6fb0"), (Kind::Exchange, "exchange", "#d9822b")];
        for (at, (kind, name, color)) in kinds.into_iter().enumerate() {
            let top = 30.0 + lane * (2 * rank + at) as f64;
            svg += &format!("<text x=\"8\" y=\"{}\">GPU {rank}, {name}</text>\n", top + 15.0);
            for (_, [start, stop]) in bars.iter().filter(|(found, _)| *found == kind) {
                let [x, width] = [left + start / end * full, (stop - start) / end * full];
                svg += &format!(
                    "<rect x=\"{x:.2}\" y=\"{top}\" width=\"{width:.2}\" height=\"{}\" \
                     fill=\"{color}\"><title>{start:.3} to {stop:.3} ms</title></rect>\n",
                    lane - 4.0
                );
            }
        }
    }
    svg + &format!("<text x=\"{left}\" y=\"{}\">0 to {end:.2} ms</text>\n</svg>\n", height - 8.0)
}
