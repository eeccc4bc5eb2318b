//! Clock, power and temperature of the GPU while windows run, as nvidia-smi reports them.

use crate::machine::{smi, smi_command};
use crate::timing::median;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Sampling period: about one sample per window of the default length. Each query costs the driver
/// some time, so a shorter period would disturb the measurement.
const PERIOD: Duration = Duration::from_millis(50);

/// Readings with their times, which a thread writes.
#[derive(Debug)]
pub(crate) struct Readings<T>(Arc<Mutex<Vec<(Instant, T)>>>);

impl<T> Readings<T> {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Vec<(Instant, T)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Clone for Readings<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Default for Readings<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

/// One sample.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Multiprocessor clock in MHz.
    pub clock_mhz: Option<f64>,
    /// Power in watts.
    pub power_w: Option<f64>,
    /// Degrees Celsius.
    pub temperature_c: Option<f64>,
}

impl Sample {
    /// Parses `1980, 650.12, 45`; a value that the GPU does not report is `[N/A]`.
    fn parse(line: &str) -> Option<Self> {
        let mut numbers = line.split(',').map(|field| field.trim().parse().ok());
        let (clock_mhz, power_w) = (numbers.next()?, numbers.next()?);
        Some(Self { clock_mhz, power_w, temperature_c: numbers.next()? })
    }
}

/// A running nvidia-smi and its samples. Without a GPU or without nvidia-smi there are none.
#[derive(Debug, Default)]
pub struct Telemetry {
    child: Option<Child>,
    samples: Readings<Sample>,
}

impl Telemetry {
    /// Starts sampling the GPU that `nvidia-smi -i` knows by this identifier.
    pub fn start(smi_index: Option<&str>) -> Self {
        let Some(index) = smi_index else { return Self::default() };
        // `power.draw` is a mean over a second on recent GPUs, which would mix neighbouring
        // windows.
        let instant = "power.draw.instant";
        let power = if smi(index, instant).is_some() { instant } else { "power.draw" };
        let mut command = smi_command(index, &format!("clocks.sm,{power},temperature.gpu"));
        command.arg(format!("--loop-ms={}", PERIOD.as_millis())).stdout(Stdio::piped());
        let Ok(mut child) = command.spawn() else { return Self::default() };
        let samples = Readings::default();
        if let Some(stdout) = child.stdout.take() {
            let samples = samples.clone();
            std::thread::spawn(move || {
                let lines = BufReader::new(stdout).lines().map_while(Result::ok);
                lines
                    .filter_map(|line| Sample::parse(&line))
                    .for_each(|sample| samples.lock().push((Instant::now(), sample)));
            });
        }
        Self { child: Some(child), samples }
    }

    /// Median clock, median power and highest temperature of the samples inside the windows.
    pub fn during(&self, windows: &[(Instant, Instant)]) -> Sample {
        let mut samples = self.samples.lock().clone();
        samples.retain(|(at, _)| windows.iter().any(|(begin, end)| (begin..=end).contains(&at)));
        let median = |field: fn(&Sample) -> Option<f64>| {
            median(&mut samples.iter().filter_map(|(_, sample)| field(sample)).collect::<Vec<_>>())
        };
        let temperatures = samples.iter().filter_map(|(_, sample)| sample.temperature_c);
        Sample {
            clock_mhz: median(|sample| sample.clock_mhz),
            power_w: median(|sample| sample.power_w),
            temperature_c: temperatures.reduce(f64::max),
        }
    }

    /// Drops all samples.
    pub fn forget(&self) {
        self.samples.lock().clear();
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // The process may have exited already, and nothing depends on it any more.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_nvidia_smi() {
        let expected =
            Sample { clock_mhz: Some(1980.0), power_w: Some(650.12), temperature_c: Some(45.0) };
        assert_eq!(Sample::parse("1980, 650.12, 45"), Some(expected));
        assert_eq!(Sample::parse("1980, [N/A], 45").and_then(|sample| sample.power_w), None);
        assert_eq!(Sample::parse("nothing"), None);
    }

    #[test]
    fn only_samples_within_windows_count() {
        let (telemetry, start) = (Telemetry::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        for (ms, clock) in [(0, 300.0), (10, 1900.0), (20, 1700.0), (30, 1800.0), (90, 200.0)] {
            let sample = Sample { clock_mhz: Some(clock), ..Sample::default() };
            telemetry.samples.lock().push((at(ms), sample));
        }
        assert_eq!(telemetry.during(&[(at(5), at(15)), (at(18), at(35))]).clock_mhz, Some(1800.0));
        assert_eq!(telemetry.during(&[]), Sample::default());
    }
}
