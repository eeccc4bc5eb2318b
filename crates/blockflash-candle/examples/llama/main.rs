//! A Llama generates token by token: its prompt by blockflash's attention, each further token by
//! blockflash's cache; and once more by candle's own operations, for comparison. Both are held
//! against the same model in f32.
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
use generation::{Differences, Generation, generate};
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
    /// Leaves out candle's attention, which needs memory for all scores of a prompt, and f32.
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

/// Whether blockflash's attention over whole prompts gave the tokens of the reference, but for
/// rounding.
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
    let prompt: Vec<u32> = (0..args.prompt)
        .map(|at| (at * 7919 + 13) % config.vocab_size)
        .map(|id| id as u32)
        .collect();
    let load = |dtype| Model::load(&args.model, config.clone(), positions, dtype, &device);

    let mut reference: Option<Generation> = None;
    let mut rows = Vec::new();
    if !args.alone {
        let (exact, name) = (Kind::Candle { exact: true }, "candle, all in f32");
        reference = Some(generate(&load(DType::F32)?, name, exact, &prompt, args.tokens, None)?);
        if dtype != DType::F32 {
            rows.push(Row { measured: false, ..Row::new("candle, attention in f32", exact) });
        }
        rows.push(Row::new("candle", Kind::Candle { exact: false }));
    }
    rows.push(Row::new("blockflash", Kind::Blockflash { blocks: None }));
    if args.sparse {
        let blocks = BlockTopK { count: args.blocks, ..BlockTopK::new(128) };
        let kind = Kind::Blockflash { blocks: Some(blocks) };
        rows.push(Row::new("blockflash, chosen blocks", kind));
    }
    let model = load(dtype)?;
    for round in 0..=args.rounds {
        for row in rows.iter_mut().filter(|row| round == 0 || row.measured) {
            let given = reference.as_ref();
            let generation = generate(&model, row.name, row.kind, &prompt, args.tokens, given)?;
            row.keep(generation.differences(given.unwrap_or(&generation), rounding));
            if round > 0 {
                row.times.push([generation.prompt, generation.per_token]);
            }
            // Without candle, the first one is the reference.
            reference.get_or_insert(generation);
        }
    }

    let mut table = Table::new();
    let header = ["attention", "prompt", "per token", "equal tokens", "ties", "others", "distance"];
    table.set_header(header);
    rows.iter().for_each(|row| _ = table.add_row(row.cells()));
    println!("{table}");
    let dense = |row: &&Row| matches!(row.kind, Kind::Blockflash { blocks: None });
    Ok(rows.iter().filter(dense).all(|row| row.worst.others == 0))
}

/// One of the attentions.
struct Row {
    name: &'static str,
    kind: Kind,
    /// Whether there are times of it.
    measured: bool,
    /// Until the first token, and for each of the others.
    times: Vec<[Duration; 2]>,
    /// Of the round that differs most.
    worst: Differences,
}

impl Row {
    fn new(name: &'static str, kind: Kind) -> Self {
        Self { name, kind, measured: true, times: Vec::new(), worst: Differences::default() }
    }

    fn keep(&mut self, new: Differences) {
        let order = |of: &Differences| (of.others, of.ties);
        if order(&new) >= order(&self.worst) {
            self.worst = new;
        }
    }

    /// With medians of the times.
    fn cells(&self) -> [String; 7] {
        let median = |which: usize| {
            let mut times: Vec<Duration> = self.times.iter().map(|times| times[which]).collect();
            times.sort();
            let median = times.get(times.len() / 2);
            median.map_or_else(String::new, |of| format!("{:.2} ms", of.as_secs_f64() * 1e3))
        };
        let Differences { equal, ties, others, distance } = &self.worst;
        let [equal, ties, others] = [equal, ties, others].map(ToString::to_string);
        let distance = format!("{:.2} %", distance * 100.0);
        [self.name.to_owned(), median(0), median(1), equal, ties, others, distance]
    }
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
