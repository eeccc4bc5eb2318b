//! `cargo xtask tidy`: rules of the repository that no compiler checks.

mod columns;
mod findings;
mod images;
mod links;
mod sources;
mod spread;
mod vocabulary;
mod words;

use crate::support;
use anyhow::{Result, bail};
use findings::Findings;

/// Check rules of the repository that no compiler checks.
#[derive(clap::Args, Default)]
pub struct Args {
    /// Rewrite the support tables before the checks.
    #[arg(long)]
    fix: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let mut findings = Findings::default();
    sources::check(&mut findings)?;
    images::check(&mut findings)?;
    if args.fix {
        support::update()?;
    }
    match support::outdated() {
        Ok(None) => {}
        Ok(Some(page)) => findings
            .errors
            .push(format!("{page}: the support table is outdated: run `cargo xtask tidy --fix`")),
        Err(error) => findings.errors.push(format!("{error:#}")),
    }
    findings.notes.iter().for_each(|note| println!("{note}"));
    findings.warnings.iter().for_each(|warning| println!("warning: {warning}"));
    findings.errors.iter().for_each(|error| eprintln!("error: {error}"));
    match findings.errors.len() {
        0 => Ok(()),
        count => bail!("tidy found {count} problems"),
    }
}
