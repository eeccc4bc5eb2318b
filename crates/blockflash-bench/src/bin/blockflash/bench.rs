//! `blockflash bench`.

use crate::args::DeviceArg;
use crate::failure::{Failure, Result, bail, warn};
use crate::output::{device_name, print};
use crate::pace::{announce, each, failures};
use crate::rest::{Rest, RestArgs};
use crate::suite_args::{SuiteArgs, words};
use crate::{swap_check, table};
use blockflash_bench::case::Case;
use blockflash_bench::energy::{EnergyMeter, MIN_WINDOW_MS};
use blockflash_bench::machine::{Machine, benches};
use blockflash_bench::order::Order;
use blockflash_bench::ours::Kernels;
use blockflash_bench::peers::{Command, Peers, Selection};
use blockflash_bench::record::{Record, Writer};
use blockflash_bench::report;
use blockflash_bench::rounds::Run;
use blockflash_bench::suite::Suite;
use blockflash_bench::timing::Cache;
use blockflash_ops::Device;
use indicatif::ProgressBar;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

const EXAMPLES: &str = "\
Every implementation of a case is verified first. Then the implementations are measured in rounds,
one window of time each, in an order that is counterbalanced over the rounds. Each result is one
JSON line; benches/README.md documents the fields.

Examples:
  blockflash bench --list
  blockflash bench smoke
  blockflash bench attention_floor --peers flash,cudnn --rounds 9
  blockflash bench attention_fwd --swap-check --filter d256_causal
  blockflash bench attention_decode --energy --peers none   joules of a launch, too
  blockflash bench attention_decode --missing --minutes 5   what the record lacks, within 5 minutes
  blockflash bench bsr_floor --kernel b64 --peers none   compares all tile variants for blocks of 64
  blockflash report";

/// Options of `blockflash bench`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Name of a suite (`--list` shows them; one in benches/suites is taken first), or a .toml file
    #[arg(required_unless_present = "list")]
    pub suite: Option<String>,
    /// Measure nothing: list the suites, or the cases of this one
    #[arg(long)]
    pub list: bool,
    /// Competitors to measure: auto, none, or a comma-separated list of parts of their names
    /// [default: as the suite says; none on a CPU]
    #[arg(long, value_name = "LIST")]
    pub peers: Option<String>,
    #[command(flatten)]
    pub suite_args: SuiteArgs,
    /// Record nothing, but report by how much ratios change when the order of a round is reversed
    #[arg(long, conflicts_with = "out")]
    pub swap_check: bool,
    /// Measure the joules of a launch, too, by the GPU's counter of energy, in windows of at least
    /// 500 ms [default: as the suite says]
    #[arg(long, conflicts_with = "swap_check")]
    pub energy: bool,
    /// State of the L2 cache before a launch, one or more with commas between: warm, cold, or
    /// rotated for launches that take copies of a cache of keys and values in turn [default: as
    /// the suite says]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub cache: Vec<CacheArg>,
    /// Measure every kernel whose name contains one of these texts, separated by commas, instead
    /// of the selected kernel
    #[arg(long, alias = "row", value_name = "SYMBOL")]
    pub kernel: Option<String>,
    /// Append the record to this file [default: benches/results/GPU/SUITE.jsonl,
    /// or SUITE.jsonl without a folder benches]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Seconds that a tuned competitor may spend on the search for its parameters in each case
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub tune_seconds: u32,
    /// Seed of random inputs and patterns
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Show what the competitors' process writes to stderr
    #[arg(long)]
    pub verbose: bool,
    #[command(flatten)]
    pub rest: RestArgs,
    #[command(flatten)]
    pub device: DeviceArg,
}

/// States of the L2 cache.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum CacheArg {
    Warm,
    Cold,
    Rotated,
}

impl From<CacheArg> for Cache {
    fn from(cache: CacheArg) -> Self {
        match cache {
            CacheArg::Warm => Cache::Warm,
            CacheArg::Cold => Cache::Cold,
            CacheArg::Rotated => Cache::Rotated,
        }
    }
}

/// Measures a suite. Exit code 1 if one of our results was wrong or missing.
pub fn run(args: Args) -> Result<ExitCode> {
    let found = benches().ok();
    // The program has the suites with it, but not the competitors.
    let benches = found.as_deref().unwrap_or(Path::new("benches"));
    if args.list {
        return list(&args, benches);
    }
    let mut suite = args.suite(benches)?;
    let device = args.device.open()?;
    if suite.energy && suite.cache.contains(&Cache::Cold) {
        bail!("energy cannot be measured with a cold L2 cache: overwriting it would count");
    }
    if device.is_cpu() && suite.cache.contains(&Cache::Cold) {
        suite.cache.retain(|&cache| cache != Cache::Cold);
        let message = "a cold L2 cache can only be measured on a GPU, and none is used";
        if suite.cache.is_empty() {
            return Err(Failure::new(message));
        }
        print(&format!("{message}: the others are measured"))?;
    }
    let mut machine = Machine::of(&device, benches);
    if found.is_none() {
        machine.commit = env!("BLOCKFLASH_BUILD_COMMIT").trim_start_matches("commit ").to_owned();
        suite.peers = "none".to_owned();
    }
    let kernels = match &args.kernel {
        Some(names) => Kernels::Named(words(names)),
        None => Kernels::Selected,
    };
    if device.is_cpu() && args.kernel.is_some() {
        bail!("--kernel names GPU kernels, but the CPU is measured");
    }
    let file = format!("{}.jsonl", suite.name);
    let default = match &found {
        Some(benches) => benches.join("results").join(machine.slug()).join(file),
        None => PathBuf::from(file),
    };
    if suite.cases.is_empty() && device.is_cpu() {
        bail!("the suite {} measures a GPU, and none is used", suite.name);
    }
    let out = args.out.as_deref().unwrap_or(&default);

    print(&format!("suite {}: {}", suite.name, suite.description))?;
    let cpu = if device.is_cpu() { " — no GPU is used, this is the CPU backend" } else { "" };
    print(&format!("device {}{cpu}, commit {}", device_name(&device), machine.commit))?;
    if found.is_none() && args.peers.is_none() {
        print("there is no folder benches: competitors are not measured")?;
    }
    let mut peers = args.start_peers(&suite, &device, benches)?;
    let mut run = Run::new(suite, machine, device.stream()?, args.seed, kernels)?;
    if args.swap_check {
        return swap_check::run(&run, &mut peers);
    }
    if run.suite.energy {
        run.energy = Some(EnergyMeter::start(run.machine.smi_index.as_deref())?);
    }
    let mut rest = args.rest.of(&run, out)?;
    let mut writer = appending(out)?;
    let mut failed = false;
    if !device.is_cpu() {
        let path = if run.suite.cases.is_empty() {
            out.to_owned()
        } else {
            out.with_file_name("ceilings.jsonl")
        };
        failed |= !measure_ceilings(&mut run, &mut appending(&path)?)?;
    }
    if run.suite.cases.is_empty() {
        return Ok(ExitCode::from(u8::from(failed)));
    }
    announce(&run, &peers, &[Order::Balanced])?;
    let records = measure(&run, &mut rest, &mut peers, &mut writer)?;

    let all: Vec<_> = records.iter().collect();
    if !all.is_empty() {
        print(&grid(report::cells(&all)))?;
    }
    if run.suite.energy && !all.is_empty() {
        print(&format!("millijoules of a launch\n{}", grid(report::energy_cells(&all))))?;
    }
    failed |= failures(&records)?;
    rest.announce()?;
    print(&format!("{} records appended to {}", records.len(), writer.path().display()))?;
    Ok(ExitCode::from(u8::from(failed)))
}

/// The suites with their numbers of cases, or the cases of one suite.
fn list(args: &Args, benches: &Path) -> Result<ExitCode> {
    let text = if args.suite.is_some() {
        args.suite(benches)?.cases.iter().map(Case::to_string).collect::<Vec<_>>().join("\n")
    } else {
        let row = |name: String| -> Result<_> {
            let suite = Suite::load(benches, &name)?;
            Ok(vec![name, suite.cases.len().to_string(), suite.description])
        };
        let rows = Suite::names(benches).into_iter().map(row).collect::<Result<_>>()?;
        table::grid(&["suite", "cases", "what"], rows).to_string()
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

impl Args {
    /// The suite with what the options change.
    fn suite(&self, benches: &Path) -> Result<Suite> {
        let mut suite = Suite::load(benches, self.suite.as_deref().unwrap_or_default())?;
        self.suite_args.apply(&mut suite)?;
        suite.energy |= self.energy;
        if suite.energy {
            suite.window_ms = suite.window_ms.max(MIN_WINDOW_MS);
        }
        if !self.cache.is_empty() {
            let wanted =
                |cache: &Cache| self.cache.iter().any(|&other| Cache::from(other) == *cache);
            let all = [Cache::Warm, Cache::Cold, Cache::Rotated];
            suite.cache = all.into_iter().filter(wanted).collect();
        }
        Ok(suite)
    }

    /// Starts the competitors and says which are missing.
    fn start_peers(&self, suite: &Suite, device: &Device, benches: &Path) -> Result<Peers> {
        // Competitors are GPU programs; on a CPU they run only when they are asked for.
        let default = if device.is_cpu() { "none" } else { &suite.peers };
        let selection = Selection::parse(self.peers.as_deref().unwrap_or(default));
        let script = benches.join("peers").join("serve.py");
        if selection != Selection::None && !script.is_file() {
            bail!("{} is missing; measure without competitors by --peers none", script.display());
        }
        let arguments = vec![script.into(), "--device".into(), device.to_string().into()];
        let command = Command { program: "python3".into(), arguments, verbose: self.verbose };
        let peers = Peers::start(command, selection, self.tune_seconds.into());
        if let Some(name) = peers.unknown().first() {
            bail!("--peers: there is no competitor whose name contains {name:?}");
        }
        if let Some(versions) = peers.versions() {
            print(&format!("competitors: {versions}"))?;
        }
        for (names, reason) in peers.absent() {
            print(&format!("absent competitors: {} ({reason})", names.join(", ")))?;
        }
        Ok(peers)
    }
}

/// Opens a record for further lines.
pub fn appending(path: &Path) -> Result<Writer> {
    let writer = Writer::open(path)?;
    if let Some(line) = writer.removed() {
        let path = path.display();
        warn(format!("{path}, line {line}: the last line was torn, and is removed"));
    }
    Ok(writer)
}

/// What the GPU does at best, into a file of its own beside the suite's. False if a probe computed
/// something wrong.
fn measure_ceilings(run: &mut Run, writer: &mut Writer) -> Result<bool> {
    let bar = ProgressBar::new_spinner();
    bar.enable_steady_tick(Duration::from_millis(200));
    let records = run.measure_ceilings(|step| bar.set_message(step.to_owned()))?;
    bar.finish_and_clear();
    let rates = records.iter().map(|record| match (record.rate, record.unit.as_deref()) {
        (Some(rate), Some(unit)) => {
            format!("{} {} T{unit}", record.case, table::number(rate * 1e-12))
        }
        _ => format!("{} {}", record.case, record.error.as_deref().unwrap_or("not measured")),
    });
    print(&format!("ceilings: {}", rates.collect::<Vec<_>>().join(", ")))?;
    records.iter().try_for_each(|record| writer.append(record))?;
    Ok(records.iter().all(|record| record.error.is_none()))
}

/// All cases; each result is on the disk before the next case begins.
fn measure(
    run: &Run,
    rest: &mut Rest,
    peers: &mut Peers,
    writer: &mut Writer,
) -> Result<Vec<Record>> {
    let mut all = Vec::new();
    each(run, |case, cache, bar| {
        if !rest.takes(case, cache, &run.competitors(case, peers)) {
            return Ok(());
        }
        let step = |step: &str| bar.set_message(format!("{case}, {step}"));
        let records = run.measure(case, cache, peers, step);
        bar.suspend(|| print(&line(&records)))?;
        for record in records {
            writer.append(&record)?;
            all.push(record);
        }
        Ok(())
    })?;
    Ok(all)
}

/// One case as it is measured, for a log without a terminal.
fn line(records: &[Record]) -> String {
    let speed = |record: &Record| match (record.us, report::rate(record)) {
        (Some(us), Some(rate)) => {
            format!("{} {} {}", table::time(us), table::number(rate), report::unit([record]))
        }
        (Some(us), None) => table::time(us),
        _ => "error".to_owned(),
    };
    let results =
        records.iter().map(|record| format!("{} {}", record.implementation, speed(record)));
    let case = records.first().map_or("", |record| record.case.as_str());
    format!("{case}: {}", results.collect::<Vec<_>>().join(", "))
}

fn grid(cells: report::Cells) -> String {
    let header: Vec<_> = cells.header.iter().map(String::as_str).collect();
    table::grid(&header, cells.rows).to_string()
}
