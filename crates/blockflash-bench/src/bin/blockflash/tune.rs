//! `blockflash tune`.

use crate::args::DeviceArg;
use crate::bench::appending;
use crate::failure::{Failure, Result};
use crate::output::{device_name, print};
use crate::pace::{each, failures};
use crate::suite_args::SuiteArgs;
use crate::table::{grid, number, time};
use blockflash_bench::case::Case;
use blockflash_bench::machine::{Machine, benches};
use blockflash_bench::ours::Kernels;
use blockflash_bench::peers::Peers;
use blockflash_bench::record::{Record, Writer};
use blockflash_bench::rounds::Run;
use blockflash_bench::suite::Suite;
use blockflash_bench::timing::Cache;
use blockflash_bench::verdict::{Verdict, mean_loss};
use blockflash_safe::cuda_status;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Every kernel that can compute a case is verified, then all of them are measured in rounds, as
`blockflash bench` measures. A table says where the selected kernel is not the fastest. Each result
is one JSON line, which selection reads after `--tuning FILE` or `blockflash_ops::tuning::load`.
benches/README.md says how to send a record.

Examples:
  blockflash tune                                          the suite tune
  blockflash tune attention_fwd --filter d128_causal
  blockflash tune --case b1_s2048_h8_d64_causal_bf16 --case m4096_n512_k4096_b64_d0.1_uniform_f16
  blockflash bench attention_fwd --tuning benches/tuned/nvidia-l4.jsonl --peers none";

/// Options of `blockflash tune`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Name of a suite (`blockflash bench --list`), or a .toml file
    #[arg(default_value = "tune")]
    pub suite: String,
    /// Measure this case instead of a suite, by its id in the records; may be repeated
    #[arg(long = "case", value_name = "ID", conflicts_with_all = ["suite", "filter"])]
    pub cases: Vec<Case>,
    #[command(flatten)]
    pub suite_args: SuiteArgs,
    /// Append the record to this file [default: benches/tuned/GPU.jsonl, or GPU.jsonl
    /// without a folder benches]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Seed of random inputs and patterns
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    #[command(flatten)]
    pub device: DeviceArg,
}

/// Measures all kernels of all cases. Exit code 1 if one of them was wrong or failed.
pub fn run(args: Args) -> Result<ExitCode> {
    let device = args.device.open()?;
    if device.is_cpu() {
        return Err(no_gpu(&args.device));
    }
    let found = benches().ok();
    let benches = found.as_deref().unwrap_or(Path::new("benches"));
    let suite = args.suite(benches)?;
    let machine = Machine::of(&device, benches);
    let file = format!("{}.jsonl", machine.slug());
    let default =
        found.as_ref().map_or_else(|| file.clone().into(), |found| found.join("tuned").join(&file));
    let mut writer = appending(args.out.as_deref().unwrap_or(&default))?;
    print(&format!("device {}, commit {}", device_name(&device), machine.commit))?;
    let run = Run::new(suite, machine, device.stream()?, args.seed, Kernels::All)?;
    let (records, verdicts) = measure(&run, &mut writer)?;

    print(&table(&verdicts))?;
    let failed = failures(&records)?;
    print(&summary(&verdicts, writer.path()))?;
    Ok(ExitCode::from(u8::from(failed)))
}

/// Why there is nothing to measure.
fn no_gpu(device: &DeviceArg) -> Failure {
    let reason = match (&device.device, cuda_status()) {
        (Some(name), _) => format!("--device says {name}"),
        (None, Err(reason)) => reason.to_string(),
        (None, Ok(_)) => "none has compute capability 8.0 or newer".to_owned(),
    };
    Failure::new(format!("tune measures the kernels of a GPU, and none is used: {reason}"))
}

impl Args {
    /// The cases of which selection reads records.
    fn suite(&self, benches: &Path) -> Result<Suite> {
        let mut suite = match &self.cases[..] {
            [] => Suite::load(benches, &self.suite)?,
            cases => Suite::of(cases.to_vec()),
        };
        self.suite_args.apply(&mut suite)?;
        suite.cache = vec![Cache::Warm];
        let all = suite.cases.len();
        suite.cases.retain(Case::is_tunable);
        let left_out = all - suite.cases.len();
        if left_out > 0 {
            let what = "attention forward of equal lengths and BSR matmul";
            let message = format!("{left_out} cases left out: selection reads records of {what}");
            if suite.cases.is_empty() {
                return Err(Failure::new(message));
            }
            print(&message)?;
        }
        Ok(suite)
    }
}

/// All cases; the results of each are on the disk before the next one begins.
fn measure(run: &Run, writer: &mut Writer) -> Result<(Vec<Record>, Vec<Verdict>)> {
    let mut nobody = Peers::none();
    let (mut all, mut verdicts) = (Vec::new(), Vec::new());
    each(run, |case, cache, bar| {
        let step = |step: &str| bar.set_message(format!("{case}, {step}"));
        let records = run.measure(case, cache, &mut nobody, step);
        records.iter().try_for_each(|record| writer.append(record))?;
        let verdict = Verdict::of(&records);
        bar.suspend(|| print(&verdict.as_ref().map_or(format!("{case}: error"), line)))?;
        verdicts.extend(verdict);
        all.extend(records);
        Ok(())
    })?;
    Ok((all, verdicts))
}

/// One case as it is measured, for a log without a terminal.
fn line(verdict: &Verdict) -> String {
    let Verdict { case, kernels, fastest, .. } = verdict;
    let loss = verdict.loss().map_or("error".to_owned(), percent);
    format!(
        "{case}: {kernels} kernels, fastest {} {}, loss {loss}",
        fastest.kernel,
        time(fastest.us)
    )
}

fn table(verdicts: &[Verdict]) -> String {
    let cells = verdicts.iter().map(|verdict| {
        let Verdict { case, kernels, selected, fastest } = verdict;
        let (kernel, us) = match selected {
            Some(selected) => (selected.kernel.clone(), time(selected.us)),
            None => ("error".to_owned(), String::new()),
        };
        let other = match selected {
            Some(selected) if selected == fastest => "the same".to_owned(),
            _ => fastest.kernel.clone(),
        };
        let loss = verdict.loss().map_or(String::new(), percent);
        vec![case.clone(), kernels.to_string(), kernel, us, other, time(fastest.us), loss]
    });
    let header = ["case", "kernels", "selected", "time", "fastest", "time", "loss"];
    grid(&header, cells.collect()).to_string()
}

fn summary(verdicts: &[Verdict], path: &Path) -> String {
    // Selection, too, takes less for a difference between repeats.
    let is_right = |verdict: &&Verdict| verdict.loss().is_some_and(|loss| loss < 1.02);
    let right = verdicts.iter().filter(is_right).count();
    let mean = mean_loss(verdicts)
        .map_or(String::new(), |loss| format!(", loss {} in the geometric mean", percent(loss)));
    let path = path.display();
    format!(
        "the selected kernel is within 2 % of the fastest in {right} of {} cases{mean}\n\
         appended to {path}: selection reads it by --tuning {path}",
        verdicts.len()
    )
}

fn percent(loss: f64) -> String {
    format!("{} %", number(100.0 * (loss - 1.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockflash_bench::verdict::Timed;

    #[test]
    fn tables_say_what_is_lost() {
        let timed = |kernel: &str, us| Timed { kernel: kernel.into(), us };
        let of = |selected, fastest| Verdict { case: "a".into(), kernels: 2, selected, fastest };
        let verdicts = [
            of(Some(timed("wide", 150.0)), timed("narrow", 100.0)),
            of(Some(timed("wide", 100.0)), timed("wide", 100.0)),
            of(None, timed("narrow", 2000.0)),
        ];
        let text = table(&verdicts);
        for words in ["wide", "narrow", "50.0 %", "the same", "2.00 ms", "error"] {
            assert!(text.contains(words), "{words}: {text}");
        }
        let text = summary(&verdicts, Path::new("x.jsonl"));
        assert!(text.contains("in 1 of 3 cases, loss 22.5 %"), "{text}");
        assert!(text.contains("--tuning x.jsonl"), "{text}");
        assert_eq!(line(&verdicts[0]), "a: 2 kernels, fastest narrow 100 µs, loss 50.0 %");
        assert!(!summary(&[], Path::new("x")).contains("geometric"));
    }
}
