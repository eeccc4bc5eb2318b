//! `cargo xtask ci`: everything that continuous integration checks, cheap checks first.

use crate::{
    bindgen, candle, deny, docs, emulate, fmt, kernels, package, python, sass, test, tidy,
    workspace,
};
use anyhow::{Result, bail};
use blockflash_sys::Target;
use std::time::{Duration, Instant};

/// Run everything that continuous integration checks.
#[derive(clap::Args)]
pub struct Args {
    /// Rebuild, compare and disassemble only the images for this target; may be repeated [default:
    /// all images].
    #[arg(long, value_name = "TARGET", value_parser = kernels::parse_target)]
    arch: Vec<Target>,
}

/// Runs every step even when an earlier one failed; the count of the tests comes last.
pub fn run(args: &Args) -> Result<()> {
    let mut steps = Steps::default();
    steps.run("format", || fmt::run(&fmt::Args { check: true }));
    steps.run("tidy", || tidy::run(&tidy::Args::default()));
    steps.run("packages", || package::run(&package::Args::default()));
    steps.run("clippy", || {
        let arguments =
            ["clippy", "--locked", "--workspace", "--all-targets", "--", "--deny", "warnings"];
        workspace::run(workspace::cargo().args(arguments))
    });
    steps.run("documentation", || {
        let arguments = ["doc", "--locked", "--workspace", "--no-deps"];
        workspace::run(workspace::cargo().args(arguments).env("RUSTDOCFLAGS", "--deny warnings"))
    });
    steps.run("guide", || docs::run(&docs::Args::default()));
    steps.run("candle", || candle::run(&candle::Args::default()));
    steps.run("dependencies", || deny::run(&deny::Args::default()));
    steps.run("bindgen", || bindgen::run(&bindgen::Args { check: true }));
    steps.run("kernels", || kernels::run(&kernels::Args::checking(&args.arch)));
    steps.run("sass", || sass::run(&sass::Args::checking(&args.arch)));
    steps.run("emulate", || emulate::run(&emulate::Args::checking()));
    let mut summary = test::Summary::default();
    steps.run("tests", || {
        let (counts, result) = test::tests(&test::Args::default())?;
        summary.add(counts);
        result
    });
    steps.run("python", || {
        let (counts, result) = python::tests(&python::Args::default())?;
        summary.add(counts);
        result
    });
    steps.print();
    // The count stands last in either case.
    let failed: Vec<&str> =
        steps.0.iter().filter(|step| step.error.is_some()).map(|step| step.name).collect();
    if !failed.is_empty() {
        bail!(
            "{} of {} steps failed: {}\n{summary}",
            failed.len(),
            steps.0.len(),
            failed.join(", ")
        );
    }
    println!("{summary}");
    Ok(())
}

struct Step {
    name: &'static str,
    time: Duration,
    error: Option<String>,
}

#[derive(Default)]
struct Steps(Vec<Step>);

impl Steps {
    fn run(&mut self, name: &'static str, step: impl FnOnce() -> Result<()>) {
        println!("\n=== {name}");
        let started = Instant::now();
        let error = step().err().map(|error| format!("{error:#}"));
        if let Some(error) = &error {
            eprintln!("error: {error}");
        }
        self.0.push(Step { name, time: started.elapsed(), error });
    }

    fn print(&self) {
        println!();
        for step in &self.0 {
            let verdict = step
                .error
                .as_deref()
                .map_or("ok", |error| error.lines().next().unwrap_or("failed"));
            println!("{:<14} {:>5.0} s  {verdict}", step.name, step.time.as_secs_f64());
        }
    }
}
