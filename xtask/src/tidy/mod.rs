//! `cargo xtask tidy`: rules of the repository that no compiler checks.

mod columns;
mod images;
mod scan;
mod sources;

use crate::support;
use anyhow::{Result, bail};

/// Options of the command.
#[derive(clap::Args, Default)]
pub struct Args {
    /// Write the README's support table anew before looking.
    #[arg(long)]
    fix: bool,
}

/// What was found.
#[derive(Default)]
struct Findings {
    errors: Vec<String>,
    warnings: Vec<String>,
    notes: Vec<String>,
}

impl Findings {
    fn error(&mut self, message: String) {
        self.errors.push(message);
    }

    fn warning(&mut self, message: String) {
        self.warnings.push(message);
    }

    fn note(&mut self, message: String) {
        self.notes.push(message);
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let mut findings = Findings::default();
    sources::check(&mut findings)?;
    images::check(&mut findings)?;
    if args.fix {
        support::update()?;
    }
    match support::is_current() {
        Ok(true) => {}
        Ok(false) => findings
            .error("README.md: the support table is outdated: run `cargo xtask tidy --fix`".into()),
        Err(error) => findings.error(format!("{error:#}")),
    }
    findings.notes.iter().for_each(|note| println!("{note}"));
    findings.warnings.iter().for_each(|warning| println!("warning: {warning}"));
    findings.errors.iter().for_each(|error| eprintln!("error: {error}"));
    match findings.errors.len() {
        0 => Ok(()),
        count => bail!("tidy found {count} problems"),
    }
}
