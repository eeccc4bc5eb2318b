//! A Llama generates token by token: its prompt by blockflash's attention, each further token by
//! blockflash's cache; and once more by candle's own operations, for comparison.
//!
//! ```sh
//! alias llama="cargo run --release -p blockflash-candle --example llama"
//! llama -- --make small /tmp/small-llama
//! llama -- /tmp/small-llama --prompt 4000 --sparse
//! llama --features cuda -- LLAMA --device cuda
//! ```

mod attention;
mod config;
mod generation;
mod model;

use attention::Kind;
use blockflash_candle::BlockTopK;
use candle_core::{DType, Device, Result, bail};
use clap::{Parser, ValueEnum};
use comfy_table::Table;
use config::{Config, Size};
use generation::{Generation, generate};
use model::Model;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Generates with a Llama, by blockflash's attention and by candle's.
#[derive(Parser)]
struct Args {
    /// Folder with config.json and the weights as *.safetensors, under the names of Hugging Face.
    model: PathBuf,
    /// Writes a model of this size with random weights into the folder, and generates with it.
    #[arg(long, value_enum)]
    make: Option<Size>,
    /// Tokens of the prompt, which are made up.
    #[arg(long, default_value_t = 500)]
    prompt: usize,
    /// Tokens to generate.
    #[arg(long, default_value_t = 32)]
    tokens: usize,
    /// Generates once more, where the prompt attends to chosen blocks.
    #[arg(long)]
    sparse: bool,
    /// Blocks that `--sparse` chooses for each block of 128 queries.
    #[arg(long, default_value_t = 16)]
    blocks: usize,
    /// Leaves out candle's attention, which needs memory for all scores of a prompt.
    #[arg(long)]
    alone: bool,
    /// Rounds that are measured, after one that is not. The table has their medians.
    #[arg(long, default_value_t = 1)]
    rounds: usize,
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

/// Whether all attentions over whole prompts gave the same tokens, but for rounding.
fn run(args: &Args) -> Result<bool> {
    // Logits that differ by less than this part of the largest are equal but for rounding.
    let (device, dtype, rounding) = match args.device {
        Place::Cpu => (Device::Cpu, DType::F32, 1e-4),
        Place::Cuda => (Device::new_cuda(0)?, DType::BF16, 0.03),
    };
    if args.prompt == 0 || args.tokens < 2 || args.rounds == 0 {
        bail!("a prompt has at least one token, an answer two, and one round is measured");
    }
    if let Some(size) = args.make {
        config::make(&args.model, size, dtype, &device)?;
    }
    let config = Config::read(&args.model)?;
    let positions = args.prompt + args.tokens;
    let model = Model::load(&args.model, config, positions, dtype, &device)?;
    let prompt: Vec<u32> = (0..args.prompt)
        .map(|at| (at * 7919 + 13) % model.config.vocab_size)
        .map(|id| id as u32)
        .collect();

    let blocks = BlockTopK { count: args.blocks, ..BlockTopK::new(128) };
    let mut kinds = vec![("blockflash", Kind::Blockflash { blocks: None })];
    if !args.alone {
        kinds.insert(0, ("candle", Kind::Candle));
    }
    if args.sparse {
        kinds.push(("blockflash, chosen blocks", Kind::Blockflash { blocks: Some(blocks) }));
    }
    let mut tokens: Option<Vec<u32>> = None;
    let mut results: Vec<Vec<Generation>> = vec![Vec::new(); kinds.len()];
    for round in 0..=args.rounds {
        for ((name, kind), results) in kinds.iter().zip(&mut results) {
            // Everybody continues the tokens of the first, so that a tie does not change the rest.
            let generation =
                generate(&model, name, *kind, &prompt, args.tokens, tokens.as_deref())?;
            tokens.get_or_insert_with(|| generation.tokens.clone());
            if round > 0 {
                results.push(generation);
            }
        }
    }

    let mut table = Table::new();
    table.set_header(["attention", "prompt", "per token", "equal tokens", "ties", "others"]);
    let mut same = true;
    for ((name, kind), results) in kinds.iter().zip(&results) {
        let median = |of: fn(&Generation) -> Duration| {
            let mut times: Vec<Duration> = results.iter().map(of).collect();
            times.sort();
            format!("{:.2} ms", times[times.len() / 2].as_secs_f64() * 1e3)
        };
        let lost = || results.iter().flat_map(|result| &result.lost);
        let equal = lost().filter(|&&lost| lost == 0.0).count();
        let tied = lost().filter(|&&lost| lost > 0.0 && lost <= rounding).count();
        let others = lost().count() - equal - tied;
        same &= others == 0 || matches!(kind, Kind::Blockflash { blocks: Some(_) });
        let counts = [equal, tied, others].map(|count| count.to_string());
        let times = [median(|of| of.prompt), median(|of| of.per_token)];
        table.add_row([name.to_string()].into_iter().chain(times).chain(counts));
    }
    println!("{table}");
    Ok(same)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(model: &std::path::Path, make: Option<Size>) -> Args {
        let (model, sparse, alone) = (model.to_path_buf(), make.is_none(), make.is_none());
        let (prompt, tokens, blocks, rounds) = (300, 6, 1, 1);
        let device = Place::Cpu;
        Args { model, make, prompt, tokens, sparse, blocks, alone, rounds, device }
    }

    #[test]
    fn both_attentions_give_the_same_tokens() -> Result<()> {
        let folder = tempfile::tempdir()?;
        assert!(run(&args(folder.path(), Some(Size::Small)))?);
        assert!(run(&args(folder.path(), None))?);
        assert!(run(&args(&folder.path().join("none"), None)).is_err());
        Ok(())
    }
}
