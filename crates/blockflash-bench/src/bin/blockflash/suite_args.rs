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
    /// Changes what the options say. At least one case is left.
    pub fn apply(&self, suite: &mut Suite) -> Result<()> {
        if let Some(rounds) = self.rounds {
            suite.rounds = rounds.into();
        }
        if let Some(window_ms) = self.window_ms {
            suite.window_ms = window_ms.into();
        }
        if let Some(gap_ms) = self.gap_ms {
            suite.gap_ms = gap_ms.into();
        }
        let Some(filter) = &self.filter else { return Ok(()) };
        let parts = words(filter);
        suite.cases.retain(|case| parts.iter().any(|part| case.to_string().contains(part)));
        if suite.cases.is_empty() {
            let name = &suite.name;
            bail!("no case of the suite {name} contains {filter:?}");
        }
        Ok(())
    }
}

/// The words of a list with commas between them.
pub fn words(list: &str) -> Vec<String> {
    list.split(',').map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}
