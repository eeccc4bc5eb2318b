//! Options of commands that measure a suite.

use crate::failure::{Result, bail};
use blockflash_bench::suite::Suite;

/// Which cases are measured, and for how long.
#[derive(clap::Args)]
pub struct SuiteArgs {
    /// Smallest number of windows of each implementation; balancing the order may add a few
    /// [default: as the suite says]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub rounds: Option<u16>,
    /// Length of a window in milliseconds [default: as the suite says]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub window_ms: Option<u32>,
    /// Idle time before each window in milliseconds [default: as the suite says]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=60_000))]
    pub gap_ms: Option<u32>,
    /// Measure only cases whose id contains one of these texts, separated by commas
    #[arg(long, value_name = "TEXT")]
    pub filter: Option<String>,
}

impl SuiteArgs {
    /// Changes what the options say in the suites of this name. Suites of which no case is left are
    /// left out, but not all of them.
    pub fn apply(&self, name: &str, suites: &mut Vec<Suite>) -> Result<()> {
        for suite in suites.iter_mut() {
            suite.rounds = self.rounds.map_or(suite.rounds, usize::from);
            suite.window_ms = self.window_ms.map_or(suite.window_ms, f64::from);
            suite.gap_ms = self.gap_ms.map_or(suite.gap_ms, f64::from);
        }
        let Some(filter) = &self.filter else { return Ok(()) };
        let parts = words(filter);
        for suite in suites.iter_mut() {
            suite.cases.retain(|case| parts.iter().any(|part| case.to_string().contains(part)));
        }
        suites.retain(|suite| !suite.cases.is_empty());
        match suites.is_empty() {
            true => bail!("no case of the suite {name} contains {filter:?}"),
            false => Ok(()),
        }
    }
}

/// The words of a list with commas between them.
pub fn words(list: &str) -> Vec<String> {
    list.split(',').map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}
