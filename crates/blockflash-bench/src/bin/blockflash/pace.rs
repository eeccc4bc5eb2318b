//! How long a run takes, and how far it is.

use crate::failure::Result;
use crate::output::print;
use crate::table;
use blockflash_bench::case::Case;
use blockflash_bench::order::Order;
use blockflash_bench::peers::Peers;
use blockflash_bench::record::{OURS, Record};
use blockflash_bench::rounds::Run;
use blockflash_bench::timing::Cache;
use indicatif::{ProgressBar, ProgressStyle};
use std::time::Duration;

/// Says how long it will take, and with how many windows.
pub fn announce(run: &Run, peers: &Peers, orders: &[Order]) -> Result<()> {
    let of_case = |case| orders.iter().map(|&order| run.time(order, case, peers)).sum::<Duration>();
    let caches = run.suite.cache.len() as u32;
    let minutes =
        (run.suite.cases.iter().map(of_case).sum::<Duration>() * caches).as_secs_f64() / 60.0;
    print(&format!(
        "windows of {} ms after {} ms idle: about {} min for {} cases, plus the time for \
         inputs, checks and parameter sweeps",
        run.suite.window_ms,
        run.suite.gap_ms,
        table::number(minutes),
        run.suite.cases.len() * run.suite.cache.len(),
    ))
}

/// All cases with the states of the L2 cache.
pub fn cases(run: &Run) -> impl Iterator<Item = (&Case, Cache)> {
    run.suite.cases.iter().flat_map(|case| run.suite.cache.iter().map(move |&cache| (case, cache)))
}

/// Measures case after case under a bar, which the measurement may tell its step.
pub fn each(
    run: &Run,
    mut measure: impl FnMut(&Case, Cache, &ProgressBar) -> Result<()>,
) -> Result<()> {
    let bar = ProgressBar::new(cases(run).count() as u64);
    let style = ProgressStyle::with_template("{spinner} {pos} of {len} {bar:20} {elapsed} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━╸ "));
    bar.enable_steady_tick(Duration::from_millis(200));
    for (case, cache) in cases(run) {
        bar.set_message(case.to_string());
        measure(case, cache, &bar)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(())
}

/// Says which of these failed, and whether one of ours is among them.
pub fn failures(records: &[Record]) -> Result<bool> {
    let mut ours = false;
    for record in records {
        let Some(error) = &record.error else { continue };
        ours |= record.implementation == OURS;
        let name = record.symbol.as_ref().unwrap_or(&record.implementation);
        print(&format!("{} {name}: {error}", record.case))?;
    }
    Ok(ours)
}
