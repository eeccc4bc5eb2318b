//! A small transformer learns sources of this package, byte by byte, once with dense attention and
//! once with block-sparse attention.
//!
//! ```text
//! cargo run --release --example block_sparse_transformer                 on a GPU
//! cargo run --release --example block_sparse_transformer -- --quick --device cpu
//! ```
//!
//! Each token attends its own block of tokens, the blocks before it, and every few blocks farther
//! back. Attention is this library's, forward and backward (`attention.rs`); so are the products of
//! the MLP, whose weights are block-sparse, and all other products, whose weights have all blocks.
//! Between them the host computes embeddings, norms, the loss and the optimizer (`host.rs`), so on
//! a GPU it takes most of the time of a step; attention is timed apart, over the length of a
//! window.
//!
//! Before it trains, gradients are compared with differences of the loss of an f64 forward pass
//! that shares no code with it. If they are wrong, or if either network ends above `--goal`, it
//! fails. Losses do not depend on the number of threads, and repeats have the same bits.
//!
//! Writes `block_sparse_transformer.svg` (loss), `_time.svg`, `_memory.svg`, and
//! `block_sparse_transformer.csv` (loss) and `.json` (everything).
#![forbid(unsafe_code)]
// Nothing is outside of a program: `pub` is `pub(crate)` here.
#![allow(unreachable_pub)]

mod adam;
mod attention;
mod gradient_check;
mod host;
#[path = "../common/layer.rs"]
mod layer;
mod lengths;
mod model;
#[path = "../common/program.rs"]
mod program;
mod reference;
mod report;
#[path = "../common/results.rs"]
mod results;
#[path = "../common/sparsity.rs"]
mod sparsity;
mod text;
mod training;

use blockflash_ops::DType;
use clap::Parser;
use std::path::PathBuf;
use std::process::ExitCode;
use training::Options;

/// Trains a transformer with dense and with block-sparse attention.
#[derive(Parser)]
struct Args {
    /// A small network and short windows: seconds on a CPU
    #[arg(long)]
    quick: bool,
    /// Steps of each training
    #[arg(long)]
    steps: Option<usize>,
    /// Tokens of a window
    #[arg(long)]
    seqlen: Option<usize>,
    /// Windows of a step
    #[arg(long)]
    batch: Option<usize>,
    /// Blocks of the network
    #[arg(long)]
    layers: Option<usize>,
    /// Size of the largest step
    #[arg(long)]
    rate: Option<f32>,
    /// Part of the entropy of a byte that the loss may be on held-out text
    #[arg(long)]
    goal: Option<f64>,
    /// Seed of weights and windows
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// f16, bf16 or, on a CPU, f32 [default: bf16 on a GPU, f32 on a CPU]
    #[arg(long, value_parser = program::dtype)]
    dtype: Option<DType>,
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
    let say = |line: &str| eprintln!("{line}");
    let device = program::device(args.device.as_deref())?;
    let dtype = args.dtype.unwrap_or(if device.is_cpu() { DType::F32 } else { DType::BF16 });
    let usual =
        if args.quick { Options::quick(dtype, device) } else { Options::usual(dtype, device) };
    let mut options = Options {
        steps: args.steps.unwrap_or(usual.steps),
        windows: [args.batch.unwrap_or(usual.windows[0]), args.seqlen.unwrap_or(usual.windows[1])],
        rate: args.rate.unwrap_or(usual.rate),
        goal: args.goal.unwrap_or(usual.goal),
        seed: args.seed,
        ..usual
    };
    options.sizes.layers = args.layers.unwrap_or(options.sizes.layers);
    options.check()?;
    let text = text::Text::new();
    say("checking gradients");
    let check = gradient_check::run(&options, &text)?;
    println!("{}", report::check(&check));
    if !check.passed() {
        return Err("the gradients are wrong".into());
    }
    let training = training::run(&options, &text, say)?;
    say("timing attention");
    let lengths = lengths::run(&options)?;
    let results = report::Results { title: options.title(), check, training, lengths };
    print!("{}", report::table(&results));
    for path in report::write(&results, &args.out)? {
        println!("{}", path.display());
    }
    if !results.training.learned() {
        return Err("the loss has not fallen as far as --goal says".into());
    }
    Ok(())
}
