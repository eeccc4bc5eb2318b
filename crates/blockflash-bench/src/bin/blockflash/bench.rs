//! `blockflash bench`.

use crate::args::DeviceArg;
use crate::drawn_args::DrawnArgs;
use crate::failure::{Failure, Result, bail};
use crate::output::{device_name, print};
use crate::recording::record;
use crate::rest::RestArgs;
use crate::suite_args::{SuiteArgs, words};
use crate::{swap_check, table};
use blockflash_bench::case::Case;
use blockflash_bench::energy::{EnergyMeter, MIN_WINDOW_MS};
use blockflash_bench::machine::{Machine, benches};
use blockflash_bench::ours::Kernels;
use blockflash_bench::peers::{Command, Peers, Selection};
use blockflash_bench::rounds::Run;
use blockflash_bench::suite::{DRAWN, Suite};
use blockflash_bench::timing::Cache;
use blockflash_ops::Device;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

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
  blockflash bench drawn --seed 7 --operation decode,bsr   shapes that are drawn, not chosen
  blockflash bench bsr_floor --kernel b64 --peers none   compares all tile variants for blocks of 64
  blockflash report";

/// Options of `blockflash bench`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Name of a suite (`--list` shows them; one in benches/suites is taken first), a .toml file,
    /// or drawn
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
    #[command(flatten)]
    pub drawn: DrawnArgs,
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
    pub cache: Vec<Cache>,
    /// Measure every kernel whose name contains one of these texts, separated by commas, instead
    /// of the selected kernel
    #[arg(long, alias = "row", value_name = "SYMBOL")]
    pub kernel: Option<String>,
    /// Append the record to this file [default: benches/results/GPU/SUITE.jsonl, of shapes drawn
    /// with a seed drawn_SEED.jsonl, or the same here without a folder benches]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Seconds that a tuned competitor may spend on the search for its parameters in each case
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub tune_seconds: u32,
    /// Seed of random inputs and patterns, and of the shapes of the suite drawn, which needs one
    /// [default: 0]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Show what the competitors' process writes to stderr
    #[arg(long)]
    pub verbose: bool,
    #[command(flatten)]
    pub rest: RestArgs,
    #[command(flatten)]
    pub device: DeviceArg,
}

/// Measures a suite, or those that are drawn. Exit code 1 if one of our results was wrong or
/// missing.
pub fn run(args: Args) -> Result<ExitCode> {
    let started = Instant::now();
    let found = benches().ok();
    // The program has the suites with it, but not the competitors.
    let benches = found.as_deref().unwrap_or(Path::new("benches"));
    if args.list {
        return list(&args, benches);
    }
    let suites = args.suites(benches)?;
    let device = args.device.open()?;
    let mut failed = false;
    for suite in suites {
        if !args.rest.is_over(started) {
            failed |= args.measure(suite, &device, found.as_deref(), started)?;
        } else {
            print(&format!(
                "suite {} is left for want of time: --missing measures it",
                suite.name
            ))?;
        }
    }
    Ok(ExitCode::from(u8::from(failed)))
}

/// The suites with their numbers of cases, or the cases of those that are measured.
fn list(args: &Args, benches: &Path) -> Result<ExitCode> {
    let text = if args.suite.is_some() {
        let suites = args.suites(benches)?;
        let cases = suites.iter().flat_map(|suite| &suite.cases).map(Case::to_string);
        cases.collect::<Vec<_>>().join("\n")
    } else {
        args.drawn.refuse()?;
        let row = |name: String| -> Result<_> {
            let suite = Suite::load(benches, &name)?;
            Ok(vec![name, suite.cases.len().to_string(), suite.description])
        };
        let mut rows: Vec<_> = Suite::names(benches).into_iter().map(row).collect::<Result<_>>()?;
        let drawn = [DRAWN, "any", "Shapes of published models, drawn: needs --seed"];
        rows.push(drawn.map(str::to_owned).to_vec());
        table::grid(&["suite", "cases", "what"], rows).to_string()
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

impl Args {
    /// The suites with what the options change.
    fn suites(&self, benches: &Path) -> Result<Vec<Suite>> {
        let name = self.suite.as_deref().unwrap_or_default();
        let mut suites = if self.is_drawn() {
            self.drawn.suites(self.seed)?
        } else {
            self.drawn.refuse()?;
            vec![Suite::load(benches, name)?]
        };
        self.suite_args.apply(name, &mut suites)?;
        suites.iter_mut().for_each(|suite| self.change(suite));
        Ok(suites)
    }

    fn is_drawn(&self) -> bool {
        self.suite.as_deref() == Some(DRAWN)
    }

    fn change(&self, suite: &mut Suite) {
        suite.energy |= self.energy;
        if suite.energy {
            suite.window_ms = suite.window_ms.max(MIN_WINDOW_MS);
        }
        if !self.cache.is_empty() {
            suite.cache = vec![Cache::Warm, Cache::Cold, Cache::Rotated];
            suite.cache.retain(|cache| self.cache.contains(cache));
        }
    }

    /// Measures a suite; true if one of our results was wrong or missing. `found` is the folder
    /// benches.
    fn measure(
        &self,
        mut suite: Suite,
        device: &Device,
        found: Option<&Path>,
        started: Instant,
    ) -> Result<bool> {
        let benches = found.unwrap_or(Path::new("benches"));
        self.check(&mut suite, device)?;
        let mut machine = Machine::of(device, benches);
        if found.is_none() {
            machine.commit =
                env!("BLOCKFLASH_BUILD_COMMIT").trim_start_matches("commit ").to_owned();
            suite.peers = "none".to_owned();
        }
        let kernels = match &self.kernel {
            Some(names) => Kernels::Named(words(names)),
            None => Kernels::Selected,
        };
        let seed = self.seed.unwrap_or(0);
        let stem = if self.is_drawn() { format!("{DRAWN}_{seed}") } else { suite.name.clone() };
        let file = PathBuf::from(stem + ".jsonl");
        let default = match found {
            Some(benches) => benches.join("results").join(machine.slug()).join(file),
            None => file,
        };
        let out = self.out.as_deref().unwrap_or(&default);

        print(&format!("suite {}: {}", suite.name, suite.description))?;
        let cpu = if device.is_cpu() { " — no GPU is used, this is the CPU backend" } else { "" };
        print(&format!("device {}{cpu}, commit {}", device_name(device), machine.commit))?;
        if found.is_none() && self.peers.is_none() {
            print("there is no folder benches: competitors are not measured")?;
        }
        let mut peers = self.start_peers(&suite, device, benches)?;
        let mut run = Run::new(suite, machine, device.stream()?, seed, kernels)?;
        if self.swap_check {
            return swap_check::run(&run, &mut peers);
        }
        if run.suite.energy {
            run.energy = Some(EnergyMeter::start(run.machine.smi_index.as_deref())?);
        }
        let rest = self.rest.of(&run, out, started)?;
        record(run, rest, peers, out)
    }

    /// Refuses what the device cannot measure.
    fn check(&self, suite: &mut Suite, device: &Device) -> Result<()> {
        if suite.energy && suite.cache.contains(&Cache::Cold) {
            bail!("energy cannot be measured with a cold L2 cache: overwriting it would count");
        }
        if !device.is_cpu() {
            return Ok(());
        }
        if suite.cache.contains(&Cache::Cold) {
            suite.cache.retain(|&cache| cache != Cache::Cold);
            let message = "a cold L2 cache can only be measured on a GPU, and none is used";
            if suite.cache.is_empty() {
                return Err(Failure::new(message));
            }
            print(&format!("{message}: the others are measured"))?;
        }
        if self.kernel.is_some() {
            bail!("--kernel names GPU kernels, but the CPU is measured");
        }
        if suite.cases.is_empty() {
            bail!("the suite {} measures a GPU, and none is used", suite.name);
        }
        Ok(())
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
