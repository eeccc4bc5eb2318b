//! Measuring a suite in several calls, for GPUs that are there for a limited time.

use crate::failure::Result;
use crate::output::print;
use blockflash_bench::case::Case;
use blockflash_bench::record::{OURS, Record, read};
use blockflash_bench::rounds::Run;
use blockflash_bench::timing::Cache;
use std::path::Path;
use std::time::{Duration, Instant};

/// Which cases a call measures.
#[derive(clap::Args)]
pub struct RestArgs {
    /// Measure only cases that the record lacks: without a time of ours, or of a wanted
    /// competitor, of this commit on this GPU
    #[arg(long, conflicts_with_all = ["kernel", "swap_check"])]
    missing: bool,
    /// Begin no case that is likely to end later than this; --missing measures the rest
    #[arg(long, value_name = "N", value_parser = minutes, conflicts_with = "swap_check")]
    minutes: Option<Duration>,
}

/// The cases of a call that are left.
pub struct Rest {
    known: Vec<Record>,
    started: Instant,
    limit: Option<Duration>,
    /// The longest time from the start of a case to its end.
    longest: Duration,
    case_started: Option<Instant>,
    found: usize,
    left: usize,
}

/// Minutes, of which there may be parts.
fn minutes(text: &str) -> std::result::Result<Duration, String> {
    let minutes: f64 = text.parse().map_err(|_| format!("{text:?} is not a number"))?;
    Duration::try_from_secs_f64(minutes * 60.0).map_err(|error| error.to_string())
}

impl RestArgs {
    /// Whether no case may begin any more, with a time that began then.
    pub fn is_over(&self, started: Instant) -> bool {
        self.minutes.is_some_and(|limit| started.elapsed() > limit)
    }

    /// Reads what the file has, if that matters, with a time that began then.
    pub fn of(&self, run: &Run, file: &Path, started: Instant) -> Result<Rest> {
        let mut known = Vec::new();
        if self.missing && file.exists() {
            let machine = &run.machine;
            let here = (&run.suite.name, &machine.commit, &machine.gpu, &machine.driver);
            known = read(file)?.records;
            known.retain(|record| {
                (&record.suite, &record.commit, &record.gpu, &record.driver) == here
            });
        }
        Ok(Rest { started, ..Rest::new(known, self.minutes) })
    }
}

impl Rest {
    fn new(known: Vec<Record>, limit: Option<Duration>) -> Rest {
        let longest = Duration::ZERO;
        let started = Instant::now();
        Rest { known, started, limit, longest, case_started: None, found: 0, left: 0 }
    }

    /// Whether a case is measured now; `wanted` are its competitors.
    pub fn takes(&mut self, case: &Case, cache: Cache, wanted: &[String]) -> bool {
        self.takes_at(Instant::now(), case, cache, wanted)
    }

    fn takes_at(&mut self, now: Instant, case: &Case, cache: Cache, wanted: &[String]) -> bool {
        if let Some(started) = self.case_started.take() {
            self.longest = self.longest.max(now.duration_since(started));
        }
        let has = |name: &str| {
            self.known.iter().any(|record| {
                (record.op.as_str(), record.cache.as_str()) == (case.op(), cache.name())
                    && record.implementation == name
                    && record.case == case.to_string()
                    // A competitor that fails, fails again.
                    && (name != OURS || record.us.is_some())
            })
        };
        if has(OURS) && wanted.iter().all(|name| has(name)) {
            self.found += 1;
            return false;
        }
        let end = now.duration_since(self.started) + self.longest;
        if self.limit.is_some_and(|limit| end > limit) {
            self.left += 1;
            return false;
        }
        self.case_started = Some(now);
        true
    }

    /// Says which cases were left out.
    pub fn announce(&self) -> Result<()> {
        if self.found > 0 {
            print(&format!("cases in the record already: {}", self.found))?;
        }
        if self.left > 0 {
            let cases = if self.left == 1 { "case is" } else { "cases are" };
            print(&format!(
                "{} {cases} left for want of time: --missing measures them",
                self.left
            ))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(case: &str, implementation: &str, us: Option<f64>) -> Record {
        let (op, cache) = ("attention_fwd".to_owned(), "warm".to_owned());
        let (case, implementation) = (case.to_owned(), implementation.to_owned());
        Record { op, case, cache, implementation, us, ..Record::default() }
    }

    #[test]
    fn cases_that_a_record_lacks_are_measured() {
        let [timed, failed, new] =
            [64, 128, 256].map(|s| format!("b1_s{s}_h8_d64_full_bf16").parse::<Case>().unwrap());
        let records = vec![
            record(&timed.to_string(), OURS, Some(1.0)),
            record(&timed.to_string(), "triton_flash", None),
            record(&failed.to_string(), OURS, None),
        ];
        let mut rest = Rest::new(records, None);
        let triton = ["triton_flash".to_owned()];
        assert!(!rest.takes(&timed, Cache::Warm, &triton));
        assert!(rest.takes(&timed, Cache::Cold, &triton));
        assert!(rest.takes(&timed, Cache::Warm, &["cudnn".to_owned()]));
        assert!(rest.takes(&failed, Cache::Warm, &[]) && rest.takes(&new, Cache::Warm, &[]));
        assert_eq!((rest.found, rest.left), (1, 0));
    }

    #[test]
    fn no_case_begins_that_would_end_too_late() {
        let case: Case = "b1_s64_h8_d64_full_bf16".parse().unwrap();
        let mut rest = Rest::new(Vec::new(), Some(minutes("1.5").unwrap()));
        let start = rest.started;
        let takes = [0, 40, 50, 60].map(|seconds| {
            let now = start + Duration::from_secs(seconds);
            rest.takes_at(now, &case, Cache::Warm, &[])
        });
        // The first case took 40 seconds, so that one from second 60 on would last until 100.
        assert_eq!(takes, [true, true, true, false]);
        assert_eq!(rest.left, 1);
        assert!(minutes("x").is_err() && minutes("-1").is_err() && minutes("1e300").is_err());
    }
}
