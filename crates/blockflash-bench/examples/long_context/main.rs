//! Long context: how much faster and how wrong attention becomes when each block of queries visits
//! only the first blocks, the blocks around it and those with the best scores, instead of
//! everything before it.
//!
//! ```text
//! cargo run --release --example long_context              65,536 tokens, 32 heads on 8, on a GPU
//! cargo run --release --example long_context -- \
//!     --seqlen 4096 --heads 4 --heads-kv 2 --head-dim 64 --top-k 2,4,8 --device cpu
//! ```
//!
//! Each query head scores its blocks by the mean query times the mean key, and has a list of its
//! own. Scores and mask are made on the device, in the same way as a model would make them at each
//! step; what that takes is reported beside attention. For comparison the same number of blocks of
//! each row goes to the nearest ones instead. The data has the structure of a document (`data.rs`
//! has the recipe): the error on independent random numbers would say nothing, since all keys are
//! alike there.
//!
//! Writes `long_context.svg` (error and speed-up over the density),
//! `long_context_mask.svg`, `long_context.csv` and `.json`.
#![forbid(unsafe_code)]
// Nothing is outside of a program: `pub` is `pub(crate)` here.
#![allow(unreachable_pub)]

mod data;
mod masks;
#[path = "../common/program.rs"]
mod program;
mod report;
#[path = "../common/results.rs"]
mod results;
mod study;

use clap::Parser;
use data::Recipe;
use std::path::PathBuf;
use std::process::ExitCode;
use study::Options;

/// Attention over chosen blocks against dense attention on a long document.
#[derive(Parser)]
struct Args {
    /// Tokens
    #[arg(long, default_value_t = 65536)]
    seqlen: usize,
    /// Query heads
    #[arg(long, default_value_t = 32)]
    heads: usize,
    /// Key-value heads
    #[arg(long, default_value_t = 8)]
    heads_kv: usize,
    /// Elements of a row
    #[arg(long, default_value_t = 128)]
    head_dim: usize,
    /// Queries and keys of a block
    #[arg(long, default_value_t = 128)]
    block: usize,
    /// Blocks at the beginning that every query visits
    #[arg(long, default_value_t = 1)]
    sink: usize,
    /// Blocks before its own that every query visits
    #[arg(long, default_value_t = 4)]
    window: usize,
    /// Blocks with the best scores that it visits, be they among those or not: a point for each
    /// number
    #[arg(long, value_delimiter = ',', default_value = "4,8,16,32,64,128")]
    top_k: Vec<usize>,
    /// Mean tokens of a segment of the document
    #[arg(long, default_value_t = 1024)]
    segment: usize,
    /// Seed of the document
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Milliseconds for which each choice is timed
    #[arg(long, default_value_t = 300.0)]
    window_ms: f64,
    /// cpu, cuda or cuda:N [default: the first usable GPU, else cpu]
    #[arg(long)]
    device: Option<String>,
    /// Folder for the results
    #[arg(long, default_value = ".")]
    out: PathBuf,
}

fn main() -> ExitCode {
    program::main(run)
}

fn run(args: Args) -> Result<(), program::Failure> {
    let device = program::device(args.device.as_deref())?;
    let Args { seqlen, heads, heads_kv, head_dim, segment, seed, .. } = args;
    let options = Options {
        recipe: Recipe { seqlen, heads_q: heads, heads_kv, head_dim, segment, seed },
        block: args.block,
        sink: args.sink,
        window: args.window,
        top_k: args.top_k,
        window_ms: args.window_ms,
        device,
    };
    let (study, mask) = study::run(&options, |step| eprintln!("{step}"))?;
    print!("{}", report::table(&study));
    for path in report::write(&study, &mask, &args.out)? {
        println!("{}", path.display());
    }
    Ok(())
}
