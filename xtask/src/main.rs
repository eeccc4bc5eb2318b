//! Automation of the workspace: one file per command. Run it as `cargo xtask <command>`.
#![allow(unreachable_pub)] // a program has no outside

mod bindgen;
mod kernels;
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
    /// Compile the kernels into crates/blockflash-sys/prebuilt, or prove that what is there is up to date.
    Kernels(kernels::Args),
    /// Generate crates/blockflash-sys/src/params.rs from kernels/include/blockflash/params.h.
    Bindgen(bindgen::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Kernels(args) => kernels::run(&args),
        Command::Bindgen(args) => bindgen::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
