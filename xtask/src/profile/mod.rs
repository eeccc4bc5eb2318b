//! `cargo xtask profile`: one page about what limits a kernel, from Nsight Compute and counted
//! work. In a bundle: `./xtask profile`.

mod ceilings;
mod figures;
mod gpu;
mod images;
mod launch;
mod lines;
mod ncu;
mod page;
mod place;
mod raw;
mod roofline;
mod select;
mod unit;

pub use images::{WORK, unpack};

use crate::workspace::{create_dir, print, write};
use anyhow::{Context, Result, bail};
use blockflash_sys::Row;
use ceilings::Ceilings;
use gpu::Gpu;
use images::Images;
use ncu::{Job, Ncu};
use page::Page;
use place::Place;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  cargo xtask profile attention_fwd_sm80_bf16_d64
  cargo xtask profile _bf16_b64_n128 --shape m8192_n4096_k8192_b64_d0.2_uniform_bf16
  cargo xtask profile _bf16_d64 --diff v0.1.0 work       committed images of two commits; `work` is this tree
  cargo xtask profile --diff _f16_b64_n128 _f16_b64_n64  two kernels
  cargo xtask profile --diff before.json after.json      two saved pages, without a GPU
  cargo xtask profile page.json                          a saved page against the ceilings recorded since

Report (.ncu-rep), page (.txt, .json) and roofline (.svg) go to target/profile, in a bundle to out/profile.";

/// Options of the command.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Part of a kernel's name; each kernel of this GPU whose name contains it is profiled. Or a
    /// saved page (.json).
    pattern: Option<String>,
    /// What the kernel computes, as an id [default: a large case for its tile].
    #[arg(long, value_name = "CASE")]
    shape: Option<String>,
    /// Run the images of this folder, as BLOCKFLASH_IMAGES does.
    #[arg(long, value_name = "FOLDER", conflicts_with = "diff")]
    images: Option<PathBuf>,
    /// Compare two commits, parts of kernels' names, or saved pages (.json).
    #[arg(long, num_args = 2, value_names = ["A", "B"])]
    diff: Option<Vec<String>>,
    /// Where reports go.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// The profiler, when it lies in an unusual place.
    #[arg(long, value_name = "PROGRAM")]
    ncu: Option<PathBuf>,
}

/// One side of a comparison.
enum Side {
    Saved(Box<Page>),
    Kernel(&'static Row),
    /// Images of a commit, or of this tree.
    Commit(Option<String>),
}

/// One side for one kernel, with all that is needed at hand.
enum Subject<'a> {
    Saved(&'a Page),
    Kernel(&'static Row, Images),
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    if let Some(sides) = &args.diff {
        return compare(args, &sides[0], &sides[1]);
    }
    let pattern = args.pattern.as_deref().context("which kernel? name it, or part of its name")?;
    let place = Place::find()?;
    if pattern.ends_with(".json") {
        return print(&again(Path::new(pattern), &place)?.text());
    }
    let gpu = Gpu::find()?;
    let rows = select::rows(pattern, gpu.capability)?;
    let profiler = Profiler::new(args, place, gpu)?;
    for row in rows {
        let images = match &args.images {
            Some(folder) => Images::of_folder(folder)?,
            None => Images::of_tree(&profiler.place, row)?,
        };
        print(&profiler.page(row, &images)?.text())?;
        print("\n")?;
    }
    Ok(())
}

/// A saved page held against the ceilings that are known now; its text and picture are written
/// again beside it.
fn again(path: &Path, place: &Place) -> Result<Page> {
    let page = Page::load(path)?;
    let measured =
        Ceilings::measured(&place.ceilings(&gpu::slug(&page.gpu)), &page.gpu, page.launch.dtype());
    let ceilings = measured.unwrap_or_else(|| page.ceilings.clone());
    let page = page.held_against(ceilings);
    keep(&page, path)?;
    Ok(page)
}

/// Writes a page in its three forms, with the file's name.
fn keep(page: &Page, path: &Path) -> Result<()> {
    // A case may hold a dot: only the last extension is cut off.
    let stem = path.with_extension("");
    let file = |extension: &str| PathBuf::from(format!("{}.{extension}", stem.display()));
    write(&file("txt"), page.text())?;
    write(&file("json"), serde_json::to_string(page)? + "\n")?;
    match roofline::svg(page) {
        Some(picture) => write(&file("svg"), picture),
        None => Ok(()),
    }
}

fn compare(args: &Args, a: &str, b: &str) -> Result<()> {
    let saved =
        |name: &str| name.ends_with(".json").then(|| Page::load(Path::new(name))).transpose();
    if let (Some(a), Some(b)) = (saved(a)?, saved(b)?) {
        return print(&Page::compare(&a, &b));
    }
    let place = Place::find()?;
    let gpu = Gpu::find()?;
    let side = |name: &str| match saved(name)? {
        Some(page) => Ok(Side::Saved(Box::new(page))),
        None => self::side(name, &place, &gpu),
    };
    let sides = [side(a)?, side(b)?];
    // Two commits are compared on every kernel that is asked for, anything else once.
    let rows = match (&args.pattern, sides.iter().any(|side| matches!(side, Side::Commit(_)))) {
        (Some(pattern), true) => {
            select::rows(pattern, gpu.capability)?.into_iter().map(Some).collect()
        }
        (None, true) => bail!("which kernel? name it, or part of its name, before --diff"),
        (Some(_), false) => bail!("--diff names the kernels already"),
        (None, false) => vec![None],
    };
    let profiler = Profiler::new(args, place, gpu)?;
    for row in rows {
        // What one side lacks is said before the other one is profiled.
        let subjects = [profiler.subject(&sides[0], row)?, profiler.subject(&sides[1], row)?];
        let pages = [profiler.page_of(&subjects[0])?, profiler.page_of(&subjects[1])?];
        let text = Page::compare(&pages[0], &pages[1]);
        print(&text)?;
        print("\n")?;
        let name = format!("{}.{a}-{b}.diff.txt", pages[0].launch.symbol).replace('/', "_");
        write(&profiler.out.join(name), text)?;
    }
    Ok(())
}

/// What a name of `--diff` stands for. Names of kernels come first: `d128` could begin a hash.
fn side(name: &str, place: &Place, gpu: &Gpu) -> Result<Side> {
    if name == WORK {
        return Ok(Side::Commit(None));
    }
    if let Some(row) = select::row(name, gpu.capability)? {
        return Ok(Side::Kernel(row));
    }
    match place.commit(name) {
        Some(commit) => Ok(Side::Commit(Some(commit))),
        None => bail!(
            "{name:?} is no part of a kernel's name, no commit {}, and no saved page",
            match place {
                Place::Repository(_) => "that git knows",
                Place::Bundle(_) => "whose images this bundle holds",
            }
        ),
    }
}

/// Everything that profiling needs.
struct Profiler {
    place: Place,
    gpu: Gpu,
    ncu: Ncu,
    program: PathBuf,
    out: PathBuf,
    shape: Option<String>,
}

impl Profiler {
    fn new(args: &Args, place: Place, gpu: Gpu) -> Result<Self> {
        // The profiler first: what is missing is said before anything is compiled.
        let ncu = Ncu::find(args.ncu.as_deref())?;
        let out = args.out.clone().unwrap_or_else(|| place.results());
        create_dir(&out)?;
        Ok(Self { program: place.program()?, place, gpu, ncu, out, shape: args.shape.clone() })
    }

    fn subject<'a>(&self, side: &'a Side, row: Option<&'static Row>) -> Result<Subject<'a>> {
        let row = match side {
            Side::Saved(page) => return Ok(Subject::Saved(page)),
            Side::Kernel(row) => row,
            Side::Commit(_) => row.context("a commit is profiled on a kernel")?,
        };
        Ok(Subject::Kernel(
            row,
            match side {
                Side::Commit(Some(commit)) => Images::of_commit(&self.place, commit, row)?,
                _ => Images::of_tree(&self.place, row)?,
            },
        ))
    }

    fn page_of(&self, subject: &Subject) -> Result<Page> {
        match subject {
            Subject::Saved(page) => Ok((*page).clone()),
            Subject::Kernel(row, images) => self.page(row, images),
        }
    }

    /// Profiles a kernel, and keeps report, page and picture.
    fn page(&self, row: &Row, images: &Images) -> Result<Page> {
        let symbol = row.symbol();
        let case = self.shape.clone().or_else(|| select::case(row)).context("--shape is needed")?;
        let file = |extension: &str| {
            self.out.join(&images.label).join(format!("{symbol}.{case}.{extension}"))
        };
        let report = file("ncu-rep");
        eprintln!("profiling {symbol} on {case} ({})", images.description);
        let (launch, raw) = self.ncu.profile(&Job {
            program: &self.program,
            case: &case,
            symbol: &symbol,
            images: images.folder.as_deref(),
            sources: &self.place.sources(),
            report: &report,
        })?;
        let dtype = launch.dtype().to_string();
        let measured = Ceilings::measured(
            &self.place.ceilings(&gpu::slug(&self.gpu.name)),
            &self.gpu.name,
            &dtype,
        );
        let ceilings = measured.unwrap_or_else(|| Ceilings::stated(&raw, &dtype));
        let page = Page::new(&self.gpu, &images.description, launch, ceilings, &raw);
        keep(&page, &file("json"))?;
        eprintln!("kept {}", report.display());
        Ok(page)
    }
}
