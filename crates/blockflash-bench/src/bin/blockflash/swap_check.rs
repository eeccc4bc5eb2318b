//! `blockflash bench --swap-check`: does the order of a round matter, or is the gap long enough?

use crate::failure::{Result, bail};
use crate::output::print;
use crate::pace::{announce, cases, each, failures};
use blockflash_bench::order::Order;
use blockflash_bench::peers::Peers;
use blockflash_bench::rounds::{Run, Swap};

/// Measures every case in one order and in the reverse of it, and says by how much ratios move.
/// True if ours failed, or everybody else.
pub fn run(run: &Run, peers: &mut Peers) -> Result<bool> {
    if cases(run).all(|(case, _)| run.competitors(case, peers).len() < 2) {
        let why = "two contestants follow each other in any order";
        bail!("--swap-check needs at least two competitors that run: {why}");
    }
    announce(run, peers, &[Order::Fixed, Order::Reversed])?;
    let (mut most, mut compared, mut failed) = (0f64, 0, false);
    each(run, |case, cache, bar| {
        let step = |step: &str| bar.set_message(format!("{case}, {step}"));
        let (swaps, records) = run.swap_check(case, cache, peers, step);
        failed |= bar.suspend(|| {
            print(&format!("{case}: {}", line(&swaps)))?;
            failures(&records)
        })?;
        compared += swaps.len();
        most = swaps.iter().map(Swap::moved).fold(most, f64::max);
        Ok(())
    })?;
    print(&format!(
        "after {} ms idle, {compared} ratios change by at most {:.2} % when the order is reversed",
        run.suite.gap_ms,
        100.0 * most
    ))?;
    Ok(failed || compared == 0)
}

/// `flash 0.955, reversed 0.962 (0.73 %); … most 0.73 %`.
fn line(swaps: &[Swap]) -> String {
    let Some(most) = swaps.iter().map(Swap::moved).reduce(f64::max) else {
        return "nothing to compare".to_owned();
    };
    let one = |swap: &Swap| {
        let [forward, reversed] = swap.ratios;
        format!(
            "{} {forward:.3}, reversed {reversed:.3} ({:.2} %)",
            swap.name,
            100.0 * swap.moved()
        )
    };
    let each: Vec<_> = swaps.iter().map(one).collect();
    format!("{}; most {:.2} %", each.join("; "), 100.0 * most)
}
