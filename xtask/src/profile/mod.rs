//! `cargo xtask profile`: shows on one page what limits a kernel, from Nsight Compute and the
//! counted work. In a bundle: `./xtask profile`.

mod ceilings;
mod gpu;
mod launch;
mod measurement;
mod ncu;
mod page;
mod place;
mod raw;
mod roofline;
mod select;

use crate::workspace::{print, write};
use anyhow::Result;
use ceilings::Ceilings;
use gpu::Gpu;
use measurement::Measurement;
use ncu::{Job, Ncu};
use place::Place;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  cargo xtask profile attention_fwd_sm80_bf16_d64
  cargo xtask profile _bf16_b64_n128 --shape m8192_n4096_k8192_b64_d0.2_uniform_bf16

The report for ncu-ui (.ncu-rep), the page (.txt) and the roofline (.svg) go to
target/profile/COMMIT, in a bundle to out/profile/COMMIT.";

/// Profile kernels with Nsight Compute: one page about what limits them.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Part of a kernel's name; each kernel of this GPU whose name contains it is profiled.
    pattern: String,
    /// Id of the case that the kernel computes [default: a large case for its tile].
    #[arg(long, value_name = "CASE")]
    shape: Option<String>,
    /// Folder for the reports.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Path of Nsight Compute, if it is installed in an unusual place.
    #[arg(long, value_name = "PROGRAM")]
    ncu: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let place = Place::find()?;
    let gpu = Gpu::find()?;
    let kernels = select::kernels(&args.pattern, gpu.capability)?;
    // The profiler is searched first, so that its absence is reported before anything is compiled.
    let ncu = Ncu::find(args.ncu.as_deref())?;
    let program = place.program()?;
    let commit = place.commit()?;
    let out = args.out.clone().unwrap_or_else(|| place.results()).join(&commit);
    for (kernel, default) in kernels {
        let (symbol, case) = (kernel.symbol(), args.shape.clone().unwrap_or(default));
        let images = place.images(kernel)?;
        let origin = if images.is_some() { "with" } else { "without" };
        // A case id may contain a dot, so the extension is appended, not replaced.
        let file = |extension: &str| out.join(format!("{symbol}.{case}.{extension}"));
        let report = file("ncu-rep");
        eprintln!("profiling {symbol} on {case}");
        let (launch, raw) = ncu.profile(&Job {
            program: &program,
            case: &case,
            symbol: &symbol,
            images: images.as_deref(),
            sources: &place.sources(),
            report: &report,
        })?;
        let ceilings = Ceilings::measured(&place.ceilings(), &gpu.name, launch.dtype())
            .unwrap_or_else(|| Ceilings::stated(&raw, launch.dtype()));
        let images = format!("{commit}, {origin} line information");
        let measurement = Measurement::new(gpu.clone(), images, launch, raw, ceilings);
        let text = page::text(&measurement);
        print(&format!("{text}\n"))?;
        write(&file("txt"), text)?;
        if let Some(picture) = roofline::svg(&measurement)? {
            write(&file("svg"), picture)?;
        }
        eprintln!("kept {}", report.display());
    }
    Ok(())
}
