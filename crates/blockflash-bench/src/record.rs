//! Records: one JSON line per measured implementation of a case. `benches/README.md` documents the
//! fields.

use crate::error::{Error, Result};
use crate::io::room;
use crate::turns::Turns;
use blockflash_ops::tuning::Measured;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Version of the record format.
pub const SCHEMA: u32 = 1;

/// Our own name in [`Record::implementation`].
pub const OURS: &str = "blockflash";

/// One line.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Name of the suite.
    pub suite: String,
    /// Name of the operation, such as `attention_fwd`; `ceiling` for what the machine can do.
    pub op: String,
    /// The shape as one readable id.
    pub case: String,
    /// Name of the implementation: `blockflash` or the name of a rival.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// Launch parameters or versions of a rival.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<String>,
    /// Whether this is a mark and not a rival: it computes something else, such as a dense product.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reference: bool,
    /// Whether a rival gives the same bits at each launch although others of the operation do not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deterministic: bool,
    /// Name of our kernel; `None` on a CPU and for rivals.
    pub symbol: Option<String>,
    /// Microseconds of a launch: the median over the rounds of the median within a window.
    pub us: Option<f64>,
    /// Smallest median of a round.
    pub us_min: Option<f64>,
    /// Largest median of a round.
    pub us_max: Option<f64>,
    /// `flops / us`; `None` for work without floating-point operations.
    pub tflops: Option<f64>,
    /// Energy of a launch of everything on the GPU, where it was measured: mean power within the
    /// windows times `us`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joules: Option<f64>,
    /// Useful floating-point operations of a launch.
    pub flops: f64,
    /// Fewest bytes of device memory that a launch moves: every input once, every output once.
    #[serde(default)]
    pub bytes: f64,
    /// Bytes of operands that multiprocessors fetch from L2; see
    /// [`Case::work`](crate::case::Case::work).
    #[serde(default)]
    pub l2_bytes: f64,
    /// Exponentials of a launch.
    #[serde(default)]
    pub exps: f64,
    /// Unit that limits a launch: `matmul`, `exp`, `l2` or `hbm`. Missing where no ceilings were
    /// measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceiling: Option<String>,
    /// Microseconds of a launch at that limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceiling_us: Option<f64>,
    /// `ceiling_us / us`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceiling_fraction: Option<f64>,
    /// For a ceiling (`op` is `ceiling`): units per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// For a ceiling: `FLOP/s`, `B/s` or `exp/s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// Host time of one of our calls, from validation to launch, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_us: Option<f64>,
    /// Host time of a call with a prepared plan, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_prepared_us: Option<f64>,
    /// The part of a prepared call (of any, where there are none such) that the driver takes for
    /// its launches, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_driver_us: Option<f64>,
    /// Host time of launching a graph that holds one call, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_graph_us: Option<f64>,
    /// Microseconds that loading the kernel took, if this case was the first to use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_us: Option<f64>,
    /// Whether the output was compared with a reference and found right. A wrong or unchecked
    /// result has no time.
    pub verified: bool,
    /// ‖out − reference‖ / ‖reference‖ on the elements that were compared.
    pub rel_err: Option<f64>,
    /// Reason why there is no time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Id of the run, equal for everything that was measured interleaved.
    pub run: String,
    /// Windows of this implementation.
    pub rounds: usize,
    /// Length of a window in milliseconds.
    pub window_ms: f64,
    /// Idle time before each window in milliseconds.
    pub gap_ms: f64,
    /// The order of turns; missing in old records, whose rounds all had the same order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<Protocol>,
    /// Launches in one CUDA graph.
    pub launches: Option<usize>,
    /// Commit of the build.
    pub commit: String,
    /// A later commit that launches identical images for this case, as `kernels.lock` shows: the
    /// record completes the records of that commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub same_as: Option<String>,
    /// Name of the GPU, or `cpu: ` and the name of the processor.
    pub gpu: String,
    /// Version of the NVIDIA driver.
    pub driver: Option<String>,
    /// SM clock during the windows (median).
    pub clock_mhz: Option<f64>,
    /// Power during the windows (median).
    pub power_w: Option<f64>,
    /// GPU temperature during the windows (highest).
    pub temperature_c: Option<f64>,
    /// `warm`: launches follow each other on the same data, so what fits into the L2 cache stays
    /// there. `cold`: the cache is overwritten before each launch. `rotated`: launches take copies
    /// of what they read in turn.
    pub cache: String,
    /// UTC, RFC 3339.
    pub date: String,
    /// What selection reads, in records of `blockflash tune`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tuning: Option<Measured>,
}

/// How turns were taken, from which the order of each round follows: see [`Turns`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Protocol {
    /// `williams`, `fixed` or `reversed`.
    pub turns: String,
    /// Index of this implementation among the contestants of the case.
    pub contestant: usize,
    /// Number of places in a round; one may be empty.
    pub places: usize,
}

impl Protocol {
    /// The place of one contestant among `contestants`.
    pub fn of(turns: Turns, contestant: usize, contestants: usize) -> Self {
        Self { turns: turns.to_string(), contestant, places: turns.places(contestants) }
    }
}

/// Appends records to a file. When `append` returns, the line has been handed to the disk, so an
/// interrupted run keeps it.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: File,
    /// The number of a torn last line that was removed.
    removed: Option<usize>,
}

impl Writer {
    /// Opens or creates the file and the folders above it. A last line that an interrupted program
    /// left torn is removed: the next record would continue it.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(path: &Path) -> Result<Self> {
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
        }
        let file =
            OpenOptions::new().create(true).append(true).open(path).map_err(Error::io(path))?;
        let mut writer = Self { path: path.to_owned(), file, removed: None };
        writer.repair().map_err(Error::io(path))?;
        Ok(writer)
    }

    /// Lets the file end with a whole line.
    fn repair(&mut self) -> std::io::Result<()> {
        let bytes = std::fs::read(&self.path)?;
        let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        let rest = &bytes[whole..];
        if rest.is_empty() {
            return Ok(());
        }
        if serde_json::from_slice::<Record>(rest).is_ok() {
            return self.file.write_all(b"\n");
        }
        self.removed = Some(1 + bytes.iter().filter(|&&byte| byte == b'\n').count());
        self.file.set_len(whole as u64)
    }

    /// The number of a torn last line that was removed when the file was opened.
    pub fn removed(&self) -> Option<usize> {
        self.removed
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes one line, or nothing.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn append(&mut self, record: &Record) -> Result<()> {
        let mut append = || {
            let mut line = serde_json::to_string(record)?;
            line.push('\n');
            let before = self.file.metadata()?.len();
            room(before.saturating_add(line.len() as u64))?;
            // A part of a line, of a disk that is full, goes again.
            self.file.write_all(line.as_bytes()).inspect_err(|_| {
                let _ = self.file.set_len(before);
            })
        };
        append().map_err(Error::io(&self.path))
    }
}

/// The records of a file.
#[derive(Debug)]
pub struct Contents {
    /// Oldest first.
    pub records: Vec<Record>,
    /// The number of a torn last line, which an interrupted program left; it is no record.
    pub torn: Option<usize>,
}

/// Reads a file of records. Fields that a newer program added are ignored; another schema is an
/// error.
///
/// # Errors
/// [`Error::Io`], [`Error::Record`].
pub fn read(path: &Path) -> Result<Contents> {
    let bytes = std::fs::read(path).map_err(Error::io(path))?;
    let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
    let is_record = |rest: &[u8]| serde_json::from_slice::<Record>(rest).is_ok();
    let torn = !bytes[whole..].trim_ascii().is_empty() && !is_record(&bytes[whole..]);
    let text = if torn { &bytes[..whole] } else { &bytes };
    let text = std::str::from_utf8(text)
        .map_err(|error| Error::io(path)(std::io::Error::other(error.to_string())))?;
    let torn = torn.then(|| 1 + text.lines().count());
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let records: Result<Vec<Record>> = lines
        .map(|(index, line)| {
            let wrong =
                |problem: String| Error::Record { path: path.to_owned(), line: index + 1, problem };
            let record: Record =
                serde_json::from_str(line).map_err(|error| wrong(error.to_string()))?;
            match record.schema {
                SCHEMA => Ok(record),
                other => Err(wrong(format!(
                    "the record has schema {other}, but this program reads schema {SCHEMA}"
                ))),
            }
        })
        .collect();
    Ok(Contents { records: records?, torn })
}

/// The time now as `2026-11-21T08:15:00Z`.
pub fn now() -> String {
    let since =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    timestamp(since.as_secs())
}

/// An id for the run that starts now: time and process id, and a counter for further runs of this
/// process.
pub fn run_id() -> String {
    static BEFORE: AtomicU32 = AtomicU32::new(0);
    let compact: String = now().chars().filter(|c| !matches!(c, '-' | ':')).collect();
    let (process, before) = (std::process::id(), BEFORE.fetch_add(1, Ordering::Relaxed));
    let number = if before > 0 { format!("-{before}") } else { String::new() };
    format!("{compact}-{process:x}{number}")
}

/// Formats seconds since 1970 as a date. The year starts in March, so that the leap day comes last
/// (<https://howardhinnant.github.io/date_algorithms.html>).
fn timestamp(seconds: u64) -> String {
    let days = seconds / 86_400 + 719_468; // since 0000-03-01
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Case;

    #[test]
    fn runs_of_one_second_have_ids_of_their_own() {
        let ids: std::collections::BTreeSet<String> = (0..50).map(|_| run_id()).collect();
        assert_eq!(ids.len(), 50);
    }

    #[test]
    fn dates() {
        assert_eq!(timestamp(0), "1970-01-01T00:00:00Z");
        assert_eq!(timestamp(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(timestamp(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(timestamp(1_795_248_000), "2026-11-21T08:00:00Z");
    }

    #[test]
    fn records_of_the_repository_can_be_read_and_so_can_their_cases() {
        let results =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/results/nvidia-h200");
        let mut records = read(&results.join("attention_fwd.jsonl")).unwrap().records;
        records.retain(|record| record.op != "ceiling");
        assert!(!records.is_empty());
        for Record { case, .. } in &records {
            let read: Case = case.parse().unwrap();
            assert_eq!((read.op(), &read.to_string()), ("attention_fwd", case));
        }
    }

    #[test]
    fn a_file_grows_by_lines_and_reads_back() {
        let folder = std::env::temp_dir().join(format!("blockflash-record-{}", std::process::id()));
        let path = folder.join("gpu").join("suite.jsonl");
        let record =
            Record { schema: SCHEMA, case: "a".into(), us: Some(1.5), ..Record::default() };
        Writer::open(&path).unwrap().append(&record).unwrap();
        Writer::open(&path)
            .unwrap()
            .append(&Record { case: "b".into(), ..record.clone() })
            .unwrap();
        let records = read(&path).unwrap().records;
        assert_eq!((records.len(), &records[0], records[1].case.as_str()), (2, &record, "b"));
        std::fs::write(&path, "{\"schema\": 9}\n").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("line 1"));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_torn_last_line_costs_no_other_record() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("suite.jsonl");
        let record = |case: &str| Record { schema: SCHEMA, case: case.into(), ..Record::default() };
        let append = |case| {
            let mut writer = Writer::open(&path).unwrap();
            writer.append(&record(case)).unwrap();
            writer.removed()
        };
        assert_eq!((append("a"), append("b")), (None, None));
        let whole = std::fs::read(&path).unwrap();
        // The program ended, or the disk was full, in the middle of a line.
        for end in whole.len() / 2 + 1..whole.len() - 1 {
            std::fs::write(&path, &whole[..end]).unwrap();
            let Contents { records, torn } = read(&path).unwrap();
            assert_eq!((records.len(), torn), (1, Some(2)), "{end}");
            assert_eq!(append("c"), Some(2));
            let Contents { records, torn } = read(&path).unwrap();
            assert_eq!(records, [record("a"), record("c")]);
            assert_eq!(torn, None);
        }
        // Only the end of the line is missing.
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert_eq!((read(&path).unwrap().records.len(), append("c")), (2, None));
        assert_eq!(read(&path).unwrap().records.len(), 3);
        // A line in the middle is named.
        std::fs::write(&path, [&whole[..10], b"\n", &whole[..]].concat()).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("line 1"));
    }
}
