//! Automation of the workspace: one file per command. Run it as `cargo xtask <command>`.
#![allow(unreachable_pub)] // a program has no outside

mod artifacts;
mod bindgen;
mod bundle;
mod candle;
mod ci;
mod clients;
mod deny;
mod docs;
mod emulate;
mod fmt;
mod kernels;
mod package;
mod profile;
mod python;
mod record;
mod sample;
mod sass;
mod support;
mod test;
mod tidy;
mod venv;
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
    Kernels(kernels::Args),
    /// Write the archives of precompiled images anew from the images in them.
    Archives,
    Bindgen(bindgen::Args),
    Profile(profile::Args),
    Sass(sass::Args),
    Emulate(emulate::Args),
    Test(test::Args),
    Python(python::Args),
    Candle(candle::Args),
    Clients(clients::Args),
    Fmt(fmt::Args),
    Tidy(tidy::Args),
    Bundle(bundle::Args),
    Package(package::Args),
    Deny(deny::Args),
    Docs(docs::Args),
    Ci(ci::Args),
    Record(record::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Kernels(args) => kernels::run(&args),
        Command::Archives => kernels::repack(),
        Command::Bindgen(args) => bindgen::run(&args),
        Command::Profile(args) => profile::run(&args),
        Command::Sass(args) => sass::run(&args),
        Command::Emulate(args) => emulate::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Python(args) => python::run(&args),
        Command::Candle(args) => candle::run(&args),
        Command::Clients(args) => clients::run(&args),
        Command::Fmt(args) => fmt::run(&args),
        Command::Tidy(args) => tidy::run(&args),
        Command::Record(args) => record::run(&args),
        Command::Bundle(args) => bundle::run(&args),
        Command::Package(args) => package::run(&args),
        Command::Deny(args) => deny::run(&args),
        Command::Docs(args) => docs::run(&args),
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
