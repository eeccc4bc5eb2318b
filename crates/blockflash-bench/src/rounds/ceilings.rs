use super::{Contestant, Run, Who};
use crate::ceilings::{Ceilings, Probed};
use crate::error::Result;
use crate::order::Order;
use crate::record::{OURS, Record};
use crate::timing::Cache;

impl Run {
    /// Measures the ceilings of the GPU in rounds like a case; their records belong to a suite
    /// `ceilings`. `step` is called with the name of the next step.
    ///
    /// # Errors
    /// If the device fails before the first window; later failures are in the records.
    pub fn measure_ceilings(&mut self, step: impl Fn(&str)) -> Result<Vec<Record>> {
        step("ceilings: probes and check");
        let mut probes = Ceilings::probes(&self.stream)?;
        let contestants = probes.iter().enumerate();
        let contestants =
            contestants.map(|(at, probe)| Contestant::new(Who::Ours(at), self.of(probe)));
        let mut contestants: Vec<_> = contestants.collect();
        let mut window = |who: &Who| match who {
            Who::Ours(at) => {
                probes[*at].window(self.suite.window_ms).map_err(|error| error.to_string())
            }
            Who::Peer(name) => Err(format!("{name} is no probe")),
        };
        self.rounds(Order::Fixed, &mut contestants, &mut window, &step);
        let mut records = Vec::new();
        for (contestant, probe) in contestants.into_iter().zip(&probes) {
            let record = self.finish(contestant);
            let rate = record.us.map(|us| probe.work / us * 1e6);
            if let Some(rate) = rate {
                self.ceilings.add(probe.ceiling, rate);
            }
            records.push(Record { rate, protocol: None, ..record });
        }
        self.telemetry.forget();
        Ok(records)
    }

    fn of(&self, probe: &Probed) -> Record {
        Record {
            suite: "ceilings".to_owned(),
            op: "ceiling".to_owned(),
            case: probe.ceiling.name.to_owned(),
            implementation: OURS.to_owned(),
            symbol: Some(probe.symbol.clone()),
            unit: Some(probe.ceiling.unit.to_owned()),
            flops: if probe.ceiling.unit == "FLOP/s" { probe.work } else { 0.0 },
            launches: Some(probe.launches()),
            error: (!probe.verified).then(|| "wrong result".to_owned()),
            verified: probe.verified,
            ..self.blank(Cache::Warm)
        }
    }
}
