//! `cargo xtask ci`: everything that continuous integration checks.
//!
//! Each step is a command of its own. Two run at a time, because linkers and tests that wait leave
//! a core idle; what a step prints is shown when it has ended.

use crate::{
    kernels,
    test::Summary,
    workspace::{cargo, root, target_dir},
};
use anyhow::{Context, Result, bail};
use blockflash_sys::Target;
use clap::builder::PossibleValuesParser;
use std::{
    fs::File,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

/// Run everything that continuous integration checks, or some of it.
#[derive(clap::Args)]
pub struct Args {
    /// Rebuild, compare and disassemble only the images for this target; may be repeated [default:
    /// rebuild a sixth of the images, disassemble all].
    #[arg(long, value_name = "TARGET", value_parser = kernels::parse_target)]
    arch: Vec<Target>,
    /// Run only these steps.
    #[arg(long, value_name = "STEP", num_args = 1.., value_parser = names())]
    only: Vec<String>,
}

/// The name of a step, and its command line: of cargo, or of this program.
type Step = (&'static str, &'static str);

/// These compile in the build directory of the workspace, where cargo runs one command at a time.
const BUILDS: [Step; 5] = [
    ("clippy", "cargo clippy --locked --workspace --all-targets -- --deny warnings"),
    ("documentation", "cargo doc --locked --workspace --no-deps"),
    ("candle", "candle"),
    ("bindgen", "bindgen --check"),
    ("tests", "test"),
];

/// These run beside them. `python`, whose wheel needs the same directory, comes last.
const OTHERS: [Step; 9] = [
    ("format", "fmt --check"),
    ("tidy", "tidy"),
    ("dependencies", "deny"),
    ("packages", "package"),
    ("guide", "docs"),
    ("sass", "sass --check"),
    ("kernels", "kernels --check"),
    // One element type: the other one differs in conversions alone.
    ("emulate", "emulate --check --only bf16"),
    ("python", "python"),
];

fn names() -> PossibleValuesParser {
    BUILDS.into_iter().chain(OTHERS).map(|(name, _)| name).into()
}

/// Runs every step even when another one failed; the count of the tests comes last.
pub fn run(args: &Args) -> Result<()> {
    // A copy, since steps may build this program anew.
    let program = target_dir("ci")?.join("xtask");
    std::fs::copy(std::env::current_exe()?, &program).context("cannot copy this program")?;
    let selected =
        |step: &&Step| args.only.is_empty() || args.only.iter().any(|name| name == step.0);
    let row = |steps: &[Step]| {
        let done = steps.iter().filter(selected).map(|step| Outcome::of(step, args, &program));
        done.collect::<Result<Vec<_>>>()
    };
    let (builds, others) = thread::scope(|scope| {
        let builds = scope.spawn(|| row(&BUILDS));
        let others = row(&OTHERS);
        (builds.join().expect("a step does not panic"), others)
    });
    let outcomes = [builds?, others?].concat();
    println!();
    let mut summary = Summary::default();
    for outcome in &outcomes {
        let verdict = if outcome.succeeded { "ok" } else { "failed" };
        println!("{:<14} {:>5.0} s  {verdict}", outcome.name, outcome.time.as_secs_f64());
        summary.add(outcome.summary);
    }
    // The count stands last in either case.
    let failed: Vec<&str> =
        outcomes.iter().filter(|outcome| !outcome.succeeded).map(|outcome| outcome.name).collect();
    if !failed.is_empty() {
        bail!(
            "{} of {} steps failed: {}\n{summary}",
            failed.len(),
            outcomes.len(),
            failed.join(", ")
        );
    }
    println!("{summary}");
    Ok(())
}

/// What became of a step.
#[derive(Clone)]
struct Outcome {
    name: &'static str,
    time: Duration,
    succeeded: bool,
    /// The tests that it has counted, if it counts any.
    summary: Summary,
}

impl Outcome {
    /// Runs a step, then shows what it has printed.
    fn of(&(name, line): &Step, args: &Args, program: &Path) -> Result<Self> {
        let mut command = match line.strip_prefix("cargo ") {
            Some(arguments) => {
                let mut cargo = cargo();
                cargo.args(arguments.split(' ')).env("RUSTDOCFLAGS", "--deny warnings");
                cargo
            }
            None => {
                let mut xtask = Command::new(program);
                xtask.current_dir(root()).args(line.split(' '));
                xtask
            }
        };
        if ["kernels", "sass"].contains(&name) {
            command.args(args.arch.iter().flat_map(|target| ["--arch", target.name()]));
        }
        if name == "kernels" && args.arch.is_empty() {
            command.arg("--sample");
        }
        let path = target_dir("ci")?.join(format!("{name}.log"));
        let log =
            File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        let started = Instant::now();
        let status = command.stdout(log.try_clone()?).stderr(log).status();
        let succeeded = status.with_context(|| format!("cannot start {name}"))?.success();
        let (time, output) = (started.elapsed(), std::fs::read(&path)?);
        let output = String::from_utf8_lossy(&output);
        print!("\n=== {name}, {:.0} s\n{output}", time.as_secs_f64());
        let summary = output.lines().next_back().and_then(Summary::of_line).unwrap_or_default();
        Ok(Self { name, time, succeeded, summary })
    }
}
