//! `blockflash launch`: a few launches of one case and little else on the GPU, for profilers.

use crate::args::DeviceArg;
use crate::failure::{Failure, Result};
use crate::output::print;
use blockflash_bench::case::{Case, Work};
use blockflash_bench::ours::{Kernels, Ours};
use serde::Serialize;
use std::process::ExitCode;

/// Options of `blockflash launch`.
#[derive(clap::Args)]
pub struct Args {
    /// A case by its id in the records, such as b4_s4096_h32_d64_causal_bf16,
    /// varlen4096+512x2_h16_d128_causal_bf16 or
    /// m8192_n1024_k8192_b64_d0.1_uniform_f16
    #[arg(long, value_name = "ID")]
    pub case: Case,
    /// Launch the kernel whose name contains this text instead of the selected kernel
    #[arg(long, alias = "row", value_name = "SYMBOL")]
    pub kernel: Option<String>,
    /// Number of launches
    #[arg(
        long,
        value_name = "N",
        default_value_t = 3,
        value_parser = clap::value_parser!(u16).range(1..),
    )]
    pub launches: u16,
    /// Seed of random inputs and patterns
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    #[command(flatten)]
    pub device: DeviceArg,
}

/// What was launched, for whoever profiles it.
#[derive(Serialize)]
struct Launched {
    case: String,
    op: &'static str,
    symbol: Option<String>,
    image: Option<String>,
    launches: u16,
    #[serde(flatten)]
    work: Work,
}

/// Launches on N(0, 1) inputs and prints one JSON object. Nothing is compared: `blockflash bench`
/// does that.
pub fn run(args: Args) -> Result<ExitCode> {
    let device = args.device.open()?;
    let stream = device.stream()?;
    let which = args.kernel.map_or(Kernels::Selected, |name| Kernels::Named(vec![name]));
    let kernel = Ours::launch(&args.case, &stream, args.seed, &which, args.launches.into())?;
    let launched = Launched {
        case: args.case.to_string(),
        op: args.case.op(),
        symbol: kernel.map(|kernel| kernel.symbol()),
        image: kernel.map(|kernel| kernel.image_name()),
        launches: args.launches,
        work: args.case.work(),
    };
    let line = serde_json::to_string(&launched).map_err(|error| Failure::new(error.to_string()))?;
    print(&line)?;
    Ok(ExitCode::SUCCESS)
}
