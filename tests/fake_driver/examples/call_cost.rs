//! Host time of calls without a GPU, with the fake driver, whose functions take almost no time:
//!
//! ```text
//! cargo run --release -p blockflash-fake-driver --example call_cost
//! valgrind --tool=callgrind --toggle-collect='*calls_of*' \
//!     target/release/examples/call_cost attention_fwd prepared
//! ```
//!
//! The first prints nanoseconds of a call, of a prepared one, and of a launch of a graph that holds
//! one, and how many functions of the driver a repeated call calls. The second counts the
//! instructions of 100 calls of one operation; `callgrind_annotate` shows in which functions they
//! are.

#[path = "../tests/cases/mod.rs"]
mod cases;

use blockflash_fake_driver::{FakeDriver, GPUS};
use blockflash_ops::{Device, Result};
use cases::Case;
use std::time::Instant;

/// Calls of a round, and rounds, of which the fastest counts.
const CALLS: u32 = 1000;
const ROUNDS: usize = 21;
/// Calls whose instructions are counted.
const COUNTED: u32 = 100;

fn main() -> Result<()> {
    let driver = FakeDriver::load();
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    if let [name, how @ ..] = &wanted[..] {
        let prepared = how.first().is_some_and(|how| how == "prepared");
        let gpu = usize::from(how.last().is_some_and(|how| how == "portable"));
        for mut case in cases::all(&Device::cuda(gpu)?)?.into_iter().filter(|c| c.name == name) {
            calls_of(&mut case, prepared, COUNTED)?;
        }
        return Ok(());
    }
    println!("| operation | GPU | call ns | prepared ns | graph ns | functions of the driver |");
    println!("|---|---|---:|---:|---:|---:|");
    for (ordinal, gpu) in GPUS.iter().enumerate().take(2) {
        for mut case in cases::all(&Device::cuda(ordinal)?)? {
            let [call, prepared] =
                [false, true].map(|prepared| ns(|| calls_of(&mut case, prepared, CALLS)));
            let graph = case.stream.clone().capture(|_| (case.call)(true))?;
            let graph = ns(|| (0..CALLS).try_for_each(|_| Ok(graph.launch(&case.stream)?)));
            let asked = driver.calls(|| (case.call)(true)).1.len();
            let ([major, minor], name) = (gpu.compute_capability, case.name);
            let [call, prepared, graph] = [call?, prepared?, graph?];
            println!(
                "| {name} | {major}.{minor} | {call:.0} | {prepared:.0} | {graph:.0} | {asked} |"
            );
        }
    }
    Ok(())
}

/// Nanoseconds of one of the calls that `work` makes.
fn ns(mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut least = f64::MAX;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        work()?;
        least = least.min(start.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS));
    }
    Ok(least)
}

#[inline(never)]
fn calls_of(case: &mut Case, prepared: bool, calls: u32) -> Result<()> {
    (0..calls).try_for_each(|_| (case.call)(prepared))
}
