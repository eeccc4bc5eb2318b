//! `blockflash report`.

use crate::failure::{Failure, Result};
use crate::output::print;
use blockflash_bench::machine::benches;
use blockflash_bench::{record, report};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Options of `blockflash report`.
#[derive(clap::Args)]
pub struct Args {
    /// Records, or folders of them [default: benches/results]
    #[arg(value_name = "RESULTS")]
    pub results: Vec<PathBuf>,
    /// Write the tables into this Markdown file, between the marks results:begin and results:end
    #[arg(long, value_name = "FILE")]
    pub into: Option<PathBuf>,
}

/// Prints or writes the newest run of each suite on each GPU as Markdown tables.
pub fn run(args: Args) -> Result<ExitCode> {
    let places = if args.results.is_empty() { vec![benches()?.join("results")] } else { args.results };
    let mut files = Vec::new();
    for place in &places {
        collect(place, &mut files)?;
    }
    files.sort();
    let mut records = Vec::new();
    for file in &files {
        records.extend(record::read(file)?);
    }
    if records.is_empty() {
        let places: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
        return Err(Failure::new(format!(
            "no records in {}: run `blockflash bench` first",
            places.join(", ")
        )));
    }
    let text = report::markdown(&records);
    let Some(path) = args.into else {
        print(&text)?;
        return Ok(ExitCode::SUCCESS);
    };
    let failure = |error: std::io::Error| Failure::new(format!("{}: {error}", path.display()));
    let document = std::fs::read_to_string(&path).map_err(failure)?;
    let Some(document) = report::insert(&document, &text) else {
        let message = format!("{} has no lines {} and {}", path.display(), report::BEGIN, report::END);
        return Err(Failure::new(message));
    };
    std::fs::write(&path, document).map_err(failure)?;
    Ok(ExitCode::SUCCESS)
}

/// A file as it is named, or every `.jsonl` below a folder.
fn collect(place: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if !place.is_dir() {
        files.push(place.to_owned());
        return Ok(());
    }
    let entries =
        std::fs::read_dir(place).map_err(|error| Failure::new(format!("{}: {error}", place.display())))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() || path.extension().is_some_and(|extension| extension == "jsonl") {
            collect(&path, files)?;
        }
    }
    Ok(())
}
