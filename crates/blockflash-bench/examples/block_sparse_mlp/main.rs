//! Block-sparse MLP: how much faster and how wrong the MLP of a Llama-shaped model becomes when
//! only the blocks of its weights with the greatest norms are stored.
//!
//! ```text
//! cargo run --release --example block_sparse_mlp              4096 -> 14336 -> 4096, on a GPU
//! cargo run --release --example block_sparse_mlp -- \
//!     --peers torch_matmul_dense,torch_triton_bsr_tuned --tune-seconds 5
//! cargo run --release --example block_sparse_mlp -- \
//!     --features 512 --intermediate 1024 --tokens 1,64 --device cpu
//! ```
//!
//! The layer has two projections, `down · silu(up · x)`, each one launch: the activation is a part
//! of the first. Models with a gate multiply two such products, `silu(gate · x) * up · x`, which
//! the library has no epilogue for; a gate would be a third product of the size of up. `layer.rs`
//! says how activations lie in memory, `weights.rs` where the weights come from. They are random:
//! their errors show what dropping the smaller blocks of such weights costs one layer, and nothing
//! about a trained model.
//!
//! In each launch the weights come from memory, as in a model whose other layers ran before. The
//! speed-up is over our own product with all blocks stored, in turns with the sparse one. With
//! `--peers`, where python3 has torch, cuBLAS (`torch_matmul_dense`) and block-sparse products of
//! others take turns as well; they compute both products without the activation, and their weights
//! come from memory, too.
//!
//! Writes `block_sparse_mlp.svg` (speed-up over the density), `block_sparse_mlp.csv` and
//! `.json`.
#![forbid(unsafe_code)]
// Nothing is outside of a program: `pub` is `pub(crate)` here.
#![allow(unreachable_pub)]

mod layer;
#[path = "../common/program.rs"]
mod program;
mod reference;
mod report;
#[path = "../common/results.rs"]
mod results;
mod rivals;
mod study;
mod weights;

use clap::Parser;
use rivals::Rivals;
use std::path::PathBuf;
use std::process::ExitCode;
use study::Options;

/// An MLP with block-sparse weights against the same with all blocks.
#[derive(Parser)]
struct Args {
    /// Features of a token
    #[arg(long, default_value_t = 4096)]
    features: usize,
    /// Features between the projections
    #[arg(long, default_value_t = 14336)]
    intermediate: usize,
    /// Rows and columns of a block: 16, 32, 64 or 128, a line for each
    #[arg(long, value_delimiter = ',', default_value = "64,128")]
    block: Vec<usize>,
    /// Part of the blocks that is stored, a point for each; 1 is always measured
    #[arg(long, value_delimiter = ',', default_value = "0.05,0.1,0.25,0.5,1")]
    density: Vec<f64>,
    /// Tokens, a panel for each
    #[arg(long, value_delimiter = ',', default_value = "1,16,512,4096")]
    tokens: Vec<usize>,
    /// How unequal the norms of blocks are; 0: all alike
    #[arg(long, default_value_t = 0.7)]
    spread: f32,
    /// Seed of weights and inputs
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Windows of each layer
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Milliseconds of a window
    #[arg(long, default_value_t = 50.0)]
    window_ms: f64,
    /// Milliseconds of the pause before it
    #[arg(long, default_value_t = 20.0)]
    gap_ms: f64,
    /// Rivals: auto, none, or parts of their names [default: torch_matmul_dense on a GPU, none on a
    /// CPU]
    #[arg(long)]
    peers: Option<String>,
    /// Seconds that a tuned rival may search for its parameters, per product
    #[arg(long, default_value_t = 10)]
    tune_seconds: u64,
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
    let default = if device.is_cpu() { "none" } else { "torch_matmul_dense" };
    let peers = args.peers.as_deref().unwrap_or(default);
    let mut rivals = Rivals::start(peers, args.tune_seconds, args.seed, &device, step)?;
    let options = Options {
        features: args.features,
        intermediate: args.intermediate,
        blocks: args.block,
        densities: args.density,
        tokens: args.tokens,
        spread: args.spread,
        seed: args.seed,
        rounds: args.rounds,
        window_ms: args.window_ms,
        gap_ms: args.gap_ms,
        device,
    };
    let study = study::run(&options, &mut rivals, step)?;
    print!("{}", report::table(&study));
    for path in report::write(&study, &args.out)? {
        println!("{}", path.display());
    }
    Ok(())
}
