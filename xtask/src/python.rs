//! `cargo xtask python`: checks the Python package as its users get it, as an installed wheel.

use crate::{
    test::Summary,
    venv::Venv,
    workspace::{build_dir, cargo, list, read, run as run_command, shown, target_dir, write},
};
use anyhow::{Context, Result, anyhow, ensure};
use std::{path::PathBuf, process::Command};

/// The crate of the package.
pub(crate) const PACKAGE: &str = "crates/blockflash-python";

/// Format, lint, build and test the Python package, with a real torch but without a GPU.
#[derive(clap::Args, Default)]
pub struct Args {
    /// Format the Python files and mend what the linter can mend, before the tests.
    #[arg(long)]
    fix: bool,
    /// Passed on to pytest, for example `-k attention`.
    #[arg(last = true)]
    pytest: Vec<String>,
}

/// Runs the command and prints the counts last.
pub fn run(args: &Args) -> Result<()> {
    let (summary, result) = tests(args)?;
    result.map_err(|error| anyhow!("{error:#}\n{summary}"))?;
    println!("{summary}");
    Ok(())
}

/// Runs the command. Returns the counts of the tests, and an error if something failed.
pub fn tests(args: &Args) -> Result<(Summary, Result<()>)> {
    let venv = environment()?;
    let style = style(&venv, args.fix);
    install(&venv)?;
    let report = target_dir("python")?.join("pytest.xml");
    let mut pytest = venv.program("pytest");
    pytest.arg(format!("{PACKAGE}/tests")).arg("--junit-xml").arg(&report);
    // Most tests, and the imports of the processes that they start, keep one core busy. Whoever has
    // no tests left takes half of those that wait for the other.
    pytest.args("--numprocesses 2 --dist worksteal --durations 30".split(' ')).args(&args.pytest);
    pytest.env("BLOCKFLASH_FAKE_DRIVER", fake_driver()?);
    write(&report, "")?;
    let tested = said(&mut pytest);
    Ok((Summary::of_pytest(&read(&report)?), style.and(tested)))
}

/// The fake of the driver, on which targets of XLA for GPUs are called.
fn fake_driver() -> Result<PathBuf> {
    let build = "build --quiet --locked --package blockflash-fake-driver --lib";
    run_command(cargo().args(build.split(' ')))?;
    Ok(build_dir().join("debug/libblockflash_fake_driver.so"))
}

/// An environment with the package of this checkout and what its tests need.
pub(crate) fn installed() -> Result<Venv> {
    let venv = environment()?;
    install(&venv)?;
    Ok(venv)
}

fn environment() -> Result<Venv> {
    Venv::new("python", &format!("{PACKAGE}/tests/requirements.txt"))
}

fn style(venv: &Venv, fix: bool) -> Result<()> {
    let (mut format, mut check) = (venv.program("ruff"), venv.program("ruff"));
    format.arg("format").args((!fix).then_some("--check")).arg(".");
    check.arg("check").args(fix.then_some("--fix")).arg(".");
    said(&mut format).and(said(&mut check))
}

/// Builds the wheel and installs it beside the stand-ins for NVIDIA's libraries. The profile `dev`
/// shares the compiled dependencies with the tests of the workspace, and checks overflow.
fn install(venv: &Venv) -> Result<()> {
    said(venv.program("python").arg(format!("{PACKAGE}/tests/standins.py")))?;
    let wheels = target_dir("python")?.join("wheel");
    for old in list(&wheels).unwrap_or_default() {
        std::fs::remove_file(&old).with_context(|| old.display().to_string())?;
    }
    let mut maturin = venv.program("maturin");
    maturin.args("build --locked --profile dev --interpreter python3 --manifest-path".split(' '));
    maturin.arg(format!("{PACKAGE}/Cargo.toml")).arg("--out").arg(&wheels);
    said(&mut maturin)?;
    let built = list(&wheels)?;
    ensure!(built.len() == 1, "maturin has made {} wheels rather than one", built.len());
    venv.pip(&["--force-reinstall", &built[0].to_string_lossy()])
}

/// Runs a program and says so.
fn said(command: &mut Command) -> Result<()> {
    println!("{}", shown(command));
    run_command(command)
}
