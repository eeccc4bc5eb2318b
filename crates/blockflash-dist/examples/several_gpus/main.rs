//! Attention over all GPUs of this machine, a process for each, by NCCL: compares the results with
//! those of one GPU, and measures.
//!
//! ```text
//! cargo run --release -p blockflash-dist --example several_gpus -- --gpus 2 check
//! cargo run --release -p blockflash-dist --example several_gpus -- --gpus 2 --out results \
//!     s131072_h32 bwd_s131072_h32 s1048576_h8_top128
//! ```
//!
//! Each argument is `check`, `links` (what NCCL reaches), `lost` (as the last one: the last rank
//! goes without a word, and the others have to notice) or a case of causal attention in bf16 with
//! head_dim 128: `s131072_h32kv8` has 131072 rows, 32 heads of q and 8 of k, `bwd_` before it means
//! the backward pass, and `_top128` behind it that each block of 128 queries visits the 128 blocks
//! of keys with the best scores, of a document as in the example `long_context`.
//!
//! Writes a line for each case and scheme to `several_gpus.ndjson`, and a timeline of each to
//! `timeline.<case>.<scheme>.svg`. NCCL's library must be found (`LD_LIBRARY_PATH`).
#![forbid(unsafe_code)]
// Nothing is outside of a program: `pub` is `pub(crate)` here.
#![allow(unreachable_pub)]

mod case;
mod check;
mod dense;
mod document;
mod links;
mod measure;
mod report;
mod watch;

use blockflash_dist::{Nccl, NcclCommunicator, NcclId};
use blockflash_ops::Device;
use clap::Parser;
use measure::Ranks;
use report::Report;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;
use watch::Watched;

/// Attention over all GPUs of this machine.
#[derive(Parser)]
struct Args {
    /// Number of GPUs
    #[arg(long, default_value_t = 2)]
    gpus: usize,
    /// Rounds, in each of which one GPU and every scheme has its turn
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seconds after which an exchange is given up
    #[arg(long, default_value_t = 60)]
    timeout: u64,
    /// Folder for the results
    #[arg(long, default_value = ".")]
    out: PathBuf,
    /// Keys gathered by copy engines, in the forward pass
    #[arg(long)]
    gather: bool,
    /// check, links, lost or cases
    #[arg(required = true)]
    work: Vec<String>,
}

/// Why a rank ends early: one line.
type Failure = Box<dyn std::error::Error>;

const RANK: &str = "BLOCKFLASH_RANK";
const ID: &str = "BLOCKFLASH_NCCL_ID";

fn main() -> ExitCode {
    let args = Args::parse();
    let done = match std::env::var(RANK) {
        Ok(rank) => work(&rank, &args),
        Err(_) => start(&args),
    };
    done.map_or_else(
        |error| {
            eprintln!("error: {error}");
            ExitCode::from(2)
        },
        |()| ExitCode::SUCCESS,
    )
}

/// Starts a process for each GPU, with the same arguments.
fn start(args: &Args) -> Result<(), Failure> {
    let id: Vec<String> = NcclId::new()?.to_bytes().iter().map(|b| format!("{b:02x}")).collect();
    let program = std::env::current_exe()?;
    let ranks = (0..args.gpus).map(|rank| {
        let mut command = Command::new(&program);
        let command = command.args(std::env::args_os().skip(1));
        command.env(RANK, rank.to_string()).env(ID, id.concat()).spawn()
    });
    let ranks = ranks.collect::<Result<Vec<_>, _>>()?;
    let ends = ranks.into_iter().map(|mut rank| rank.wait());
    let failed = ends.filter(|end| !end.as_ref().is_ok_and(|status| status.success())).count();
    if failed > 0 { Err(format!("{failed} of {} ranks failed", args.gpus).into()) } else { Ok(()) }
}

/// What one process does.
fn work(rank: &str, args: &Args) -> Result<(), Failure> {
    let text = std::env::var(ID)?;
    let mut id = [0; 128];
    for (at, byte) in id.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2).ok_or("a short id")?, 16)?;
    }
    let rank = rank.parse()?;
    let device = Device::cuda(rank)?;
    let id = NcclId::from_bytes(id);
    let timeout = Duration::from_secs(args.timeout);
    let nccl = if args.gather {
        Nccl::gathering(NcclCommunicator::gathering(&device, &id, rank, args.gpus, timeout)?)?
    } else {
        Nccl::new(NcclCommunicator::new(&device, &id, rank, args.gpus, timeout)?)?
    };
    let ranks = Ranks { comm: Watched::new(nccl), stream: device.stream()? };
    let mut report = Report::new(&args.out, &device)?;
    let mut links = None;
    for work in &args.work {
        match work.as_str() {
            "check" => check::all(&ranks.comm, &ranks.stream)?,
            "lost" => return check::lost(&ranks.comm, &ranks.stream),
            "links" => links = Some(links::measure(&ranks, &mut report)?),
            case => {
                let case = case.parse()?;
                let links = match links {
                    Some(links) => links,
                    None => *links.insert(links::measure(&ranks, &mut report)?),
                };
                measure::case(&ranks, case, args.rounds, &links, &mut report)?;
            }
        }
    }
    Ok(())
}
