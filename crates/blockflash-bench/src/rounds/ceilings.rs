use super::run::Run;
use crate::ceilings::Ceilings;
use crate::error::Result;
use crate::record::{OURS, Record, now};
use crate::timing::{Cache, median};
use std::time::{Duration, Instant};

impl Run {
    /// Measures the ceilings of the GPU in turns like cases; their records belong to a suite
    /// `ceilings`. `step` is called with the name of the next step.
    pub fn measure_ceilings(&mut self, step: impl Fn(&str)) -> Result<Vec<Record>> {
        step("ceilings: probes and check");
        let mut probes = Ceilings::probes(&self.stream)?;
        let mut taken = vec![(Vec::new(), Vec::new()); probes.len()];
        for round in 0..=self.suite.rounds {
            for (probe, (times, windows)) in probes.iter_mut().zip(&mut taken) {
                step(&format!("{}: round {round} of {}", probe.ceiling.name(), self.suite.rounds));
                std::thread::sleep(Duration::from_secs_f64(self.suite.gap_ms * 1e-3));
                let begin = Instant::now();
                let window = probe.window(self.suite.window_ms)?;
                if round > 0 {
                    times.push(window.us);
                    windows.push((begin, Instant::now()));
                }
            }
        }
        let mut records = Vec::new();
        for (probe, (mut times, windows)) in probes.iter().zip(taken) {
            let us = median(&mut times);
            let rate = us.map(|us| probe.work / us * 1e6).filter(|_| probe.verified);
            if let Some(rate) = rate {
                self.ceilings.add(probe.ceiling, rate);
            }
            let mut record = Record {
                suite: "ceilings".to_owned(),
                op: "ceiling".to_owned(),
                case: probe.ceiling.name().to_owned(),
                implementation: OURS.to_owned(),
                symbol: Some(probe.symbol.clone()),
                rate,
                unit: Some(probe.ceiling.unit().to_owned()),
                us: us.filter(|_| probe.verified),
                us_min: times.first().copied(),
                us_max: times.last().copied(),
                launches: Some(probe.launches()),
                rounds: times.len(),
                error: (!probe.verified).then(|| "wrong result".to_owned()),
                verified: probe.verified,
                date: now(),
                ..self.blank(Cache::Warm)
            };
            if probe.ceiling.unit() == "FLOP/s" {
                record.flops = probe.work;
                record.tflops = rate.map(|rate| rate * 1e-12);
            }
            self.observe(&mut record, &windows);
            records.push(record);
        }
        self.telemetry.forget();
        Ok(records)
    }
}
