//! Rows, and pictures of what the GPUs did when.

use crate::measure::Bars;
use crate::program::Failure;
use crate::watch::Kind;
use blockflash_bench::machine::{self, Machine};
use blockflash_bench::plot::{Lane, Timeline};
use blockflash_dist::Communicator;
use blockflash_ops::Device;
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

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
    machine: Machine,
}

impl Report {
    /// Opens the file of rows; a folder that is not there is made.
    pub fn new(folder: &Path, device: &Device) -> Result<Report, Failure> {
        std::fs::create_dir_all(folder)?;
        let path = folder.join("several_gpus.ndjson");
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let benches = machine::benches().unwrap_or_default();
        Ok(Report { folder: folder.to_owned(), file, machine: Machine::of(device, &benches) })
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
        let mut lanes = Vec::new();
        for (rank, bars) in bars.iter().enumerate() {
            let kinds = [(Kind::Attention, "attention"), (Kind::Exchange, "exchange")];
            for (at, (kind, name)) in kinds.into_iter().enumerate() {
                let bars = bars.iter().filter(|(found, _)| *found == kind);
                lanes.push(Lane {
                    name: format!("GPU {rank}, {name}"),
                    kind: at,
                    kind_name: name.to_owned(),
                    bars: bars.map(|(_, [start, end])| (*start, *end)).collect(),
                });
            }
        }
        let title = format!("{}, {}", row.case, row.scheme);
        let subtitle = format!(
            "{} · scaling {:.2} on {} GPUs · {:.2} of {:.2} ms are exposed exchange",
            self.machine.gpu, row.scaling, row.gpus, row.exposed_ms, row.ms
        );
        let timeline = Timeline { title: &title, subtitle: &subtitle, axis: "ms", lanes: &lanes };
        let words = row.scheme.replace(", ", " ").replace(' ', "_");
        let path = self.folder.join(format!("timeline.{}.{words}.svg", row.case));
        Ok(timeline.draw()?.write(&[&path])?)
    }

    fn line(&mut self, row: &impl Serialize) -> Result<(), Failure> {
        #[derive(Serialize)]
        struct Line<'a, T> {
            gpu: &'a str,
            driver: Option<&'a str>,
            commit: &'a str,
            #[serde(flatten)]
            row: &'a T,
        }
        let Machine { gpu, driver, commit, .. } = &self.machine;
        let line = Line { gpu, driver: driver.as_deref(), commit, row };
        Ok(writeln!(self.file, "{}", serde_json::to_string(&line)?)?)
    }
}
