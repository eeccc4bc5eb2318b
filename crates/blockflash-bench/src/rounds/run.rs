//! A run of a suite.

use super::contestant::{Contestant, Who};
use crate::case::Case;
use crate::case::rotation_bytes;
use crate::ceilings::Ceilings;
use crate::energy::EnergyMeter;
use crate::error::{Error, Result};
use crate::ours::{Kernels, Ours};
use crate::peers::Peers;
use crate::record::{OURS, Protocol, Record, SCHEMA, now};
use crate::suite::Suite;
use crate::telemetry::Telemetry;
use crate::timing::{Cache, Window, flush_bytes, median};
use crate::turns::Turns;
use crate::{machine::Machine, record};
use blockflash_ops::Stream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Settings of a run, equal for all its cases.
#[derive(Debug)]
pub struct Run {
    /// The suite with its rounds, window length and gap.
    pub suite: Suite,
    /// The machine that is measured.
    pub machine: Machine,
    /// Queue of the device.
    pub stream: Stream,
    /// Seed of inputs and patterns.
    pub seed: u64,
    /// Which of our kernels are measured.
    pub kernels: Kernels,
    /// Clock and power.
    pub telemetry: Telemetry,
    /// The counter of energy, if joules are measured.
    pub energy: Option<EnergyMeter>,
    /// Measured ceilings; empty until [`measure_ceilings`](Run::measure_ceilings).
    pub ceilings: Ceilings,
    /// Folder for files that rivals read.
    pub scratch: PathBuf,
    id: String,
}

impl Run {
    /// Starts a run: gives it an id and starts sampling the GPU.
    pub fn new(
        suite: Suite,
        machine: Machine,
        stream: Stream,
        seed: u64,
        kernels: Kernels,
    ) -> Result<Self> {
        let id = record::run_id();
        let scratch = std::env::temp_dir().join(format!("blockflash-{id}"));
        std::fs::create_dir_all(&scratch).map_err(Error::io(&scratch))?;
        let telemetry = Telemetry::start(machine.smi_index.as_deref());
        let ceilings = Ceilings::new(&stream);
        let energy = None;
        Ok(Self { suite, machine, stream, seed, kernels, telemetry, energy, ceilings, scratch, id })
    }

    /// Measures a case. A failure becomes a record with an error. `step` is called with the name of
    /// the next step.
    pub fn measure(
        &self,
        case: &Case,
        cache: Cache,
        peers: &mut Peers,
        step: impl Fn(&str),
    ) -> Vec<Record> {
        let [records] = self.measure_in([Turns::Balanced], case, cache, peers, step);
        records
    }

    /// Prepares a case once, and measures it with each kind of turns.
    pub(super) fn measure_in<const N: usize>(
        &self,
        turns: [Turns; N],
        case: &Case,
        cache: Cache,
        peers: &mut Peers,
        step: impl Fn(&str),
    ) -> [Vec<Record>; N] {
        self.telemetry.forget();
        self.energy.iter().for_each(EnergyMeter::forget);
        step("ours: inputs and check");
        let mut contestants = Vec::new();
        let mut ours = Ours::new(case, &self.stream, cache, self.seed, &self.kernels);
        match &ours {
            Ok(ours) => {
                for (index, kernel) in ours.kernels.iter().enumerate() {
                    let mut contestant = self.contestant(case, cache, OURS, Who::Ours(index));
                    let record = &mut contestant.record;
                    record.symbol = kernel.symbol.clone();
                    record.tuning = kernel.tuning.clone();
                    record.launches = Some(kernel.launches());
                    record.load_us = kernel.load_us;
                    (record.host_us, record.host_prepared_us) =
                        (kernel.host.us, kernel.host.prepared_us);
                    (record.host_driver_us, record.host_graph_us) =
                        (kernel.host.driver_us, kernel.host.graph_us);
                    record.judge(kernel.verified, Some(kernel.rel_err));
                    contestants.push(contestant);
                }
            }
            Err(error) => {
                let mut contestant = self.contestant(case, cache, OURS, Who::Ours(0));
                contestant.record.error = Some(error.to_string());
                contestants.push(contestant);
            }
        }
        self.prepare_peers(case, cache, peers, &mut contestants, &step);
        let measured = turns.map(|turns| {
            let mut contestants = contestants.clone();
            self.rounds(turns, &mut ours, peers, &mut contestants, &step);
            contestants.into_iter().map(|contestant| self.finish(contestant)).collect()
        });
        peers.forget();
        measured
    }

    /// Rivals and marks that are wanted for a case.
    pub fn rivals(&self, case: &Case, peers: &Peers) -> Vec<String> {
        if self.suite.alone.contains(case) { Vec::new() } else { peers.of(case.op()) }
    }

    /// Time that the windows of a case take with one of our kernels if no rival fails, without
    /// inputs, checks and sweeps.
    pub fn time(&self, turns: Turns, case: &Case, peers: &Peers) -> Duration {
        let Suite { rounds, window_ms, gap_ms, .. } = self.suite;
        turns.time(1 + self.rivals(case, peers).len(), rounds, ms(window_ms), ms(gap_ms))
    }

    fn prepare_peers(
        &self,
        case: &Case,
        cache: Cache,
        peers: &mut Peers,
        contestants: &mut Vec<Contestant>,
        step: &impl Fn(&str),
    ) {
        let names = self.rivals(case, peers);
        if names.is_empty() {
            return;
        }
        let bytes = match cache {
            Cache::Warm | Cache::Cold => flush_bytes(&self.stream),
            Cache::Rotated => rotation_bytes(&self.stream),
        };
        peers.set_cache(cache, bytes);
        let peer_case = case.shape().peer_case(self.seed, &self.scratch);
        for name in names {
            step(&format!("{name}: inputs and check"));
            let mut contestant = self.contestant(case, cache, &name, Who::Peer(name.clone()));
            let record = &mut contestant.record;
            record.reference = peers.is_reference(&name);
            record.deterministic = peers.is_deterministic(&name);
            let prepared = match &peer_case {
                Ok(peer_case) => {
                    peers.prepare(peer_case, &name).map_err(|failure| failure.to_string())
                }
                Err(error) => Err(error.to_string()),
            };
            match prepared {
                Ok(prepared) => {
                    record.settings =
                        Some(prepared.settings).filter(|settings| !settings.is_empty());
                    record.judge(prepared.verified, prepared.rel_err);
                }
                Err(message) => record.error = Some(message),
            }
            contestants.push(contestant);
        }
    }

    /// One warm-up round that is not counted, then rounds in which all contestants take turns.
    fn rounds(
        &self,
        turns: Turns,
        ours: &mut Result<Ours>,
        peers: &mut Peers,
        contestants: &mut [Contestant],
        step: impl Fn(&str),
    ) {
        let mut ready: Vec<_> =
            contestants.iter_mut().filter(|contestant| contestant.record.error.is_none()).collect();
        let (count, rounds) = (ready.len(), turns.rounds(ready.len(), self.suite.rounds));
        for (number, contestant) in ready.iter_mut().enumerate() {
            contestant.record.protocol = Some(Protocol::of(turns, number, count));
        }
        for round in 0..=rounds {
            // The warm-up round has the order of the last round, which precedes the first in the
            // cycle.
            let turn = round.checked_sub(1).unwrap_or(rounds.saturating_sub(1));
            for number in turns.order(count, turn) {
                std::thread::sleep(ms(self.suite.gap_ms));
                let contestant = ready.get_mut(number);
                match contestant.filter(|contestant| contestant.record.error.is_none()) {
                    // An empty place, or a contestant that has failed: the pause leaves the next
                    // one the same rested GPU in every case.
                    None => std::thread::sleep(ms(self.suite.window_ms)),
                    Some(contestant) => {
                        step(&format!(
                            "{}: round {round} of {rounds}",
                            contestant.record.implementation
                        ));
                        self.window(ours, peers, contestant, round > 0);
                    }
                }
            }
        }
    }

    /// Runs a window of a contestant; it warms up unless it `counts`.
    fn window(
        &self,
        ours: &mut Result<Ours>,
        peers: &mut Peers,
        contestant: &mut Contestant,
        counts: bool,
    ) {
        let begin = Instant::now();
        let window: Result<Window, String> = match (&contestant.who, ours) {
            (Who::Ours(kernel), Ok(ours)) => {
                ours.window(*kernel, self.suite.window_ms).map_err(|error| error.to_string())
            }
            (Who::Ours(_), Err(error)) => Err(error.to_string()),
            (Who::Peer(name), _) => {
                peers.window(name, self.suite.window_ms).map_err(|failure| failure.to_string())
            }
        };
        match window {
            Err(message) => contestant.record.error = Some(message),
            Ok(_) if !counts => {}
            Ok(window) => {
                contestant.record.launches = Some(window.launches);
                contestant.times.push(window.us);
                contestant.windows.push((begin, Instant::now()));
            }
        }
    }

    fn contestant(&self, case: &Case, cache: Cache, implementation: &str, who: Who) -> Contestant {
        let work = case.work();
        let limit = self.ceilings.limit(&work, case.dtype(), cache);
        let record = Record {
            op: case.op().to_owned(),
            case: case.to_string(),
            implementation: implementation.to_owned(),
            flops: work.flops,
            bytes: work.bytes,
            l2_bytes: work.l2_bytes,
            exps: work.exps,
            ceiling: limit.map(|limit| limit.name.to_owned()),
            ceiling_us: limit.map(|limit| limit.us),
            ..self.blank(cache)
        };
        Contestant { record, who, times: Vec::new(), windows: Vec::new() }
    }

    /// A record with the fields that all records of this run share.
    pub(super) fn blank(&self, cache: Cache) -> Record {
        Record {
            schema: SCHEMA,
            suite: self.suite.name.clone(),
            run: self.id.clone(),
            window_ms: self.suite.window_ms,
            gap_ms: self.suite.gap_ms,
            commit: self.machine.commit.clone(),
            same_as: None,
            gpu: self.machine.gpu.clone(),
            driver: self.machine.driver.clone(),
            cache: cache.name().to_owned(),
            ..Record::default()
        }
    }

    pub(super) fn observe(&self, record: &mut Record, windows: &[(Instant, Instant)]) {
        let sample = self.telemetry.during(windows);
        (record.clock_mhz, record.power_w) = (sample.clock_mhz, sample.power_w);
        record.temperature_c = sample.temperature_c;
    }

    fn finish(&self, contestant: Contestant) -> Record {
        let Contestant { mut record, mut times, windows, .. } = contestant;
        record.date = now();
        // A rival that failed in a late round gets no time: it has fewer rounds than the others.
        if record.error.is_some() {
            return record;
        }
        let watts = self.energy.as_ref().map(|energy| energy.watts(&windows));
        if watts == Some(None) {
            record.error = Some("the counter of energy stood still in the windows".to_owned());
            return record;
        }
        record.rounds = times.len();
        record.us = median(&mut times);
        (record.us_min, record.us_max) = (times.first().copied(), times.last().copied());
        record.tflops = record.us.filter(|_| record.flops > 0.0).map(|us| record.flops / us * 1e-6);
        record.joules = watts.flatten().zip(record.us).map(|(watts, us)| watts * us * 1e-6);
        record.ceiling_fraction = record.us.and_then(|us| Some(record.ceiling_us? / us));
        self.observe(&mut record, &windows);
        record
    }
}

fn ms(ms: f64) -> Duration {
    Duration::from_secs_f64(ms * 1e-3)
}

impl Drop for Run {
    fn drop(&mut self) {
        // The folder contains only patterns, so a leftover in the temporary folder is harmless.
        let _ = std::fs::remove_dir_all(&self.scratch);
    }
}

#[cfg(test)]
mod tests;
