//! Records: one JSON line per measured implementation of a case. `benches/README.md` documents the
//! fields.

use crate::error::{Error, Result};
use crate::io::room;
use crate::order::Order;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::SystemTime;

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
    /// Name of the implementation: `blockflash` or the name of a competitor.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// Launch parameters or versions of a competitor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub settings: Option<String>,
    /// Whether this is a reference and no competitor: it computes something else, such as a dense
    /// product.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reference: bool,
    /// Whether a competitor gives the same bits at each launch although others of the operation do
    /// not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deterministic: bool,
    /// Name of our kernel; `None` on a CPU and for competitors.
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub joules: Option<f64>,
    /// Useful floating-point operations of a launch.
    pub flops: f64,
    /// Fewest bytes of device memory that a launch moves: every input once, every output once.
    #[serde(default)]
    pub bytes: f64,
    /// Bytes of operands that multiprocessors fetch from L2; see
    /// [`Shape::work`](crate::case::Shape::work).
    #[serde(default)]
    pub l2_bytes: f64,
    /// Exponentials of a launch.
    #[serde(default)]
    pub exps: f64,
    /// Unit that limits a launch: `matmul`, `exp`, `l2` or `hbm`. Missing where no ceilings were
    /// measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ceiling: Option<String>,
    /// Microseconds of a launch at that limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ceiling_us: Option<f64>,
    /// `ceiling_us / us`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ceiling_fraction: Option<f64>,
    /// For a ceiling (`op` is `ceiling`): units per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// For a ceiling: `FLOP/s`, `B/s` or `exp/s`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// Host time of one of our calls, from validation to launch, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_us: Option<f64>,
    /// Host time of a call with a prepared plan, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_prepared_us: Option<f64>,
    /// The part of a prepared call (of any, where there are none such) that the driver takes for
    /// its launches, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_driver_us: Option<f64>,
    /// Host time of launching a graph that holds one call, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_graph_us: Option<f64>,
    /// Microseconds that loading the kernel took, if this case was the first to use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load_us: Option<f64>,
    /// Whether the output was compared with a reference and found right. A wrong or unchecked
    /// result has no time.
    pub verified: bool,
    /// ‖out − reference‖ / ‖reference‖ on the elements that were compared.
    pub rel_err: Option<f64>,
    /// Reason why there is no time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Id of the run, equal for everything that was measured interleaved.
    pub run: String,
    /// Windows of this implementation.
    pub rounds: usize,
    /// Length of a window in milliseconds.
    pub window_ms: f64,
    /// Idle time before each window in milliseconds.
    pub gap_ms: f64,
    /// The order of rounds; missing in old records, whose rounds all had the same order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<Protocol>,
    /// Launches in one CUDA graph.
    pub launches: Option<usize>,
    /// Commit of the build.
    pub commit: String,
    /// A later commit that launches identical images for this case, as `kernels.lock` shows: the
    /// record completes the records of that commit.
    #[serde(skip_serializing_if = "Option::is_none")]
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
    /// there. `cold`: the cache is overwritten before each launch. `rotated`: launches read one of
    /// several copies, round robin.
    pub cache: String,
    /// UTC, RFC 3339.
    pub date: String,
}

/// The order of each round follows from this: see [`Order`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Protocol {
    /// Name of the [`Order`].
    #[serde(rename = "turns")]
    pub order: String,
    /// Index of this implementation among the contestants of the case.
    pub contestant: usize,
    /// Number of places in a round; one may be empty.
    pub places: usize,
}

impl Protocol {
    /// The place of one contestant among `contestants`.
    pub fn of(order: Order, contestant: usize, contestants: usize) -> Self {
        let places = order.places(contestants);
        Self { order: order.name().to_owned(), contestant, places }
    }
}

/// Appends records to a file. When `append` returns, the line has been handed to the disk, so an
/// interrupted run keeps it.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: File,
    removed: Option<usize>,
}

impl Writer {
    /// Opens or creates the file and the folders above it. A last line that an interrupted program
    /// left torn is removed: the next record would continue it.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(path: &Path) -> Result<Self> {
        let open = || {
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder)?;
            }
            let mut file = OpenOptions::new().create(true).append(true).open(path)?;
            let lines = Lines::of(&std::fs::read(path)?);
            match lines.torn {
                Some(_) => file.set_len(lines.ended as u64)?,
                // Only the end of the last line is missing.
                None if lines.ended < lines.read => file.write_all(b"\n")?,
                None => {}
            }
            Ok(Self { path: path.to_owned(), file, removed: lines.torn })
        };
        open().map_err(Error::io(path))
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
            let line = serde_json::to_string(record)? + "\n";
            let before = self.file.metadata()?.len();
            room(before.saturating_add(line.len() as u64))?;
            // A part of a line is removed if the disk is full.
            self.file.write_all(line.as_bytes()).inspect_err(|_| {
                let _ = self.file.set_len(before);
            })
        };
        append().map_err(Error::io(&self.path))
    }
}

/// The end of a file of records.
struct Lines {
    /// Bytes up to the end of the last line that has one.
    ended: usize,
    /// Bytes that are read: more, if the last line is a record without an end of line.
    read: usize,
    /// The number of a torn last line.
    torn: Option<usize>,
}

impl Lines {
    fn of(bytes: &[u8]) -> Self {
        let ended = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        let rest = &bytes[ended..];
        if rest.trim_ascii().is_empty() || serde_json::from_slice::<Record>(rest).is_ok() {
            return Self { ended, read: bytes.len(), torn: None };
        }
        let before = bytes[..ended].iter().filter(|&&byte| byte == b'\n').count();
        Self { ended, read: ended, torn: Some(1 + before) }
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
    let Lines { read, torn, .. } = Lines::of(&bytes);
    let text = std::str::from_utf8(&bytes[..read])
        .map_err(|error| Error::io(path)(std::io::Error::other(error)))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let record = |(index, line)| {
        let read = serde_json::from_str::<Record>(line).map_err(|error| error.to_string());
        let read = read.and_then(|record| match record.schema {
            SCHEMA => Ok(record),
            other => Err(format!(
                "the record has schema {other}, but this program reads schema {SCHEMA}"
            )),
        });
        let path = path.to_owned();
        read.map_err(|problem| Error::Record { path, line: index + 1, problem })
    };
    Ok(Contents { records: lines.map(record).collect::<Result<_>>()?, torn })
}

/// The time now as `2026-11-21T08:15:00Z`.
pub fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

/// An id for the run that starts now: time and process id, and a counter for further runs of this
/// process.
pub fn run_id() -> String {
    static BEFORE: AtomicU32 = AtomicU32::new(0);
    let (now, process) = (now().replace(['-', ':'], ""), std::process::id());
    match BEFORE.fetch_add(1, Ordering::Relaxed) {
        0 => format!("{now}-{process:x}"),
        before => format!("{now}-{process:x}-{before}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Case;

    #[test]
    fn runs_of_one_second_have_ids_of_their_own() {
        let ids = std::collections::BTreeSet::from_iter((0..50).map(|_| run_id()));
        assert_eq!(ids.len(), 50);
        assert_eq!((now().len(), &now()[10..11], &now()[19..]), (20, "T", "Z"));
    }

    /// Every committed record can be read, and its case says the same again.
    #[test]
    fn records_of_the_repository_can_be_read_and_so_can_their_cases() {
        let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/results");
        let folders = std::fs::read_dir(&results).unwrap().map(|entry| entry.unwrap().path());
        let files = folders.filter(|path| path.is_dir()).flat_map(|path| path.read_dir().unwrap());
        let (mut cases, mut ops) = (0, std::collections::BTreeSet::new());
        for path in files.map(|entry| entry.unwrap().path()) {
            if path.extension().is_none_or(|extension| extension != "jsonl") {
                continue;
            }
            for Record { op, case, .. } in read(&path).unwrap().records {
                if op != "ceiling" {
                    let read: Case = case.parse().unwrap();
                    assert_eq!((read.op(), &read.to_string()), (op.as_str(), &case));
                    (cases, _) = (cases + 1, ops.insert(op));
                }
            }
        }
        assert!(cases > 1000 && ops.len() >= 6, "{cases} records of {ops:?}");
    }

    #[test]
    fn a_file_grows_by_lines_and_a_torn_last_line_costs_no_other_record() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gpu/suite.jsonl");
        let record = |case: &str| Record {
            schema: SCHEMA,
            case: case.into(),
            us: Some(1.5),
            ..Record::default()
        };
        let append = |case| {
            let mut writer = Writer::open(&path).unwrap();
            writer.append(&record(case)).unwrap();
            writer.removed()
        };
        assert_eq!((append("a"), append("b")), (None, None));
        assert_eq!(read(&path).unwrap().records, [record("a"), record("b")]);
        let whole = std::fs::read(&path).unwrap();
        // The program ended, or the disk was full, in the middle of a line.
        for end in whole.len() / 2 + 1..whole.len() - 1 {
            std::fs::write(&path, &whole[..end]).unwrap();
            let Contents { records, torn } = read(&path).unwrap();
            assert_eq!((records.len(), torn), (1, Some(2)), "{end}");
            assert_eq!(append("c"), Some(2));
            let Contents { records, torn } = read(&path).unwrap();
            assert_eq!((&records[..], torn), (&[record("a"), record("c")][..], None));
        }
        // Only the end of the line is missing.
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert_eq!((read(&path).unwrap().records.len(), append("c")), (2, None));
        assert_eq!(read(&path).unwrap().records.len(), 3);
        // A line in the middle is named.
        for line in [&whole[..10], b"{\"schema\": 9}"] {
            std::fs::write(&path, [line, b"\n", &whole[..]].concat()).unwrap();
            assert!(read(&path).unwrap_err().to_string().contains("line 1"));
        }
    }
}
