//! `cargo xtask deny`: licences, sources and versions of the dependencies, by the rules of
//! `deny.toml`.

use crate::workspace;
use anyhow::Result;
use std::process::Command;

/// The pinned checker.
const VERSION: &str = "0.20.2";

/// Check the dependencies by the rules of deny.toml.
#[derive(clap::Args, Default)]
pub struct Args {
    /// Also look for known vulnerabilities. Their list comes from the network and changes from day
    /// to day.
    #[arg(long)]
    advisories: bool,
}

/// Runs the command; installs cargo-deny into `target/tools` when it is not there.
pub fn run(args: &Args) -> Result<()> {
    let tools = workspace::target_dir("tools")?;
    let program = tools.join("bin/cargo-deny");
    let installed = Command::new(&program).arg("--version").output();
    let is_current = |text: &[u8]| String::from_utf8_lossy(text).trim().ends_with(VERSION);
    if !installed.is_ok_and(|output| is_current(&output.stdout)) {
        // Not optimised: that takes one minute on two cores rather than six, and the check itself a
        // second.
        let mut install = workspace::cargo();
        install.args("install --quiet --locked --profile dev".split(' '));
        install.args(["--config", "profile.dev.debug=false", &format!("cargo-deny@{VERSION}")]);
        workspace::run(install.arg("--root").arg(&tools).env_remove("CARGO_TARGET_DIR"))?;
    }
    let mut check = Command::new(&program);
    check.current_dir(workspace::root());
    check.args("check --hide-inclusion-graph licenses bans sources".split(' '));
    if args.advisories {
        check.arg("advisories");
    }
    workspace::run(&mut check)
}
