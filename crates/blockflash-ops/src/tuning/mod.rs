//! Measured choices of kernels, which an owner of a GPU makes with `blockflash tune` and a program
//! loads by name.
//!
//! Selection estimates which kernel is the fastest. Where a record says otherwise for a problem
//! like the one at hand, on the same GPU, the record decides. It only ever exchanges the selected
//! kernel for another one that accepts the problem by the same rules, so a record that is wrong, or
//! was written by somebody hostile, costs time and nothing else. No record is loaded unless the
//! program asks for it, and without one selection does not change. No environment variable names a
//! record.
//!
//! ```no_run
//! let tuning = blockflash_ops::tuning::load("benches/tuned/nvidia-l4.jsonl")?;
//! for gpu in tuning.gpus() {
//!     println!("{}: {} cases", gpu.name, gpu.cases());
//! }
//! # Ok::<(), blockflash_ops::Error>(())
//! ```
//!
//! # Which problems a record decides about
//!
//! Dense attention without a mask or with a causal one, attention under a block mask, and BSR
//! matmul; [`Likeness`] has what is compared. A problem is decided by the nearest case of its class
//! whose sizes are all within a factor of √2 of its own, by a kernel that was measured at least 2 %
//! faster than the selected one there. Everything else is left to the estimate: other masks, packed
//! sequences, problems in between, and a selected kernel that was not measured. Attention to a
//! cache is left out on purpose: which kernel takes a sequence must not depend on its batch.

mod likeness;
mod record;

pub use likeness::Likeness;
pub use record::Measured;

use crate::{Error, Result};
use blockflash_safe::CudaProperties;
use blockflash_sys::Kernel;
use record::read_lines;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// How much faster than the selected kernel another one must have been: less is within what
/// repeats differ by.
const MARGIN: f64 = 1.02;

/// How often [`TUNING`] has changed. A selection reads only this as long as nothing was loaded.
static GENERATION: AtomicU64 = AtomicU64::new(0);
static TUNING: RwLock<Option<Arc<Tuning>>> = RwLock::new(None);

/// Reads a record and lets it decide about every later selection of this process, in place of what
/// was loaded before. Prepared calls keep their kernels.
///
/// # Errors
/// [`Error::Tuning`], and then nothing changes.
pub fn load(path: impl AsRef<Path>) -> Result<Arc<Tuning>> {
    let tuning = Arc::new(Tuning::read(path)?);
    set(Some(tuning.clone()));
    Ok(tuning)
}

/// Lets estimates decide again.
pub fn unload() {
    set(None);
}

/// What is loaded.
pub fn loaded() -> Option<Arc<Tuning>> {
    TUNING.read().unwrap_or_else(PoisonError::into_inner).clone()
}

fn set(tuning: Option<Arc<Tuning>>) {
    let mut loaded = TUNING.write().unwrap_or_else(PoisonError::into_inner);
    *loaded = tuning;
    GENERATION.fetch_add(1, Ordering::Release);
}

/// A number that changes with every [`load`] and [`unload`].
#[inline]
pub(crate) fn generation() -> u64 {
    GENERATION.load(Ordering::Acquire)
}

/// A kernel that was measured to be faster than the selected one, if any is loaded.
#[inline]
pub(crate) fn faster(
    selected: &Kernel,
    problem: impl FnOnce() -> Option<Likeness>,
    gpu: &CudaProperties,
    accepts: impl Fn(&Kernel) -> bool,
) -> Option<&'static Kernel> {
    if generation() == 0 {
        return None;
    }
    loaded()?.faster(selected, &problem()?, gpu, accepts)
}

/// The kernels that were measured, by GPU and case, in memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tuning {
    path: PathBuf,
    gpus: Vec<TunedGpu>,
    unknown: usize,
    failed: usize,
}

/// The cases of one GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct TunedGpu {
    /// Product name, as the driver reports it.
    pub name: String,
    /// Number of SMs: products of one name may differ in it.
    pub multiprocessors: u32,
    cases: Vec<TunedCase>,
}

#[derive(Clone, Debug, PartialEq)]
struct TunedCase {
    likeness: Likeness,
    /// The run that measured it.
    run: String,
    /// Kernels and microseconds of a launch, the fastest first.
    times: Vec<(&'static Kernel, f64)>,
}

impl TunedGpu {
    /// Number of cases.
    pub fn cases(&self) -> usize {
        self.cases.len()
    }
}

impl Tuning {
    /// Reads a record of `blockflash tune`, without loading it.
    ///
    /// # Errors
    /// [`Error::Tuning`] if the file cannot be read, if a line of it is no JSON or no record, or if
    /// it has no measurement of `blockflash tune`.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let wrong = |problem: String| Error::Tuning { path: path.to_owned(), problem };
        let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        let mut tuning = Self::parse(&text).map_err(wrong)?;
        path.clone_into(&mut tuning.path);
        Ok(tuning)
    }

    /// The file that it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The GPUs that were measured.
    pub fn gpus(&self) -> &[TunedGpu] {
        &self.gpus
    }

    /// The cases of a GPU; none if it was not measured.
    pub fn gpu(&self, gpu: &CudaProperties) -> Option<&TunedGpu> {
        let same = |tuned: &&TunedGpu| {
            tuned.multiprocessors == gpu.multiprocessors && tuned.name == gpu.name
        };
        self.gpus.iter().find(same)
    }

    /// Lines about kernels that this version does not have, which count for nothing.
    pub fn unknown_kernels(&self) -> usize {
        self.unknown
    }

    /// Lines of kernels that failed or whose result was wrong, which count for nothing.
    pub fn failed(&self) -> usize {
        self.failed
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut tuning = Self::default();
        let mut lines = 0;
        for line in read_lines(text) {
            lines += 1;
            tuning.add(line?);
        }
        if lines == 0 {
            return Err("no line is a measurement of `blockflash tune`".to_owned());
        }
        for case in tuning.gpus.iter_mut().flat_map(|gpu| &mut gpu.cases) {
            case.times.sort_by(|a, b| a.1.total_cmp(&b.1));
        }
        Ok(tuning)
    }

    /// A later run of a case replaces the earlier one, since only kernels of one run were measured
    /// in turns.
    fn add(&mut self, line: record::Line) {
        let Some(us) = line.us else {
            self.failed += 1;
            return;
        };
        let Some(kernel) = record::kernel(&line.measured.image) else {
            self.unknown += 1;
            return;
        };
        let Measured { multiprocessors, problem, .. } = line.measured;
        let is_gpu =
            |gpu: &TunedGpu| gpu.multiprocessors == multiprocessors && gpu.name == line.gpu;
        let gpu = position_or_push(&mut self.gpus, is_gpu, || TunedGpu {
            name: line.gpu.clone(),
            multiprocessors,
            cases: Vec::new(),
        });
        let case = position_or_push(
            &mut gpu.cases,
            |case| case.likeness == problem,
            || TunedCase { likeness: problem, run: line.run.clone(), times: Vec::new() },
        );
        if case.run != line.run {
            case.times.clear();
            case.run = line.run;
        }
        case.times.retain(|(other, _)| *other != kernel);
        case.times.push((kernel, us));
    }

    /// The fastest kernel of the nearest case that accepts the problem, if it was faster than the
    /// selected one there.
    fn faster(
        &self,
        selected: &Kernel,
        problem: &Likeness,
        gpu: &CudaProperties,
        accepts: impl Fn(&Kernel) -> bool,
    ) -> Option<&'static Kernel> {
        if !problem.is_valid() {
            return None;
        }
        let distances = self.gpu(gpu)?.cases.iter().filter_map(|case| {
            let distance = case.likeness.distance(problem)?;
            Some((distance, case))
        });
        let (_, case) = distances.min_by(|a, b| a.0.total_cmp(&b.0))?;
        let (_, of_selected) = case.times.iter().find(|(kernel, _)| *kernel == selected)?;
        let better = case.times.iter().take_while(|(_, us)| us * MARGIN <= *of_selected);
        let mut better = better.map(|(kernel, _)| *kernel);
        better.find(|kernel| accepts(kernel))
    }
}

/// The first element that fulfils the condition; a new one at the end if none does.
fn position_or_push<T>(
    all: &mut Vec<T>,
    is_it: impl Fn(&T) -> bool,
    new: impl FnOnce() -> T,
) -> &mut T {
    let at = all.iter().position(is_it).unwrap_or_else(|| {
        all.push(new());
        all.len() - 1
    });
    &mut all[at]
}

#[cfg(test)]
mod tests;
