//! `cargo xtask kernels`: compiles the kernels of the manifest into images in `prebuilt/` of
//! blockflash-sys and blockflash-images.

mod compile;
mod lineinfo;
pub mod lock;
mod ptxas;
pub mod sources;
pub mod store;
pub mod toolchain;

pub use compile::{build_fingerprint, violations};
pub use lineinfo::with_line_information;

use crate::{sample, workspace::target_dir};
use anyhow::{Result, bail};
use blockflash_sys::{Kernel, Target, manifest};
use compile::{Image, compile};
use indicatif::{ProgressBar, ProgressStyle};
use lock::Lock;
use rayon::{ThreadPoolBuilder, prelude::*};
use sources::sha256;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::{Duration, Instant},
};
use store::Images;
use toolchain::Toolchain;

/// Compile the kernels into prebuilt/ of blockflash-sys and blockflash-images, or prove that the
/// images there are up to date.
#[derive(clap::Args, Default)]
pub struct Args {
    /// Compile only images whose name contains this text.
    #[arg(long, value_name = "SUBSTRING")]
    only: Vec<String>,
    /// Compile only images for this target; may be repeated. sm_90a includes sm_90, since such a
    /// GPU uses both.
    #[arg(long, value_name = "TARGET", value_parser = parse_target)]
    pub arch: Vec<Target>,
    /// Write nothing: rebuild, and fail unless the committed images are exactly what the sources
    /// give.
    #[arg(long)]
    pub check: bool,
    /// With --check: rebuild a sixth of the images only, others with each commit.
    #[arg(long, requires = "check")]
    sample: bool,
    /// Also rebuild images whose sources and flags have not changed.
    #[arg(long)]
    force: bool,
    /// Compile with this nvcc rather than with the pinned wheels.
    #[arg(long, value_name = "PATH")]
    nvcc: Option<PathBuf>,
    /// Number of kernels compiled at the same time [default: one per core].
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
}

impl Args {
    fn selects(&self, kernel: &Kernel) -> bool {
        is_among(kernel.target, &self.arch)
            && (self.only.is_empty()
                || self.only.iter().any(|part| kernel.image_name().contains(part.as_str())))
    }
}

/// Whether `--arch` selects a target. Without `--arch` all targets are selected, and sm_90a implies
/// sm_90.
pub fn is_among(target: Target, arch: &[Target]) -> bool {
    let is = |&arch: &Target| arch == target || (arch == Target::Sm90a && target == Target::Sm90);
    arch.is_empty() || arch.iter().any(is)
}

/// Parses the name of a target.
pub fn parse_target(text: &str) -> Result<Target, String> {
    let names = Target::ALL.map(Target::name).join(", ");
    Target::ALL
        .into_iter()
        .find(|target| target.name() == text)
        .ok_or(format!("expected one of {names}"))
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let mut kernels: Vec<&Kernel> =
        manifest::kernels().iter().filter(|kernel| args.selects(kernel)).collect();
    if args.sample {
        kernels = sample::of_commit(kernels)?;
    }
    if kernels.is_empty() {
        bail!("no kernel of the manifest is selected");
    }
    let toolchain = match &args.nvcc {
        Some(path) => Toolchain::at(path)?,
        None => Toolchain::pinned()?,
    };
    let (lock, committed) = (lock::load()?, store::load()?);
    let mut todo = Vec::new();
    for &kernel in &kernels {
        if args.check || args.force || !is_current(kernel, &lock, &committed, &toolchain.version)? {
            todo.push(kernel);
        }
    }
    let started = Instant::now();
    let built = compile_all(&todo, &toolchain, args.jobs)?;
    let mut problems = Problems::default();
    let mut images = Vec::new();
    for (kernel, result) in todo.iter().zip(built) {
        match result {
            Ok((image, time)) => images.push((*kernel, image, time)),
            Err(error) => problems.add(kernel, format!("{error:#}")),
        }
    }
    if args.check {
        check(&lock, &images, &committed, &mut problems);
    } else {
        print_usage(&images);
        write(lock, images.iter().map(|(_, image, _)| image), committed)?;
    }
    let unchanged = kernels.len() - todo.len();
    println!(
        "{} of {} images {} with nvcc {} in {:.0} s, {unchanged} unchanged",
        images.len(),
        kernels.len(),
        if args.check { "rebuilt" } else { "written" },
        toolchain.version,
        started.elapsed().as_secs_f64()
    );
    problems.report(if args.check {
        "; `cargo xtask kernels` rebuilds outdated images"
    } else {
        ""
    })
}

/// Whether the committed image was built from the present sources and flags.
fn is_current(
    kernel: &Kernel,
    lock: &Lock,
    committed: &Images,
    nvcc_version: &str,
) -> Result<bool> {
    let name = kernel.image_name();
    let Some(entry) = lock.get(&name) else { return Ok(false) };
    // A source that cannot be read counts as changed; the build reports the error.
    let Ok(source) = sources::fingerprint(kernel) else { return Ok(false) };
    Ok(entry.source == source
        && entry.build == build_fingerprint(kernel, nvcc_version)?
        && committed.get(&name).is_some_and(|image| sha256(image) == entry.sha256))
}

type Compiled = Result<(Image, Duration)>;

/// A kernel with its compiled image and the time that compilation took.
type Usage<'r> = (&'r Kernel, Image, Duration);

/// Compiles kernels on several threads; results are in the order of the kernels.
fn compile_all(
    kernels: &[&Kernel],
    toolchain: &Toolchain,
    jobs: Option<usize>,
) -> Result<Vec<Compiled>> {
    let scratch = target_dir("kernels/scratch")?;
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {elapsed} {wide_msg}")?;
    let bar = ProgressBar::new(kernels.len() as u64).with_style(style);
    // Zero threads means one per core.
    let threads = ThreadPoolBuilder::new().num_threads(jobs.unwrap_or(0)).build()?;
    let compiled = |kernel: &&Kernel| {
        let started = Instant::now();
        let image =
            compile(kernel, toolchain, &scratch, &[]).map(|image| (image, started.elapsed()));
        bar.set_message(kernel.image_name());
        bar.inc(1);
        image
    };
    let built = threads.install(|| kernels.par_iter().map(compiled).collect());
    bar.finish_and_clear();
    Ok(built)
}

fn print_usage(images: &[Usage]) {
    for (kernel, image, time) in images {
        let entry = &image.entry;
        println!(
            "{:>4} registers {:>6} spilled {:>7} smem {:>5.1} s  {}",
            entry.registers,
            entry.spill_bytes,
            entry.smem_static + entry.smem_dynamic,
            time.as_secs_f64(),
            entry.image
        );
        for violation in violations(kernel, entry) {
            println!("     warning: {violation}");
        }
    }
}

/// Writes archives and the lock file; images that no kernel uses are dropped.
fn write<'i>(
    mut lock: Lock,
    built: impl Iterator<Item = &'i Image>,
    mut images: Images,
) -> Result<()> {
    for image in built {
        images.insert(image.entry.image.clone(), image.bytes.clone());
        lock.insert(image.entry.image.clone(), image.entry.clone());
    }
    let wanted = image_names();
    lock.retain(|name, _| wanted.contains(name));
    for path in store::store(&images)? {
        println!("changed: {}", path.display());
    }
    lock::store(&lock)
}

/// Repacks the committed images: needed after a change of the archive layout.
pub fn repack() -> Result<()> {
    let changed = store::store(&store::load()?)?;
    println!("{} archives changed", changed.len());
    Ok(())
}

/// Names of the images that kernels use.
pub fn image_names() -> BTreeSet<String> {
    manifest::kernels().iter().map(Kernel::image_name).collect()
}

/// Compares fresh images with the committed ones.
fn check(lock: &Lock, images: &[Usage], committed: &Images, problems: &mut Problems) {
    for (kernel, image, _) in images {
        let entry = &image.entry;
        match committed.get(&entry.image) {
            None => problems.add(kernel, "has no committed image".into()),
            Some(bytes) if *bytes != image.bytes => {
                problems.add(kernel, "is not what the sources give".into())
            }
            Some(_) => {}
        }
        match lock.get(&entry.image) {
            None => problems.add(kernel, "has no line in kernels.lock".into()),
            Some(locked) if locked != entry => {
                problems.add(kernel, "has an outdated line in kernels.lock".into())
            }
            Some(_) => {}
        }
        for violation in violations(kernel, entry) {
            problems.add(kernel, violation);
        }
    }
    let wanted = image_names();
    for name in committed.keys().filter(|name| !wanted.contains(*name)) {
        problems.add_name(name.clone(), "is not in the manifest".into());
    }
}

/// Failures grouped by message, each with all the images that it applies to.
#[derive(Default)]
struct Problems(BTreeMap<String, Vec<String>>);

impl Problems {
    fn add(&mut self, kernel: &Kernel, message: String) {
        self.add_name(kernel.image_name(), message);
    }

    fn add_name(&mut self, image: String, message: String) {
        self.0.entry(message).or_default().push(image);
    }

    fn report(self, advice: &str) -> Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        for (message, images) in &self.0 {
            eprintln!("\n{}:\n{message}", images.join("\n"));
        }
        let count: usize = self.0.values().map(Vec::len).sum();
        bail!("{count} problems{advice}");
    }
}
