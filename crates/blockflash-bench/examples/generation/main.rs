//! Generation with a paged cache and continuous batching: what an inference engine does with the
//! library, in small.
//!
//! ```text
//! cargo run --release --example generation                  on a GPU, else on the CPU
//! cargo run --release --example generation -- --layers 2 --sequences 6 --device cpu
//! ```
//!
//! `model.rs` has a transformer with random weights and one step of it: each layer appends keys and
//! values to its cache and attends to it in one call, `AttentionDecode` with an `AppendKv`, queries
//! and keys turned by rotary embeddings. `engine.rs` lets sequences join and leave; on a GPU a
//! graph for each number of sequences repeats the step, while lengths and block tables change.
//! `reference.rs` computes every sequence again without a cache: if a token differs by more than
//! rounding explains, the example fails.
#![forbid(unsafe_code)]
// Nothing is outside of a program: `pub` is `pub(crate)` here.
#![allow(unreachable_pub)]

mod engine;
#[path = "../common/layer.rs"]
mod layer;
mod model;
#[path = "../common/program.rs"]
mod program;
mod reference;
#[path = "../common/sparsity.rs"]
mod sparsity;

use blockflash_bench::random;
use blockflash_ops::DType;
use clap::Parser;
use engine::{Engine, Sequence, Tally};
use model::{Model, Sizes};
use reference::Agreement;
use std::process::ExitCode;

/// Generates from a transformer with random weights.
#[derive(Parser)]
struct Args {
    /// Layers
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Heads of queries, a multiple of those of keys; twice as many as a multiple of 2
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Heads of keys and values
    #[arg(long, default_value_t = 2)]
    kv_heads: usize,
    /// Tokens that exist
    #[arg(long, default_value_t = 1024)]
    vocabulary: usize,
    /// Sequences to generate
    #[arg(long, default_value_t = 48)]
    sequences: usize,
    /// Most sequences at a time, rounded up to a power of 2
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Most tokens of a prompt, and most tokens that follow it
    #[arg(long, default_value_t = 128)]
    tokens: usize,
    /// Seed of weights and prompts
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// f16, bf16 or, on a CPU, f32 [default: bf16 on a GPU, f32 on a CPU]
    #[arg(long, value_parser = program::dtype)]
    dtype: Option<DType>,
    /// cpu, cuda or cuda:N [default: the first usable GPU, else cpu]
    #[arg(long)]
    device: Option<String>,
}

fn main() -> ExitCode {
    program::main(run)
}

fn run(args: Args) -> Result<(), program::Failure> {
    let positive = [args.layers, args.heads, args.kv_heads, args.vocabulary, args.sequences];
    if positive.contains(&0) || args.batch == 0 || args.tokens < 2 || args.batch > 1 << 12 {
        return Err("sizes must be positive, --tokens at least 2, --batch at most 4096".into());
    }
    let device = program::device(args.device.as_deref())?;
    let stream = device.stream()?;
    let page_size = 16;
    let max_pages = (2 * args.tokens).div_ceil(page_size);
    let sizes = Sizes {
        layers: args.layers,
        heads: [args.heads, args.kv_heads],
        head_dim: 64,
        vocabulary: args.vocabulary,
        page_size,
        max_pages,
        // Not enough for all rows at once: pages are what sequences wait for, too.
        pages: max_pages * args.batch.div_ceil(2).max(1),
        dtype: args.dtype.unwrap_or(if device.is_cpu() { DType::F32 } else { DType::BF16 }),
    };
    eprintln!("weights and graphs");
    let model = Model::new(sizes, args.seed, &stream)?;
    let sequences = sequences(&args);
    let mut engine = Engine::new(&model, args.batch, sequences, &stream)?;
    engine.run(|[waiting, running, done]| {
        eprint!("\r{waiting:>5} wait, {running:>5} run, {done:>5} done ");
    })?;
    eprintln!();

    println!("{} in {}, {} layers, {} heads", device, sizes.dtype, args.layers, args.heads);
    println!("\nstep            steps   tokens  ms/step  tokens/s");
    println!("{}", line("prompt", &engine.prefill));
    for (batch, tally) in &engine.decode {
        println!("{}", line(&format!("batch of {batch}"), tally));
    }
    let mut agreement = Agreement::default();
    for sequence in &engine.done {
        agreement.add(&model, sequence, &stream)?;
    }
    let Agreement { equal, tied, wrong } = agreement;
    println!("\nwithout a cache: {equal} tokens equal, {tied} tied, {wrong} wrong");
    match wrong {
        0 => Ok(()),
        _ => Err("tokens differ from those without a cache".into()),
    }
}

/// Prompts of random tokens, of many lengths.
fn sequences(args: &Args) -> Vec<Sequence> {
    let at_most = |word: i32, most: usize| 1 + word as u32 as usize % most;
    let lengths = random::words(2 * args.sequences, args.seed ^ 1);
    let sequence = |(at, lengths): (usize, &[i32])| {
        let prompt = at_most(lengths[0], args.tokens);
        let words = random::words(prompt, args.seed ^ (at as u64 + 2));
        let tokens = words.into_iter().map(|word| word as u32 % args.vocabulary as u32).collect();
        Sequence::new(tokens, prompt + at_most(lengths[1], args.tokens))
    };
    lengths.chunks_exact(2).enumerate().map(sequence).collect()
}

fn line(what: &str, tally: &Tally) -> String {
    let Tally { steps, tokens, seconds } = *tally;
    let (ms, rate) = (seconds * 1e3 / steps as f64, tokens as f64 / seconds);
    format!("{what:<14} {steps:>6} {tokens:>8} {ms:>8.3} {rate:>9.0}")
}
