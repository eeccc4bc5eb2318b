//! Automation of the workspace: one file per command. Run it as `cargo xtask <command>`.
#![allow(unreachable_pub)] // a program has no outside

mod artifacts;
mod bindgen;
mod bundle;
mod ci;
mod deny;
mod fmt;
mod git;
mod kernels;
mod package;
mod parallel;
mod profile;
mod record;
mod sass;
mod support;
mod table;
mod test;
mod tidy;
mod workspace;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Automation of the blockflash workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compile the kernels into crates/blockflash-sys/prebuilt, or prove that what is there is up
    /// to date.
    Kernels(kernels::Args),
    /// Generate crates/blockflash-sys/src/params.rs from kernels/include/blockflash/params.h.
    Bindgen(bindgen::Args),
    /// Profile kernels with Nsight Compute: one page about what limits them.
    Profile(profile::Args),
    /// Count the instructions of the committed machine code, and check what the manifest's rows
    /// declare about it.
    Sass(sass::Args),
    /// Run the tests of the whole workspace and count them.
    Test(test::Args),
    /// Format Rust by rustfmt and the kernels by clang-format.
    Fmt(fmt::Args),
    /// Check rules of the repository that no compiler checks.
    Tidy(tidy::Args),
    /// Write one folder that tests and measures on a GPU machine without Rust.
    Bundle(bundle::Args),
    /// Make the archives for crates.io and check their size.
    Package(package::Args),
    /// Check the dependencies by the rules of deny.toml.
    Deny(deny::Args),
    /// Run everything that continuous integration checks.
    Ci(ci::Args),
    /// Add the GPU passes of a test run to tests/gpu-passed.jsonl.
    Record(record::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Kernels(args) => kernels::run(&args),
        Command::Bindgen(args) => bindgen::run(&args),
        Command::Profile(args) => profile::run(&args),
        Command::Sass(args) => sass::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Fmt(args) => fmt::run(&args),
        Command::Tidy(args) => tidy::run(&args),
        Command::Record(args) => record::run(&args),
        Command::Bundle(args) => bundle::run(&args),
        Command::Package(args) => package::run(&args),
        Command::Deny(args) => deny::run(&args),
        Command::Ci(args) => ci::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
