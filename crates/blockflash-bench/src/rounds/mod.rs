//! One case, ours and the competitors in rounds: every window is preceded by the same idle gap and
//! has the same length, so that clocks, power and temperature drift for all alike, and orders
//! change so that each runs behind each other one equally often.

mod ceilings;
mod swap;

pub use swap::Swap;

use crate::case::{Case, rotation_bytes};
use crate::ceilings::Ceilings;
use crate::energy::EnergyMeter;
use crate::error::{Error, Result};
use crate::machine::Machine;
use crate::order::Order;
use crate::ours::{Kernels, MeasuredKernel, Ours};
use crate::peers::Peers;
use crate::record::{self, OURS, Protocol, Record, SCHEMA};
use crate::suite::Suite;
use crate::telemetry::Telemetry;
use crate::timing::{Cache, Window, flush_bytes, median};
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
    /// Folder for files that competitors read.
    pub scratch: PathBuf,
    id: String,
}

/// An implementation that takes windows, with the results of its windows.
#[derive(Clone)]
struct Contestant {
    record: Record,
    who: Who,
    times: Vec<f64>,
    windows: Vec<(Instant, Instant)>,
}

#[derive(Clone)]
enum Who {
    Ours(usize),
    Peer(String),
}

impl Contestant {
    fn new(who: Who, record: Record) -> Self {
        Self { record, who, times: Vec::new(), windows: Vec::new() }
    }

    /// Records the verdict on the output. A wrong output becomes an error, so that it gets no time.
    fn judge(&mut self, verified: bool, rel_err: Option<f64>) {
        let record = &mut self.record;
        record.verified = verified;
        // JSON has no infinity and no NaN.
        record.rel_err = rel_err.filter(|rel_err| rel_err.is_finite());
        if !verified {
            let size = record.rel_err.map_or("not finite".to_owned(), |size| format!("{size:.1e}"));
            record.error = Some(format!("wrong result: relative error {size}"));
        }
    }
}

impl Run {
    /// Starts a run: gives it an id and starts sampling the GPU.
    ///
    /// # Errors
    /// [`Error::Io`] without a temporary folder.
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
        let (ceilings, energy) = (Ceilings::new(&stream), None);
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
        let [records] = self.measure_in([Order::Balanced], case, cache, peers, step);
        records
    }

    /// Prepares a case once, and measures it in each kind of order.
    fn measure_in<const N: usize>(
        &self,
        orders: [Order; N],
        case: &Case,
        cache: Cache,
        peers: &mut Peers,
        step: impl Fn(&str),
    ) -> [Vec<Record>; N] {
        self.telemetry.forget();
        self.energy.iter().for_each(EnergyMeter::forget);
        step("ours: inputs and check");
        let mut ours = Ours::new(case, &self.stream, cache, self.seed, &self.kernels);
        let mut contestants = self.ours(case, cache, &ours);
        contestants.extend(self.prepared(case, cache, peers, &step));
        let ms = self.suite.window_ms;
        let mut window = |who: &Who| match (who, &mut ours) {
            (Who::Ours(kernel), Ok(ours)) => {
                ours.window(*kernel, ms).map_err(|error| error.to_string())
            }
            (Who::Ours(_), Err(error)) => Err(error.to_string()),
            (Who::Peer(name), _) => peers.window(name, ms).map_err(|failure| failure.to_string()),
        };
        let measured = orders.map(|order| {
            let mut contestants = contestants.clone();
            self.rounds(order, &mut contestants, &mut window, &step);
            contestants.into_iter().map(|contestant| self.finish_case(contestant)).collect()
        });
        peers.forget();
        measured
    }

    /// Competitors and references that are wanted for a case.
    pub fn competitors(&self, case: &Case, peers: &Peers) -> Vec<String> {
        if self.suite.alone.contains(case) { Vec::new() } else { peers.of(case.peer_op()) }
    }

    /// Time that the windows of a case take with one of our kernels if no competitor fails, without
    /// inputs, checks and sweeps.
    pub fn time(&self, order: Order, case: &Case, peers: &Peers) -> Duration {
        let Suite { rounds, window_ms, gap_ms, .. } = self.suite;
        order.time(1 + self.competitors(case, peers).len(), rounds, ms(window_ms), ms(gap_ms))
    }

    /// Our kernels, or a failure.
    fn ours(&self, case: &Case, cache: Cache, ours: &Result<Ours>) -> Vec<Contestant> {
        let blank = |at| Contestant::new(Who::Ours(at), self.record(case, cache, OURS));
        let kernel = |(at, kernel): (usize, &MeasuredKernel)| {
            let mut contestant = blank(at);
            contestant.record = Record {
                symbol: kernel.symbol.clone(),
                launches: Some(kernel.launches()),
                load_us: kernel.load_us,
                host_us: kernel.host.us,
                host_prepared_us: kernel.host.prepared_us,
                host_driver_us: kernel.host.driver_us,
                host_graph_us: kernel.host.graph_us,
                ..contestant.record
            };
            contestant.judge(kernel.verified, Some(kernel.rel_err));
            contestant
        };
        match ours {
            Ok(ours) => ours.kernels.iter().enumerate().map(kernel).collect(),
            Err(error) => {
                let mut failed = blank(0);
                failed.record.error = Some(error.to_string());
                vec![failed]
            }
        }
    }

    /// The competitors of a case, prepared or with the reason why not.
    fn prepared(
        &self,
        case: &Case,
        cache: Cache,
        peers: &mut Peers,
        step: &impl Fn(&str),
    ) -> Vec<Contestant> {
        let names = self.competitors(case, peers);
        if names.is_empty() {
            return Vec::new(); // no files of patterns either
        }
        let bytes = match cache {
            Cache::Warm | Cache::Cold => flush_bytes(&self.stream),
            Cache::Rotated => rotation_bytes(&self.stream),
        };
        peers.set_cache(cache, bytes);
        let peer_case = case.peer_case(self.seed, &self.scratch);
        let peer_case = peer_case.map_err(|error| error.to_string());
        let prepare = |name: String| {
            step(&format!("{name}: inputs and check"));
            let record = self.record(case, cache, &name);
            let mut contestant = Contestant::new(Who::Peer(name.clone()), record);
            contestant.record.reference = peers.is_reference(&name);
            contestant.record.deterministic = peers.is_deterministic(&name);
            let prepared = peer_case.as_ref().map_err(Clone::clone).and_then(|peer_case| {
                peers.prepare(peer_case, &name).map_err(|failure| failure.to_string())
            });
            match prepared {
                Ok(prepared) => {
                    let settings = Some(prepared.settings);
                    contestant.record.settings = settings.filter(|settings| !settings.is_empty());
                    contestant.judge(prepared.verified, prepared.rel_err);
                }
                Err(message) => contestant.record.error = Some(message),
            }
            contestant
        };
        names.into_iter().map(prepare).collect()
    }

    /// One warm-up round that is not counted, then rounds in which every contestant has a window.
    fn rounds(
        &self,
        order: Order,
        contestants: &mut [Contestant],
        window: &mut dyn FnMut(&Who) -> Result<Window, String>,
        step: &dyn Fn(&str),
    ) {
        let mut ready: Vec<_> =
            contestants.iter_mut().filter(|contestant| contestant.record.error.is_none()).collect();
        let (count, rounds) = (ready.len(), order.rounds(ready.len(), self.suite.rounds));
        for (number, contestant) in ready.iter_mut().enumerate() {
            contestant.record.protocol = Some(Protocol::of(order, number, count));
        }
        for round in 0..=rounds {
            // The warm-up round has the order of the last round, which precedes the first in the
            // cycle.
            let of_round = round.checked_sub(1).unwrap_or(rounds.saturating_sub(1));
            for number in order.of_round(count, of_round) {
                std::thread::sleep(ms(self.suite.gap_ms));
                let contestant = ready.get_mut(number);
                let Some(contestant) = contestant.filter(|one| one.record.error.is_none()) else {
                    // An empty place, or a contestant that has failed: the pause leaves the next
                    // one the same rested GPU in every case.
                    std::thread::sleep(ms(self.suite.window_ms));
                    continue;
                };
                let Contestant { record, who, times, windows } = &mut **contestant;
                let is_ceiling = record.op == "ceiling";
                let name = if is_ceiling { &record.case } else { &record.implementation };
                step(&format!("{name}: round {round} of {rounds}"));
                let begin = Instant::now();
                match window(who) {
                    Err(message) => record.error = Some(message),
                    Ok(window) if round > 0 => {
                        record.launches = Some(window.launches);
                        times.push(window.us);
                        windows.push((begin, Instant::now()));
                    }
                    Ok(_) => {}
                }
            }
        }
    }

    /// A record of a case without results.
    fn record(&self, case: &Case, cache: Cache, implementation: &str) -> Record {
        let work = case.work();
        let limit = self.ceilings.limit(&work, case.dtype(), cache);
        Record {
            suite: self.suite.name.clone(),
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
        }
    }

    /// A record with the fields that all records of this run share.
    fn blank(&self, cache: Cache) -> Record {
        Record {
            schema: SCHEMA,
            run: self.id.clone(),
            window_ms: self.suite.window_ms,
            gap_ms: self.suite.gap_ms,
            commit: self.machine.commit.clone(),
            gpu: self.machine.gpu.clone(),
            driver: self.machine.driver.clone(),
            cache: cache.name().to_owned(),
            ..Record::default()
        }
    }

    /// The result with the energy of a launch, where that is measured.
    fn finish_case(&self, mut contestant: Contestant) -> Record {
        let watts = self.energy.as_ref().map(|energy| energy.watts(&contestant.windows));
        if watts == Some(None) {
            let still = || "the counter of energy stood still in the windows".to_owned();
            contestant.record.error.get_or_insert_with(still);
        }
        let mut record = self.finish(contestant);
        record.joules = watts.flatten().zip(record.us).map(|(watts, us)| watts * us * 1e-6);
        record
    }

    fn finish(&self, Contestant { mut record, mut times, windows, .. }: Contestant) -> Record {
        record.date = record::now();
        // Who failed in a late round gets no time: there are fewer rounds than of the others.
        if record.error.is_some() {
            return record;
        }
        record.rounds = times.len();
        record.us = median(&mut times);
        (record.us_min, record.us_max) = (times.first().copied(), times.last().copied());
        record.tflops = record.us.filter(|_| record.flops > 0.0).map(|us| record.flops / us * 1e-6);
        record.ceiling_fraction = record.us.and_then(|us| Some(record.ceiling_us? / us));
        let sample = self.telemetry.during(&windows);
        (record.clock_mhz, record.power_w) = (sample.clock_mhz, sample.power_w);
        record.temperature_c = sample.temperature_c;
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
