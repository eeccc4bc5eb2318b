//! First call and median of repeats.

use crate::failure::Result;
use crate::progress::Progress;
use blockflash_ops::Stream;
use blockflash_safe::{Event, Graph};
use serde::Serialize;
use std::time::Instant;

/// Repeats that nobody asked for take about this long.
const PATIENCE_US: f64 = 1e6;
const MAX_DEFAULT_REPEATS: usize = 20;
/// A repeat on a GPU is a graph of enough launches that it takes about this long: starting it does
/// not count then.
const REPLAY_US: f64 = 500.0;
const MAX_LAUNCHES: f64 = 100.0;

/// Times of one operation in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Timing {
    /// Wall time of the first call until its result is there; on a GPU it loads the kernel.
    pub first_us: f64,
    /// Median of the repeats, timed on the GPU itself if there is one. `None` without repeats.
    pub median_us: Option<f64>,
    /// How often the operation was timed.
    pub repeats: usize,
    /// Launches that were timed together, back to back; 1 on the CPU.
    pub launches: usize,
}

impl Timing {
    /// The best number to compute a speed from.
    pub fn typical_us(&self) -> f64 {
        self.median_us.unwrap_or(self.first_us)
    }
}

/// Runs the operation once and waits for it.
pub fn first(label: &str, stream: &Stream, operation: impl FnOnce() -> Result<()>) -> Result<f64> {
    let _progress = Progress::spinner(label);
    let start = Instant::now();
    operation()?;
    stream.synchronize()?;
    Ok(start.elapsed().as_secs_f64() * 1e6)
}

/// Times the operation `repeat` times more, or as often as fits into a second.
pub fn repeat(
    label: &str,
    stream: &Stream,
    first_us: f64,
    repeat: Option<usize>,
    mut operation: impl FnMut() -> Result<()>,
) -> Result<Timing> {
    let affordable = (PATIENCE_US / first_us.max(1.0)) as usize;
    let repeats = repeat.unwrap_or(affordable.min(MAX_DEFAULT_REPEATS));
    let progress = Progress::bar(label, repeats as u64);
    let gpu = !stream.device().is_cpu() && repeats > 0;
    let (graph, launches) = if gpu { captured(stream, &mut operation)? } else { (None, 1) };
    let mut times = Vec::new();
    for _ in 0..repeats {
        times.push(match &graph {
            Some(graph) => timed(stream, || Ok(graph.launch(stream)?))? / launches as f64,
            None => {
                let start = Instant::now();
                operation()?;
                start.elapsed().as_secs_f64() * 1e6
            }
        });
        progress.add(1);
    }
    let median_us = blockflash_bench::timing::median(&mut times);
    Ok(Timing { first_us, median_us, repeats, launches })
}

/// A graph that takes long enough to be timed, and its number of launches.
fn captured(
    stream: &Stream,
    operation: &mut impl FnMut() -> Result<()>,
) -> Result<(Option<Graph>, usize)> {
    let estimate = timed(stream, &mut *operation)?;
    let launches = (REPLAY_US / estimate.max(1.0)).ceil().clamp(1.0, MAX_LAUNCHES) as usize;
    let graph = stream.capture(|_| (0..launches).try_for_each(|_| operation()))?;
    // The first replay uploads the graph.
    graph.launch(stream)?;
    stream.synchronize()?;
    Ok((Some(graph), launches))
}

/// Time of some work on the GPU, in microseconds.
fn timed(stream: &Stream, work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let [begin, end] = [Event::new(stream.device(), true)?, Event::new(stream.device(), true)?];
    begin.record(stream)?;
    work()?;
    end.record(stream)?;
    end.synchronize()?;
    Ok(begin.elapsed_us(&end)?)
}
