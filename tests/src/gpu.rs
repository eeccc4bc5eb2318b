//! Handling of the GPU in tests: the loud skip, the watchdog, the kernels to run, and the record of
//! passes.

use blockflash_ops::{Device, Stream};
use blockflash_safe::{CudaProperties, Event, cuda_status};
use blockflash_sys::{Kernel, image, manifest};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Longest time that a launch may take. The slowest correct one takes well under a second.
const LAUNCH_LIMIT: Duration = Duration::from_secs(30);

/// A usable GPU and a stream on it.
#[derive(Clone)]
pub struct Gpu {
    /// The GPU.
    pub device: Device,
    /// A stream of the test's own.
    pub stream: Stream,
    /// Properties of the GPU.
    pub properties: CudaProperties,
}

/// The GPU for a test, or `None` after one line on stderr that says that the test was skipped. With
/// `BLOCKFLASH_REQUIRE_GPU=1` in the environment, a skip is a failure.
pub fn gpu(test: &str) -> Option<Gpu> {
    let device = Device::best();
    let Some(properties) = device.cuda_properties().cloned() else {
        let required = std::env::var("BLOCKFLASH_REQUIRE_GPU").is_ok_and(|value| value == "1");
        let reason = match cuda_status() {
            Ok(driver) => format!("{} GPU(s), none of them usable", driver.devices.len()),
            Err(error) => error.to_string(),
        };
        assert!(
            !required,
            "{test} needs a GPU because BLOCKFLASH_REQUIRE_GPU=1, but there is none: {reason}"
        );
        let line = format!("SKIPPED (no GPU): {test}");
        // Printed once, where it is seen in either case: the harness hides the output of passing
        // tests unless it is told to show it.
        if std::env::args().any(|argument| argument == "--show-output" || argument == "--nocapture")
        {
            println!("{line}");
        } else {
            say(&line);
        }
        return None;
    };
    let stream = device.stream().expect("a stream on a usable GPU");
    Some(Gpu { device, stream, properties })
}

/// A line on stderr that the test harness does not capture.
pub fn say(line: &str) {
    // A closed stderr is no reason to fail.
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Waits for everything queued on a stream. A hanging launch cannot be stopped: after the limit,
/// the process reports which launch it was and aborts.
pub fn wait(stream: &Stream, what: &dyn Fn() -> String) -> Result<(), String> {
    if stream.device().is_cpu() {
        return Ok(());
    }
    let done = Event::new(stream.device(), false).map_err(|error| error.to_string())?;
    done.record(stream).map_err(|error| error.to_string())?;
    let start = Instant::now();
    while !done.is_done().map_err(|error| error.to_string())? {
        if start.elapsed() > LAUNCH_LIMIT {
            say(&format!("WATCHDOG: a launch did not end within {LAUNCH_LIMIT:?}: {}", what()));
            std::process::abort();
        }
        // Most launches end within microseconds.
        if start.elapsed() > Duration::from_millis(2) {
            std::thread::sleep(Duration::from_micros(200));
        } else {
            std::hint::spin_loop();
        }
    }
    Ok(())
}

impl Gpu {
    /// Kernels of the table that this GPU can run, by their target and their shared memory.
    /// `BLOCKFLASH_GPU_KERNELS` in the environment, a comma-separated list of parts of image names,
    /// leaves out all others, loudly: passes are recorded by image, so after a change of some
    /// images only these need to run.
    pub fn kernels(&self) -> impl Iterator<Item = &'static Kernel> + '_ {
        let only = std::env::var("BLOCKFLASH_GPU_KERNELS").ok();
        if let Some(only) = &only {
            say(&format!("ONLY SOME KERNELS (BLOCKFLASH_GPU_KERNELS): {only}"));
        }
        self.all_kernels().filter(move |kernel| {
            only.as_ref()
                .is_none_or(|only| only.split(',').any(|part| kernel.image_name().contains(part)))
        })
    }

    /// All kernels that this GPU runs, from which the library selects.
    pub fn all_kernels(&self) -> impl Iterator<Item = &'static Kernel> + '_ {
        manifest::kernels().iter().filter(|kernel| {
            kernel.target.runs_on(self.properties.compute_capability)
                && kernel.smem_bytes() <= self.properties.smem_per_block
        })
    }

    /// Checks groups of kernels, as many at a time as the host has cores to compute references,
    /// each group on a stream of its own. The passes of a group are recorded when it is done, so
    /// that an interrupted run keeps them. No kernel may be in two groups. Kernels that failed
    /// `before` are not recorded.
    pub fn check_groups<T: Send>(
        &self,
        suite: &str,
        before: &Report,
        groups: impl IntoIterator<Item = T>,
        check: impl Fn(T, &Self, &mut Report) + Sync,
    ) {
        let groups = Mutex::new(groups.into_iter().collect::<VecDeque<_>>());
        let count = groups.lock().unwrap().len();
        assert!(count > 0, "no kernel of the manifest runs on {}", self.properties.name);
        let failures = Mutex::new(Vec::new());
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let work = || {
            let stream = self.device.stream().expect("another stream");
            let gpu = Self { stream, ..self.clone() };
            // The lock is free while a group is checked.
            while let Some(group) = { groups.lock().unwrap().pop_front() } {
                let mut report = Report::default();
                check(group, &gpu, &mut report);
                for (image, outcome) in &before.0 {
                    report.0.entry(image.clone()).and_modify(|later| later.add(outcome));
                }
                failures.lock().unwrap().extend(report.close(&gpu, suite));
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..cores.min(count) {
                scope.spawn(work);
            }
        });
        require_none(&failures.into_inner().unwrap(), self);
    }

    /// Whether the GPU has this much memory; if not, one line says what is skipped.
    pub fn has_memory(&self, gigabytes: u64, what: &str) -> bool {
        let enough = self.properties.memory_bytes >= gigabytes << 30;
        if !enough {
            say(&format!("SKIPPED (needs a GPU with {gigabytes} GB): {what}"));
        }
        enough
    }

    /// Appends to the file named by `BLOCKFLASH_GPU_RECORD`, if it is set, that this image passed a
    /// suite on this GPU. `cases` is the number of output tensors that were compared.
    pub fn record(&self, kernel: &Kernel, suite: &str, cases: usize) {
        let Some(path) = std::env::var_os("BLOCKFLASH_GPU_RECORD") else { return };
        let driver = self.properties.driver_version;
        let line = serde_json::json!({
            "image": kernel.image_name(),
            "sha256": image_hash(kernel).expect("an image that was just run"),
            "suite": suite,
            "gpu": self.properties.name,
            "driver": format!("{}.{}", driver / 1000, driver % 1000 / 10),
            "cases": cases,
        });
        // One line in one write, because suites may run at the same time.
        let append = || {
            std::fs::OpenOptions::new()
                .create(true)
                .append(true)
                .open(&path)?
                .write_all(format!("{line}\n").as_bytes())
        };
        append().unwrap_or_else(|error| panic!("cannot append to {}: {error}", path.display()));
    }
}

/// Passes and failures of the kernels of a suite.
#[derive(Default)]
pub struct Report(BTreeMap<String, Outcome>);

#[derive(Default)]
struct Outcome {
    kernel: Option<&'static Kernel>,
    compared: usize,
    failures: Vec<String>,
}

impl Outcome {
    fn add(&mut self, other: &Self) {
        self.compared += other.compared;
        self.failures.extend_from_slice(&other.failures);
    }
}

impl Report {
    /// Runs one check of a kernel, which returns the number of compared outputs. A kernel that has
    /// failed a few times is not run again.
    pub fn run(&mut self, kernel: &'static Kernel, check: impl FnOnce() -> Result<usize, String>) {
        if self.is_wanted(kernel) {
            self.add(kernel, check());
        }
    }

    /// The same check of several kernels, side by side, each with a stream of its own.
    pub fn run_each<T: Sync>(
        &mut self,
        gpu: &Gpu,
        kernels: &[(&'static Kernel, T)],
        check: impl Fn(&'static Kernel, &T, &Stream) -> Result<usize, String> + Sync,
    ) {
        let stream = || gpu.device.stream().expect("another stream");
        let wanted = kernels.par_iter().filter(|(kernel, _)| self.is_wanted(kernel));
        let run = |stream: &mut Stream, (kernel, tile): &(&'static Kernel, T)| {
            (*kernel, check(kernel, tile, stream))
        };
        let results: Vec<_> = wanted.map_init(stream, run).collect();
        for (kernel, result) in results {
            self.add(kernel, result);
        }
    }

    /// Several cases with several kernels. As many cases at a time as the host has cores, each on a
    /// stream of its own: what `prepare` makes of a case, its reference above all, is shared by the
    /// kernels.
    pub fn run_cases<C: Sync, T: Sync, P>(
        &mut self,
        gpu: &Gpu,
        cases: &[C],
        kernels: &[(&'static Kernel, T)],
        prepare: impl Fn(&C) -> P + Sync,
        check: impl Fn(&C, &P, (&'static Kernel, &T), &Stream) -> Result<usize, String> + Sync,
    ) {
        let report = Mutex::new(self);
        let stream = || gpu.device.stream().expect("another stream");
        cases.par_iter().for_each_init(stream, |stream, case| {
            let prepared = prepare(case);
            for (kernel, tile) in kernels {
                if report.lock().unwrap().is_wanted(kernel) {
                    let result = check(case, &prepared, (kernel, tile), stream);
                    report.lock().unwrap().add(kernel, result);
                }
            }
        });
    }

    fn is_wanted(&self, kernel: &Kernel) -> bool {
        self.0.get(&kernel.image_name()).is_none_or(|outcome| outcome.failures.len() < 4)
    }

    fn add(&mut self, kernel: &'static Kernel, result: Result<usize, String>) {
        let outcome = self.0.entry(kernel.image_name()).or_default();
        outcome.kernel = Some(kernel);
        match result {
            Ok(compared) => outcome.compared += compared,
            Err(failure) => outcome.failures.push(failure),
        }
    }

    /// Records the kernels that passed everything, reports them, and fails with all failures if
    /// there are any.
    pub fn finish(self, gpu: &Gpu, suite: &str) {
        assert!(!self.0.is_empty(), "no kernel of the manifest runs on {}", gpu.properties.name);
        require_none(&self.close(gpu, suite), gpu);
    }

    /// Records the kernels that passed everything and returns the failures of the others.
    fn close(self, gpu: &Gpu, suite: &str) -> Vec<String> {
        let mut failures = Vec::new();
        for (image, outcome) in self.0 {
            match outcome.kernel {
                Some(kernel) if outcome.failures.is_empty() && outcome.compared > 0 => {
                    println!("{suite}: {image}: {} outputs compared", outcome.compared);
                    gpu.record(kernel, suite, outcome.compared);
                }
                _ => failures.push(format!("{image}:\n  {}", outcome.failures.join("\n  "))),
            }
        }
        failures
    }
}

fn require_none(failures: &[String], gpu: &Gpu) {
    let (count, name) = (failures.len(), &gpu.properties.name);
    assert!(failures.is_empty(), "{count} kernels failed on {name}:\n{}", failures.join("\n"));
}

/// SHA-256 of an image as the compiler wrote it, in lower-case hexadecimal.
pub fn image_hash(kernel: &Kernel) -> Result<String, image::ImageError> {
    let mut bytes = image::load(kernel)?;
    if kernel.target.is_ptx() {
        // The terminating NUL is added when the image is loaded.
        bytes.pop();
    }
    Ok(Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect())
}
