//! First call and median of repeats.

use crate::failure::Result;
use crate::progress::Progress;
use blockflash_ops::Stream;
use blockflash_safe::Event;
use serde::Serialize;
use std::time::Instant;

/// Repeats that nobody asked for take about this long.
const PATIENCE_US: f64 = 1e6;
const MAX_DEFAULT_REPEATS: usize = 20;

/// Times of one operation in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Timing {
    /// Wall time of the first call until its result is there; on a GPU it loads the kernel.
    pub first_us: f64,
    /// Median of the repeats, timed on the GPU itself if there is one. `None` without repeats.
    pub median_us: Option<f64>,
    /// How often the operation was repeated.
    pub repeats: usize,
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

/// Runs the operation `repeat` times more, or as often as fits into a second.
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
    let mut times = Vec::new();
    if stream.device().is_cpu() {
        for _ in 0..repeats {
            let start = Instant::now();
            operation()?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
            progress.add(1);
        }
    } else {
        let mut before = Event::new(stream.device(), true)?;
        for _ in 0..repeats {
            let after = Event::new(stream.device(), true)?;
            before.record(stream)?;
            operation()?;
            after.record(stream)?;
            after.synchronize()?;
            times.push(before.elapsed_us(&after)?);
            before = after;
            progress.add(1);
        }
    }
    times.sort_by(f64::total_cmp);
    let middle = times.get(times.len() / 2).copied();
    let median_us = middle.map(|upper| (upper + times[(times.len() - 1) / 2]) / 2.0);
    Ok(Timing { first_us, median_us, repeats })
}
