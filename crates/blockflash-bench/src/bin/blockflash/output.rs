//! What a run says on stdout, which may be closed at any time.

use crate::failure::{Result, bail};
use crate::measure::Timing;
use crate::table::{self, Facts};
use blockflash_bench::machine::processor_name;
use blockflash_ops::{DType, Device};
use blockflash_oracle::Comparison;
use blockflash_sys::Kernel;
use serde_json::{Map, Value, json};
use std::io::{ErrorKind, Write, stdout};
use std::process::ExitCode;

/// Prints a text and a newline. A reader that went away (`blockflash … | head -1`) has seen what it
/// wanted.
pub fn print(text: &str) -> Result<()> {
    let mut out = stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            bail!("standard output: {error}")
        }
        _ => Ok(()),
    }
}

/// One run of one operation.
pub struct RunReport<'a> {
    pub operation: &'static str,
    pub device: &'a Device,
    /// Why it is this device, if that may surprise.
    pub note: Option<String>,
    /// `None` on the CPU, and when there was nothing to compute.
    pub kernel: Option<&'a Kernel>,
    pub tensors: Vec<(&'static str, Vec<usize>, DType)>,
    pub details: Vec<(&'static str, String)>,
    pub flops: f64,
    pub timing: Timing,
    pub checks: Vec<(&'static str, Comparison)>,
    /// Files, with remarks.
    pub written: Vec<String>,
}

impl RunReport<'_> {
    /// 1 if a check failed.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(u8::from(!self.passed()))
    }

    fn passed(&self) -> bool {
        self.checks.iter().all(|(_, check)| check.passed())
    }

    fn tflops(&self) -> f64 {
        self.flops / self.timing.typical_us() / 1e6
    }

    /// A table, or one JSON object on one line.
    pub fn render(&self, json: bool) -> Result<String> {
        Ok(if json { serde_json::to_string(&self.json()?)? } else { self.facts().to_string() })
    }

    fn facts(&self) -> Facts {
        let mut facts = Facts::default();
        for (name, shape, dtype) in &self.tensors {
            facts.add(name, format!("{shape:?} {dtype}"));
        }
        for (name, value) in &self.details {
            facts.add(name, value);
        }
        facts.add("device", device_name(self.device));
        if let Some(note) = &self.note {
            facts.add("note", note);
        }
        if let Some(kernel) = self.kernel {
            facts.add("kernel", format!("{} ({})", kernel.symbol(), kernel.target));
        }
        let first = table::time(self.timing.first_us);
        let time = match (self.timing.median_us, self.timing.repeats, self.timing.launches) {
            (Some(median), 1, 1) => {
                format!("{}, one run after the first ({first})", table::time(median))
            }
            (Some(median), repeats, launches) => {
                let runs = if launches == 1 {
                    repeats.to_string()
                } else {
                    format!("{repeats} x {launches}")
                };
                format!("{}, median of {runs} runs after the first ({first})", table::time(median))
            }
            (None, ..) => format!("{first}, first run"),
        };
        facts.add("time", time);
        if self.flops > 0.0 {
            let per_second = table::flops(self.tflops() * 1e12);
            facts.add("speed", format!("{per_second}/s ({})", table::flops(self.flops)));
        }
        for (name, check) in &self.checks {
            let verdict = if check.passed() { "ok" } else { "FAILED" };
            let relation = if check.passed() { "of" } else { "exceeds" };
            let sample = match check.checked {
                all if all == check.total => "all".to_owned(),
                some => format!("a sample of {}", table::count(some)),
            };
            facts.add(
                &format!("check {name}"),
                format!(
                    "{verdict}: error {:.1e} {relation} {:.1e} allowed, {sample} elements",
                    check.error, check.limit
                ),
            );
        }
        for file in &self.written {
            facts.add("written", file);
        }
        facts
    }

    fn json(&self) -> Result<Value> {
        let mut object = Map::new();
        let mut set = |name: &str, value: Value| object.insert(name.to_owned(), value);
        set("operation", json!(self.operation));
        set("device", json!(self.device.to_string()));
        set("device_name", json!(device_name(self.device)));
        set("note", json!(self.note));
        set("kernel", json!(self.kernel.map(|kernel| kernel.symbol())));
        set("target", json!(self.kernel.map(|kernel| kernel.target.name())));
        let tensors = self.tensors.iter().map(|(name, shape, dtype)| {
            ((*name).to_owned(), json!({ "shape": shape, "dtype": dtype.name() }))
        });
        set("tensors", Value::Object(tensors.collect()));
        set(
            "options",
            self.details.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect(),
        );
        set("flops", json!(self.flops));
        set("time", serde_json::to_value(self.timing)?);
        set("tflops_per_second", json!(self.tflops()));
        if !self.checks.is_empty() {
            let mut checks = Map::new();
            for (name, check) in &self.checks {
                checks.insert((*name).to_owned(), serde_json::to_value(check)?);
            }
            checks.insert("passed".to_owned(), json!(self.passed()));
            set("check", Value::Object(checks));
        }
        set("written", json!(self.written));
        Ok(Value::Object(object))
    }
}

/// `cuda:0 (NVIDIA H200, sm_90)`, `cpu (AMD EPYC, 16 threads)`.
pub fn device_name(device: &Device) -> String {
    if let Some(gpu) = device.cuda_properties() {
        return format!("{device} ({}, {})", gpu.name, gpu.compute_capability);
    }
    let name = processor_name().map_or(String::new(), |name| format!("{name}, "));
    format!("cpu ({name}{} threads)", rayon::current_num_threads())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_check_exits_with_1() {
        let report = |error: f64| {
            let mut check = Comparison::default();
            (check.error, check.limit) = (error, 0.25);
            let timing = Timing { first_us: 1500.0, median_us: Some(2.0), repeats: 3, launches: 1 };
            let report = RunReport {
                operation: "attention",
                device: &Device::cpu(),
                note: None,
                kernel: None,
                tensors: Vec::new(),
                details: Vec::new(),
                flops: 8e6,
                timing,
                checks: vec![("o", check), ("lse", Comparison::default())],
                written: Vec::new(),
            };
            (report.exit_code(), report.render(false).unwrap(), report.render(true).unwrap())
        };
        let (code, table, json) = report(0.25);
        assert_eq!(code, ExitCode::SUCCESS);
        assert!(
            table.contains("ok: error 2.5e-1 of 2.5e-1 allowed") && table.contains("4.00 TFLOP/s"),
            "{table}"
        );
        assert!(
            json.contains(r#""passed":true"#) && json.contains(r#""tflops_per_second":4.0"#),
            "{json}"
        );
        for error in [0.3, f64::INFINITY, f64::NAN] {
            let (code, table, json) = report(error);
            assert_eq!(code, ExitCode::from(1));
            assert!(
                table.contains("FAILED: error") && json.contains(r#""passed":false"#),
                "{table}{json}"
            );
        }
    }
}
