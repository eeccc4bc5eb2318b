//! Time of a launch: CUDA-graph replays between events in windows of a given length; on a CPU a
//! timed loop.

use crate::error::{Error, Result};
use blockflash_ops::{DType, Stream, Tensor};
use blockflash_safe::{Event, Graph};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// A graph holds launches for about this long: enough that starting it does not count. Competitors
/// are captured by the same rule.
pub const GRAPH_US: f64 = 3000.0;
/// Maximum number of launches in one graph.
pub const MAX_LAUNCHES: usize = 512;
/// Maximum number of replays of one window.
const MAX_REPLAYS: f64 = 5000.0;

/// Content of the L2 cache when a launch begins.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// What the launch before left there: launches follow each other on the same data.
    #[default]
    Warm,
    /// Other data: a buffer of [`flush_bytes`] is overwritten before each launch.
    Cold,
    /// Other data: launches follow each other and read one of several copies, round robin, of
    /// [`rotation_bytes`](crate::case::rotation_bytes) together.
    Rotated,
}

impl Cache {
    /// Name in records and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Cache::Warm => "warm",
            Cache::Cold => "cold",
            Cache::Rotated => "rotated",
        }
    }
}

/// How much is overwritten to make an L2 cache cold: twice its size. Competitors do the same.
pub fn flush_bytes(stream: &Stream) -> usize {
    let l2_bytes = stream.device().cuda_properties().map_or(0, |gpu| gpu.l2_bytes);
    usize::try_from(2 * l2_bytes).unwrap_or(0).next_multiple_of(4)
}

/// Times of a launch within one window, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Window {
    /// Median.
    pub us: f64,
    /// Least.
    pub us_min: f64,
    /// Greatest.
    pub us_max: f64,
    /// Number of timed replays.
    pub replays: usize,
    /// Launches in one replay.
    pub launches: usize,
}

impl Window {
    /// From the times of replays, the first of which warmed up and is left out if there are more.
    fn new(mut times: Vec<f64>, launches: usize) -> Self {
        if times.len() > 1 {
            times.remove(0);
        }
        times.iter_mut().for_each(|time| *time /= launches as f64);
        let us = median(&mut times).unwrap_or(f64::NAN);
        let [us_min, us_max] = [times.first(), times.last()].map(|end| *end.unwrap_or(&us));
        Self { us, us_min, us_max, replays: times.len(), launches }
    }
}

/// The median of the values, which are sorted by this; `None` without values.
pub fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let upper = *values.get(values.len() / 2)?;
    let lower = values.get((values.len() - 1) / 2).copied().unwrap_or(upper);
    Some((lower + upper) / 2.0)
}

/// `None` without values.
pub(crate) fn geometric_mean(values: &[f64]) -> Option<f64> {
    let sum: f64 = values.iter().map(|value| value.ln()).sum();
    (!values.is_empty()).then(|| (sum / values.len() as f64).exp())
}

/// A launch that can be repeated: captured in a graph on a GPU.
#[derive(Debug, Default)]
pub struct Repeat {
    graph: Option<Graph>,
    launches: usize,
    /// Time from one replay to the next.
    period_us: f64,
    events: Vec<[Event; 2]>,
    /// Overwritten before each replay.
    flush: Option<Tensor>,
}

impl Repeat {
    /// Prepares windows of a launch. On a GPU it is run a few times, captured, and replayed; on a
    /// CPU run once.
    ///
    /// # Errors
    /// Whatever the launch or the device reports; [`Error::Option`] for a cold cache on a CPU.
    pub fn new(
        stream: &Stream,
        cache: Cache,
        mut launch: impl FnMut(&Stream) -> Result<()>,
    ) -> Result<Self> {
        let mut repeat = Self { launches: 1, ..Self::default() };
        if stream.device().is_cpu() {
            if cache == Cache::Cold {
                let refused = "a cold L2 cache can only be measured on a GPU";
                return Err(Error::Option(refused.to_owned()));
            }
            repeat.period_us = timed(|| launch(stream))?;
            return Ok(repeat);
        }
        (0..3).try_for_each(|_| launch(stream))?;
        stream.synchronize()?;
        if cache == Cache::Cold {
            repeat.flush = Some(Tensor::empty(stream, DType::I32, &[flush_bytes(stream) / 4])?);
            repeat.capture(stream, 1, &mut launch)?;
            return Ok(repeat);
        }
        // A short graph first: timed outside a graph, a small kernel would count the host's part of
        // its launch.
        repeat.capture(stream, 8, &mut launch)?;
        let launches = GRAPH_US / repeat.launch_us().max(1e-3);
        let launches = launches.round().clamp(1.0, MAX_LAUNCHES as f64) as usize;
        if launches != 8 {
            repeat.capture(stream, launches, &mut launch)?;
        }
        Ok(repeat)
    }

    fn capture(
        &mut self,
        stream: &Stream,
        launches: usize,
        launch: &mut impl FnMut(&Stream) -> Result<()>,
    ) -> Result<()> {
        self.graph = Some(stream.capture(|stream| (0..launches).try_for_each(|_| launch(stream)))?);
        self.launches = launches;
        // The first replay uploads the graph.
        let times = self.replays(stream, 4)?;
        if self.flush.is_none() {
            self.period_us = times[1..].iter().copied().fold(f64::INFINITY, f64::min);
        }
        Ok(())
    }

    /// Microseconds from one launch to the next, as far as known.
    pub fn launch_us(&self) -> f64 {
        self.period_us / self.launches as f64
    }

    /// Launches in one replay.
    pub fn launches(&self) -> usize {
        self.launches
    }

    /// Replays for about `ms`, and returns when the device is idle again.
    ///
    /// # Errors
    /// Whatever the launch or the device reports.
    pub fn window(
        &mut self,
        stream: &Stream,
        ms: f64,
        mut launch: impl FnMut(&Stream) -> Result<()>,
    ) -> Result<Window> {
        let count = 1.0 + (ms * 1e3 / self.period_us.max(1e-3)).round();
        let count = count.clamp(2.0, MAX_REPLAYS) as usize;
        let times = match self.graph {
            Some(_) => self.replays(stream, count)?,
            None => (0..count).map(|_| timed(|| launch(stream))).collect::<Result<_>>()?,
        };
        let window = Window::new(times, self.launches);
        if self.flush.is_none() {
            self.period_us = window.us * self.launches as f64;
        }
        Ok(window)
    }

    /// Queues all replays at once and waits for the last.
    fn replays(&mut self, stream: &Stream, count: usize) -> Result<Vec<f64>> {
        let Some(graph) = &self.graph else { return Ok(Vec::new()) };
        while self.events.len() < count {
            let event = || Event::new(stream.device(), true);
            self.events.push([event()?, event()?]);
        }
        let start = Instant::now();
        for [begin, end] in &self.events[..count] {
            if let Some(flush) = &mut self.flush {
                flush.fill_bytes(stream, 0)?;
            }
            begin.record(stream)?;
            graph.launch(stream)?;
            end.record(stream)?;
        }
        stream.synchronize()?;
        if self.flush.is_some() {
            self.period_us = start.elapsed().as_secs_f64() * 1e6 / count as f64;
        }
        self.events[..count].iter().map(|[begin, end]| Ok(begin.elapsed_us(end)?)).collect()
    }
}

/// Microseconds of some work on the CPU.
fn timed(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work().map(|()| start.elapsed().as_secs_f64() * 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockflash_ops::Device;

    #[test]
    fn medians_and_windows_without_their_first_replay() {
        assert_eq!(median(&mut []), None);
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), Some(2.5));
        let window = Window::new(vec![900.0, 20.0, 40.0, 30.0], 10);
        assert_eq!(window, Window { us: 3.0, us_min: 2.0, us_max: 4.0, replays: 3, launches: 10 });
        assert_eq!(Window::new(vec![5.0], 1).us, 5.0);
    }

    #[test]
    fn a_loop_on_the_cpu_fills_its_window() {
        let stream = Device::cpu().stream().unwrap();
        let mut calls = 0;
        let mut launch = |_: &Stream| {
            calls += 1;
            std::thread::sleep(std::time::Duration::from_millis(2));
            Ok(())
        };
        let mut repeat = Repeat::new(&stream, Cache::Warm, &mut launch).unwrap();
        let window = repeat.window(&stream, 10.0, &mut launch).unwrap();
        assert!(window.us >= 2000.0 && window.replays >= 1 && window.replays <= 5, "{window:?}");
        assert_eq!(calls, 2 + window.replays);
        let cold = Repeat::new(&stream, Cache::Cold, |_| Ok(()));
        assert!(cold.unwrap_err().to_string().contains("only be measured on a GPU"));
    }
}
