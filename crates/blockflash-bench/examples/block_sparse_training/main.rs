//! Block-sparse training: a network with block-sparse weights learns another one, its teacher, from
//! samples.
//!
//! ```text
//! cargo run --release --example block_sparse_training         1024 -> 4096 -> 1024, on a GPU
//! cargo run --release --example block_sparse_training -- \
//!     --inputs 256 --hidden 512 --outputs 256 --device cpu
//! ```
//!
//! The network is `y = W2·relu(W1·x)`; which blocks the weights store is drawn once and stays. A
//! step is five products of four kinds:
//!
//! ```text
//! h = relu(x·W1ᵀ)   y = h·W2ᵀ     BsrMatmul::linear, the activation fused
//! dh = dy·W2                      BsrMatmul::dense_sparse, W2 transposed by its index
//! dW2 = dyᵀ·h       dW1 = dhᵀ·x   BsrSddmm: the gradients of stored blocks only
//! ```
//!
//! and new values for the matrices, `BsrMatrix::set_values`. `network.rs` says what the host does,
//! `common/layer.rs` where the optimizer is. So on a GPU the host takes most of the time of a step;
//! the products are timed apart. It runs on Hopper, with blocks of 64 and 128; another GPU ends
//! with what is missing.
//!
//! Before it trains, it holds gradients against differences of the loss. If those are wrong, or if
//! the loss does not fall as far as `--goal` says, it fails.
//!
//! Writes `block_sparse_training.svg` (loss over steps), `block_sparse_training.csv` and
//! `.json`.
#![forbid(unsafe_code)]
// Nothing is outside of a program: `pub` is `pub(crate)` here.
#![allow(unreachable_pub)]

mod data;
mod gradient_check;
#[path = "../common/layer.rs"]
mod layer;
mod momentum;
mod network;
#[path = "../common/program.rs"]
mod program;
mod report;
#[path = "../common/results.rs"]
mod results;
#[path = "../common/sparsity.rs"]
mod sparsity;
mod training;

use blockflash_ops::DType;
use clap::Parser;
use std::path::PathBuf;
use std::process::ExitCode;
use training::Options;

/// Trains a network with block-sparse weights.
#[derive(Parser)]
struct Args {
    /// Inputs of the network
    #[arg(long, default_value_t = 1024)]
    inputs: usize,
    /// Features between the layers
    #[arg(long, default_value_t = 4096)]
    hidden: usize,
    /// Outputs of the network
    #[arg(long, default_value_t = 1024)]
    outputs: usize,
    /// Rows and columns of a block
    #[arg(long, default_value_t = 64)]
    block: usize,
    /// Part of the blocks that is stored
    #[arg(long, default_value_t = 0.25)]
    density: f64,
    /// Samples of a step
    #[arg(long, default_value_t = 512)]
    batch: usize,
    /// Batches that are learned from, in turns
    #[arg(long, default_value_t = 16)]
    batches: usize,
    /// Steps
    #[arg(long, default_value_t = 400)]
    steps: usize,
    /// Size of a step
    #[arg(long, default_value_t = 2.0)]
    rate: f32,
    /// What of a step is repeated in the next
    #[arg(long, default_value_t = 0.9)]
    momentum: f32,
    /// What may be left of the first loss
    #[arg(long, default_value_t = 0.5)]
    goal: f64,
    /// Seed of weights and samples
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
    let step = |step: &str| eprintln!("{step}");
    let device = program::device(args.device.as_deref())?;
    let options = Options {
        inputs: args.inputs,
        hidden: args.hidden,
        outputs: args.outputs,
        block: args.block,
        density: args.density,
        batch: args.batch,
        batches: args.batches,
        steps: args.steps,
        rate: args.rate,
        momentum: args.momentum,
        goal: args.goal,
        seed: args.seed,
        dtype: args.dtype.unwrap_or(if device.is_cpu() { DType::F32 } else { DType::BF16 }),
        device,
    };
    options.check()?;
    let stream = device.stream()?;
    step("checking gradients");
    let check = gradient_check::run(&options, &stream)?;
    println!("{}", report::check(&check));
    if !check.passed() {
        return Err("the gradients are wrong".into());
    }
    let study = training::run(&options, &stream, step)?;
    print!("{}", report::table(&study));
    for path in report::write(&study, &check, &args.out)? {
        println!("{}", path.display());
    }
    if !study.learned() {
        return Err("the loss has not fallen as far as --goal says".into());
    }
    Ok(())
}
