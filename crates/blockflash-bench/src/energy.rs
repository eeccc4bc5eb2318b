//! Power of the GPU while windows run, by its own counter of energy.

use crate::error::{Error, Result};
use crate::telemetry::Readings;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Shortest window in milliseconds whose energy is measured. The counter moves in steps of up to a
/// tenth of a second.
pub const MIN_WINDOW_MS: f64 = 500.0;

/// Beginning of each window that is left out: clock and power settle.
const SETTLE: Duration = Duration::from_millis(100);
/// Time between two looks at the counter, and so the error of the time of a step.
const PERIOD: Duration = Duration::from_millis(5);

/// Reads the energy counter of a GPU, the sum for everything that runs on it, until it is dropped.
#[derive(Debug, Default)]
pub struct EnergyMeter {
    /// The counter's values in millijoules, each when it was first seen.
    readings: Readings<u64>,
    /// Its end is the signal to stop.
    _running: Option<Sender<()>>,
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
        let (running, stopped) = channel();
        let meter = Self { readings: Readings::default(), _running: Some(running) };
        let readings = meter.readings.clone();
        std::thread::spawn(move || {
            let Ok(gpu) = device(&nvml, &index) else { return };
            while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                if let Ok(millijoules) = gpu.total_energy_consumption() {
                    let (at, mut readings) = (Instant::now(), readings.lock());
                    if readings.last().is_none_or(|&(_, last)| last != millijoules) {
                        readings.push((at, millijoules));
                    }
                }
            }
        });
        Ok(meter)
    }

    /// Mean power in watts within the windows, between the first and the last step of the counter
    /// in each; `None` if it has not moved twice in any of them.
    pub fn watts(&self, windows: &[(Instant, Instant)]) -> Option<f64> {
        let readings = self.readings.lock();
        let (mut joules, mut seconds) = (0.0, 0.0);
        for &(begin, end) in windows {
            let counts = begin + SETTLE..=end;
            let mut inside = readings.iter().filter(|(at, _)| counts.contains(at));
            if let Some(first) = inside.next()
                && let Some(last) = inside.next_back()
            {
                joules += last.1.saturating_sub(first.1) as f64 * 1e-3;
                seconds += (last.0 - first.0).as_secs_f64();
            }
        }
        (seconds > 0.0).then(|| joules / seconds)
    }

    /// Drops all readings.
    pub fn forget(&self) {
        self.readings.lock().clear();
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
        let (meter, start) = (EnergyMeter::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        // 100 W while idle; 500 W in a window from 1000 ms on, where the first tenth of a second
        // does not count, and 600 W in one from 3000 ms on.
        let times = [950, 1050, 1150, 1250, 1600, 1700, 3100, 3600].map(at);
        let joules = [95, 120, 170, 220, 395, 400, 600, 900];
        *meter.readings.lock() = times.into_iter().zip(joules.map(|j| j * 1000)).collect();
        let windows = [(at(1000), at(1650)), (at(3000), at(3650))];
        assert_abs_diff_eq!(meter.watts(&windows[..1]).unwrap(), 500.0, epsilon = 1e-9);
        assert_abs_diff_eq!(meter.watts(&windows).unwrap(), 525.0 / 0.95, epsilon = 1e-9);
        assert_eq!(meter.watts(&[(at(3000), at(3500))]), None, "a single step");
        meter.forget();
        assert_eq!(meter.watts(&windows), None);
        let cpu = EnergyMeter::start(None).unwrap_err().to_string();
        assert!(cpu.contains("the CPU has no such counter"), "{cpu}");
    }
}
