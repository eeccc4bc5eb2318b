//! `blockflash report`.

use crate::failure::{Failure, Result, bail, warn};
use crate::output::print;
use blockflash_bench::io::write_texts;
use blockflash_bench::machine::benches;
use blockflash_bench::record::{self, Contents, Record};
use blockflash_bench::report::{self, Detail, Image};
use blockflash_bench::report::{Plot, plots};
use std::io::IsTerminal;
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
The newest run of each suite is reported. Markdown goes to stdout, or with --into into a file.

Examples:
  blockflash report                               a line for each group of cases, each competitor
  blockflash report --suite attention_fwd --full  a line for each case
  blockflash report --against e49784d4            what has changed since that commit; exit code 1
                                                  if a case is slower

  A page with one plot and one summary of each suite, and a page with everything:
  blockflash report benches/results/nvidia-h200 --plots benches/results/nvidia-h200 \\
      --into benches/results/README.md
  blockflash report benches/results/nvidia-h200 --plots benches/results/nvidia-h200 --full \\
      --into benches/results/nvidia-h200/README.md";

/// Options of `blockflash report`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Files of records, or folders that contain them [default: benches/results]
    #[arg(value_name = "RESULTS")]
    pub results: Vec<PathBuf>,
    /// Report only these suites, separated by commas; may be repeated
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub suite: Vec<String>,
    /// Print a line for each case instead of a line for each group of cases; small suites are
    /// always shown in full
    #[arg(long)]
    pub full: bool,
    /// Write the report between the marks results:begin and results:end of this Markdown file,
    /// which is created if it does not exist
    #[arg(long, value_name = "FILE")]
    pub into: Option<PathBuf>,
    /// Draw SVG plots into this folder. The file of --into shows them; without --full, it shows
    /// one of each suite
    #[arg(long, value_name = "FOLDER")]
    pub plots: Option<PathBuf>,
    /// Compare with the newest earlier runs of this commit. The exit code is 1 if blockflash has
    /// become slower in a case
    #[arg(long, value_name = "COMMIT", conflicts_with_all = ["full", "into", "plots"])]
    pub against: Option<String>,
}

/// Prints or writes tables and plots of the newest runs, or compares them with a commit.
pub fn run(args: Args) -> Result<ExitCode> {
    let records = args.records()?;
    if let Some(commit) = &args.against {
        let comparison = report::against(&records, commit)?;
        print(&for_stdout(&comparison.text))?;
        return Ok(ExitCode::from(u8::from(comparison.regressions > 0)));
    }
    let detail = if args.full { Detail::Cases } else { Detail::Groups };
    let plots = match &args.plots {
        Some(folder) => draw(&records, folder)?,
        None => Vec::new(),
    };
    let images = match (&args.into, &args.plots) {
        (Some(file), Some(folder)) => images(&plots, &link(file, folder)?),
        (None, Some(folder)) => {
            for plot in &plots {
                print(&folder.join(&plot.file).display().to_string())?;
            }
            return Ok(ExitCode::SUCCESS);
        }
        (_, None) => Vec::new(),
    };
    let text = report::markdown(&records, detail, &images);
    match &args.into {
        None => print(&for_stdout(&text))?,
        Some(path) => write_into(path, &text)?,
    }
    Ok(ExitCode::SUCCESS)
}

impl Args {
    /// The records of the wanted suites, with all ceilings.
    fn records(&self) -> Result<Vec<Record>> {
        let places = match self.results.is_empty() {
            true => vec![benches()?.join("results")],
            false => self.results.clone(),
        };
        let mut files = Vec::new();
        for place in &places {
            collect(place, &mut files)?;
        }
        files.sort();
        let mut records = Vec::new();
        for file in &files {
            let Contents { records: more, torn } = record::read(file)?;
            if let Some(line) = torn {
                let file = file.display();
                warn(format!("{file}, line {line}: the last line is torn, and no record"));
            }
            records.extend(more);
        }
        if records.is_empty() {
            let places: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
            bail!("no records in {}: run `blockflash bench` first", places.join(", "));
        }
        if let Some(unknown) =
            self.suite.iter().find(|name| !records.iter().any(|record| record.suite == **name))
        {
            let mut present: Vec<_> = records.iter().map(|record| record.suite.as_str()).collect();
            present.sort_unstable();
            present.dedup();
            bail!("no records of a suite {unknown:?}; there are {}", present.join(", "));
        }
        if !self.suite.is_empty() {
            records.retain(|record| record.op == "ceiling" || self.suite.contains(&record.suite));
        }
        Ok(records)
    }
}

/// Padded for those who read it here; as it is for programs and files.
fn for_stdout(text: &str) -> String {
    if std::io::stdout().is_terminal() { report::align(text) } else { text.to_owned() }
}

fn draw(records: &[Record], folder: &Path) -> Result<Vec<Plot>> {
    let mut gpus: Vec<_> = records.iter().map(|record| record.gpu.as_str()).collect();
    gpus.sort_unstable();
    gpus.dedup();
    if gpus.len() > 1 {
        bail!(
            "--plots draws the records of one GPU, but these are records of {}: name the folder of \
             one GPU",
            gpus.join(", ")
        );
    }
    let plots = plots(records)?;
    std::fs::create_dir_all(folder)
        .map_err(|error| Failure::new(format!("{}: {error}", folder.display())))?;
    let files: Vec<_> = plots.iter().map(|plot| (folder.join(&plot.file), &plot.svg)).collect();
    let files: Vec<_> = files.iter().map(|(path, svg)| (path.as_path(), svg.as_str())).collect();
    write_texts(&files)?;
    Ok(plots)
}

fn images(plots: &[Plot], link: &str) -> Vec<Image> {
    let image = |plot: &Plot| Image {
        suite: plot.suite.clone(),
        alt: plot.alt.clone(),
        path: format!("{link}{}", plot.file),
        cover: plot.cover,
    };
    plots.iter().map(image).collect()
}

/// How a file refers to a folder: empty or with a `/` at the end.
fn link(file: &Path, folder: &Path) -> Result<String> {
    let absolute = |path: &Path| {
        std::fs::canonicalize(path)
            .map_err(|error| Failure::new(format!("{}: {error}", path.display())))
    };
    let parent =
        file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (from, to) = (absolute(parent)?, absolute(folder)?);
    let common = from.components().zip(to.components()).take_while(|(a, b)| a == b).count();
    let mut link = "../".repeat(from.components().count() - common);
    for component in to.components().skip(common) {
        if let Component::Normal(name) = component {
            link += &format!("{}/", name.to_string_lossy());
        }
    }
    Ok(link)
}

/// Replaces what stands between the marks.
fn write_into(path: &Path, text: &str) -> Result<()> {
    let failure = |error: std::io::Error| Failure::new(format!("{}: {error}", path.display()));
    let document = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            format!("# Results\n\n{}\n{}\n", report::BEGIN, report::END)
        }
        document => document.map_err(failure)?,
    };
    let Some(document) = report::insert(&document, text) else {
        bail!(
            "{} does not contain the lines {} and {}",
            path.display(),
            report::BEGIN,
            report::END
        );
    };
    Ok(write_texts(&[(path, &document)])?)
}

/// A file as it is named, or every `.jsonl` below a folder.
fn collect(place: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if !place.is_dir() {
        files.push(place.to_owned());
        return Ok(());
    }
    let entries = std::fs::read_dir(place)
        .map_err(|error| Failure::new(format!("{}: {error}", place.display())))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() || path.extension().is_some_and(|extension| extension == "jsonl") {
            collect(&path, files)?;
        }
    }
    Ok(())
}
