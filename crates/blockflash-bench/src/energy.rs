//! Power of the GPU while windows run, by its own counter of energy.

use crate::error::{Error, Result};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Shortest window in milliseconds whose energy is measured. The counter moves in steps of up to a
/// tenth of a second.
pub const MIN_WINDOW_MS: f64 = 500.0;

/// Beginning of each window that is left out: clock and power settle.
const SETTLE: Duration = Duration::from_millis(100);

/// Time between two looks at the counter, and so the error of the time of a step.
const PERIOD: Duration = Duration::from_millis(5);

/// The counter's value at the time when it was first seen.
#[derive(Clone, Copy, Debug)]
struct Reading {
    at: Instant,
    millijoules: u64,
}

/// Reads the energy counter of a GPU, the sum for everything that runs on it, until it is dropped.
#[derive(Debug)]
pub struct EnergyMeter {
    readings: Arc<Mutex<Vec<Reading>>>,
    runs: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl EnergyMeter {
    /// Starts reading the counter of the GPU that `nvidia-smi -i` knows by this identifier.
    ///
    /// # Errors
    /// [`Error::Energy`] without a GPU, without the library NVML, or without such a counter.
    pub fn start(smi_index: Option<&str>) -> Result<Self> {
        let refused = |why: NvmlError| Error::Energy { why: why.to_string() };
        let none = || Error::Energy { why: "the CPU has no such counter".to_owned() };
        let index = smi_index.ok_or_else(none)?.to_owned();
        let nvml = Nvml::init().map_err(refused)?;
        device(&nvml, &index).and_then(|gpu| gpu.total_energy_consumption()).map_err(refused)?;
        let mut meter = Self::silent();
        let (readings, runs) = (Arc::clone(&meter.readings), Arc::clone(&meter.runs));
        meter.thread = Some(std::thread::spawn(move || {
            let Ok(gpu) = device(&nvml, &index) else { return };
            while runs.load(Ordering::Relaxed) {
                if let Ok(millijoules) = gpu.total_energy_consumption() {
                    let at = Instant::now();
                    let mut readings = readings.lock().unwrap_or_else(PoisonError::into_inner);
                    if readings.last().is_none_or(|last| last.millijoules != millijoules) {
                        readings.push(Reading { at, millijoules });
                    }
                }
                std::thread::sleep(PERIOD);
            }
        }));
        Ok(meter)
    }

    fn silent() -> Self {
        let runs = Arc::new(AtomicBool::new(true));
        Self { readings: Arc::default(), runs, thread: None }
    }

    /// Mean power in watts within the windows, between the first and the last step of the counter
    /// in each; `None` if it has not moved twice in any of them.
    pub fn watts(&self, windows: &[(Instant, Instant)]) -> Option<f64> {
        let readings = self.readings.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut joules, mut seconds) = (0.0, 0.0);
        for &(begin, end) in windows {
            let begin = begin + SETTLE;
            let mut inside = readings.iter().filter(|reading| begin <= reading.at);
            if let Some(first) = inside.next()
                && let Some(last) = inside.take_while(|reading| reading.at <= end).last()
            {
                joules += last.millijoules.saturating_sub(first.millijoules) as f64 * 1e-3;
                seconds += (last.at - first.at).as_secs_f64();
            }
        }
        (seconds > 0.0).then(|| joules / seconds)
    }

    /// Drops all readings.
    pub fn forget(&self) {
        self.readings.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl Drop for EnergyMeter {
    fn drop(&mut self) {
        self.runs.store(false, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A reader that has panicked has nothing left to stop.
            let _ = thread.join();
        }
    }
}

/// The GPU by its number or its UUID.
fn device<'n>(nvml: &'n Nvml, index: &str) -> std::result::Result<Device<'n>, NvmlError> {
    match index.parse() {
        Ok(number) => nvml.device_by_index(number),
        Err(_) => nvml.device_by_uuid(index),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_abs_diff_eq;

    #[test]
    fn power_is_that_between_the_steps_within_windows() {
        let (meter, start) = (EnergyMeter::silent(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        // 100 W while idle; 500 W in a window from 1000 ms on, where the first tenth of a second
        // does not count, and 600 W in one from 3000 ms on.
        for (ms, millijoules) in [
            (950, 95_000),
            (1050, 120_000),
            (1150, 170_000),
            (1250, 220_000),
            (1600, 395_000),
            (1700, 400_000),
            (3100, 600_000),
            (3600, 900_000),
        ] {
            meter.readings.lock().unwrap().push(Reading { at: at(ms), millijoules });
        }
        let windows = [(at(1000), at(1650)), (at(3000), at(3650))];
        assert_abs_diff_eq!(meter.watts(&windows[..1]).unwrap(), 500.0, epsilon = 1e-9);
        assert_abs_diff_eq!(meter.watts(&windows).unwrap(), 525.0 / 0.95, epsilon = 1e-9);
        assert_eq!(meter.watts(&[(at(3000), at(3500))]), None, "a single step");
        meter.forget();
        assert_eq!(meter.watts(&windows), None);
    }

    #[test]
    fn a_cpu_has_no_meter() {
        let refused = EnergyMeter::start(None).unwrap_err().to_string();
        assert!(refused.contains("the CPU has no such counter"), "{refused}");
    }
}
