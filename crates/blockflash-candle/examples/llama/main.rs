//! A Llama generates token by token: its prompt by blockflash's attention, each further token by
//! blockflash's cache; and once more by candle's own operations, for comparison.
//!
//! ```sh
//! alias llama="cargo run --release -p blockflash-candle --example llama"
//! llama -- --make /tmp/small-llama
//! llama -- /tmp/small-llama --prompt 4000 --sparse
//! llama --features cuda -- LLAMA --device cuda
//! ```

mod attention;
mod config;
mod model;

use attention::Kind;
use blockflash_candle::BlockTopK;
use candle_core::{DType, Device, Result, bail};
use clap::{Parser, ValueEnum};
use comfy_table::Table;
use config::Config;
use indicatif::{ProgressBar, ProgressStyle};
use model::Model;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Generates with a Llama, by blockflash's attention and by candle's.
#[derive(Parser)]
struct Args {
    /// Folder with config.json and the weights as *.safetensors, under the names of Hugging Face.
    model: PathBuf,
    /// Writes a small model with random weights into the folder, and generates with it.
    #[arg(long)]
    make: bool,
    /// Tokens of the prompt, which are made up.
    #[arg(long, default_value_t = 500)]
    prompt: usize,
    /// Tokens to generate.
    #[arg(long, default_value_t = 32)]
    tokens: usize,
    /// Chooses the blocks of the prompt that are attended to.
    #[arg(long)]
    sparse: bool,
    /// Blocks that `--sparse` chooses for each block of 64 queries.
    #[arg(long, default_value_t = 16)]
    blocks: usize,
    /// On a GPU, the model runs in bf16.
    #[arg(long, value_enum, default_value_t = Place::Cpu)]
    device: Place,
}

#[derive(Clone, Copy, ValueEnum)]
enum Place {
    Cpu,
    Cuda,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether both attentions gave the tokens that they should.
fn run(args: &Args) -> Result<bool> {
    let (device, dtype) = match args.device {
        Place::Cpu => (Device::Cpu, DType::F32),
        Place::Cuda => (Device::new_cuda(0)?, DType::BF16),
    };
    if args.prompt == 0 || args.tokens == 0 {
        bail!("a prompt and an answer have at least one token");
    }
    if args.make {
        config::make(&args.model)?;
    }
    let config = Config::read(&args.model)?;
    let positions = args.prompt + args.tokens;
    let model = Model::load(&args.model, config, positions, dtype, &device)?;
    let prompt: Vec<u32> = (0..args.prompt)
        .map(|at| (at * 7919 + 13) % model.config.vocab_size)
        .map(|id| id as u32)
        .collect();
    let blocks = args.sparse.then(|| BlockTopK { count: args.blocks, ..BlockTopK::new(64) });

    let mut table = Table::new();
    table.set_header(["attention", "prompt", "per token", "equal tokens"]);
    let mut first: Option<Vec<u32>> = None;
    for (name, kind) in [("candle", Kind::Candle), ("blockflash", Kind::Blockflash { blocks })] {
        let (tokens, [prefill, decoding]) = generate(&model, name, kind, &prompt, args.tokens)?;
        let expected = first.get_or_insert_with(|| tokens.clone());
        let equal = tokens.iter().zip(expected).take_while(|(token, other)| token == other).count();
        let milliseconds = |time: Duration| format!("{:.2} ms", time.as_secs_f64() * 1e3);
        let per_token = decoding / (args.tokens as u32 - 1).max(1);
        let equal = format!("{equal} of {}", args.tokens);
        table.add_row([name.to_owned(), milliseconds(prefill), milliseconds(per_token), equal]);
        if first.as_ref() != Some(&tokens) {
            println!("{table}");
            // Fewer keys, or another rounding in bf16, may lead elsewhere.
            return Ok(args.sparse || dtype != DType::F32);
        }
    }
    println!("{table}");
    Ok(true)
}

/// The tokens after a prompt, the time to the first and that of all others.
fn generate(
    model: &Model,
    name: &str,
    kind: Kind,
    prompt: &[u32],
    count: usize,
) -> Result<(Vec<u32>, [Duration; 2])> {
    let style = ProgressStyle::with_template("{msg:10} {bar:30} {pos}/{len} tokens, {elapsed}");
    let style = style.map_err(candle_core::Error::msg)?;
    let progress = ProgressBar::new(count as u64).with_style(style).with_message(name.to_owned());
    progress.tick();
    let mut caches = model.caches(kind, prompt.len() + count)?;
    let started = Instant::now();
    let mut tokens = vec![model.next(prompt, &mut caches)?];
    let prefill = started.elapsed();
    let started = Instant::now();
    while let (Some(&last), true) = (tokens.last(), tokens.len() < count) {
        progress.set_position(tokens.len() as u64);
        tokens.push(model.next(&[last], &mut caches)?);
    }
    progress.finish();
    Ok((tokens, [prefill, started.elapsed()]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(model: &std::path::Path, sparse: bool) -> Args {
        let (model, device) = (model.to_path_buf(), Place::Cpu);
        Args { model, make: !sparse, prompt: 300, tokens: 6, sparse, blocks: 2, device }
    }

    #[test]
    fn both_attentions_give_the_same_tokens() -> Result<()> {
        let folder = tempfile::tempdir()?;
        assert!(run(&args(folder.path(), false))?);
        assert!(run(&args(folder.path(), true))?);
        assert!(run(&args(&folder.path().join("none"), true)).is_err());
        Ok(())
    }
}
