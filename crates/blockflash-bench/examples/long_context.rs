//! Long context: how much faster, and how wrong, attention becomes when each block of queries
//! visits only the first blocks, those around it and those with the best scores, instead of all
//! before it.
//!
//! ```text
//! cargo run --release --example long_context              65,536 tokens, 32 heads on 8, on a GPU
//! cargo run --release --example long_context -- \
//!     --seqlen 4096 --heads 4 --heads-kv 2 --head-dim 64 --top-k 2,4,8 --device cpu
//! ```
//!
//! Each query head scores its blocks by the mean query times the mean key. Scores and mask are made
//! on the device, as a model would make them at each step, and timed apart. The inputs have the
//! structure of a document (`blockflash_cases::document`): in independent random numbers all keys
//! are alike, so an error would say nothing. For comparison, `nearest` visits as many blocks of
//! each row without any scores.
#![forbid(unsafe_code)]

use blockflash_bench::document::Recipe;
use blockflash_bench::io::Array;
use blockflash_ops::block_sparse::{BlockChoice, BlockMaskBuffer, BlockScores, BlockSource};
use blockflash_ops::{
    Align, Attention, AttentionOutput, BlockGeometry, BlockMask, Device, Mask, Result, Scores,
    Stream, Tensor,
};
use clap::Parser;
use std::time::Instant;

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
    /// Blocks with the best scores that it visits, be they among those or not: a line for each
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
    device: Option<Device>,
}

fn main() {
    if let Err(error) = run(&Args::parse()) {
        eprintln!("error: {error}");
        std::process::exit(2);
    }
}

fn run(args: &Args) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let &Args { seqlen, heads, heads_kv, head_dim, block, segment, seed, .. } = args;
    let stream = args.device.unwrap_or_else(Device::best).stream()?;
    let geometry = BlockGeometry::new(seqlen, seqlen, block, block)?;
    if let Some(k) = args.top_k.iter().find(|&&k| k > geometry.cols()) {
        return Err(format!("--top-k is {k}, but there are {} blocks", geometry.cols()).into());
    }
    let recipe = Recipe { seqlen, heads_q: heads, heads_kv, head_dim, segment, seed };
    let [q, k, v] = recipe.draw()?;
    let [q, k, v] = [q.upload(&stream)?, k.upload(&stream)?, v.upload(&stream)?];
    let attend = |mask: Option<&BlockMask>| -> Result<(AttentionOutput, f64)> {
        let call = Attention::new(q.view(), k.view(), v.view());
        let call = Attention {
            scores: Scores { mask: Mask::causal(), ..call.scores },
            block_mask: mask,
            ..call
        };
        let mut output = call.forward(&stream)?;
        let ms = time(&stream, args.window_ms, || {
            call.forward_into(output.o.view_mut(), Some(output.lse.view_mut()), &stream)
        })?;
        Ok((output, ms))
    };
    let (dense, dense_ms) = attend(None)?;

    // What every block of queries visits, and the scores of all others.
    let local = BlockMask::window(geometry, Some(args.window), Some(0), Align::BottomRight)?;
    let always = local.union(&BlockMask::sink(geometry, args.sink)?)?.to(&stream)?;
    let mut scores = BlockScores::new(geometry, q.view(), k.view(), &stream)?;
    let scores_ms = time(&stream, args.window_ms, || scores.compute(q.view(), k.view(), &stream))?;
    println!("dense attention: {dense_ms:.3} ms; scores of blocks: {scores_ms:.3} ms");
    println!("choice    top-k  density        ms  speed-up    error  softmax mass   mask ms");

    for &best in &args.top_k {
        let visited = heads * (geometry.rows() * best + always.nnz());
        let room = visited.min(heads * geometry.rows() * geometry.cols());
        let mut buffer = BlockMaskBuffer::new(geometry, 1, heads, room, &stream)?;
        let source = BlockSource::Scores { scores: scores.scores().view(), k: best };
        let choice = BlockChoice { source, always: Some(&always), mask: Mask::causal() };
        let mask_ms = time(&stream, args.window_ms, || buffer.build(&choice, &stream))?;
        buffer.check(&stream)?;
        let chosen = buffer.to_host(&stream)?;
        let near = nearest(&chosen, args.sink)?;
        let near_there = near.to(&stream)?;
        let choices = [
            ("top-k", &chosen, buffer.mask(), format!("{mask_ms:.3}")),
            ("nearest", &near, &near_there, "–".to_owned()),
        ];
        for (name, on_host, mask, mask_ms) in choices {
            let visible = Mask::causal().visited_pairs(seqlen, seqlen) as f64;
            let pairs = on_host.visited_pairs(Mask::causal())? as f64;
            let density = pairs / (visible * on_host.heads() as f64);
            let (found, ms) = attend(Some(mask))?;
            let error = relative_error(&found.o, &dense.o, &stream)?;
            let mass = visited_mass(&found.lse, &dense.lse, &stream)?;
            println!(
                "{name:<8} {best:>6}  {:>5.1} %  {ms:>8.3}  {:>8.2}  {:>5.2} %  {:>10.2} %  \
                 {mask_ms:>8}",
                density * 100.0,
                dense_ms / ms,
                error * 100.0,
                mass * 100.0
            );
        }
    }
    Ok(())
}

/// As many blocks in each row as `mask` visits under a causal mask: the first `sink` ones and the
/// nearest.
fn nearest(mask: &BlockMask, sink: usize) -> Result<BlockMask> {
    let (mut row_ptr, mut col_idx) = (Vec::new(), Vec::new());
    for head in 0..mask.heads() {
        row_ptr.push(col_idx.len() as i32);
        for row in 0..mask.rows() {
            let near = mask.row(0, head, row)?.len().saturating_sub(sink);
            let columns = (0..=row).filter(|&col| col < sink || col + near > row);
            col_idx.extend(columns.map(|col| col as i32));
            row_ptr.push(col_idx.len() as i32);
        }
    }
    BlockMask::from_parts(mask.geometry(), 1, mask.heads(), &row_ptr, &col_idx)
}

/// Milliseconds of a launch: the mean over as many as fit into the window, after a warm-up.
fn time(stream: &Stream, window_ms: f64, mut launch: impl FnMut() -> Result<()>) -> Result<f64> {
    launch()?;
    stream.synchronize()?;
    let (start, mut launches) = (Instant::now(), 0);
    loop {
        launch()?;
        launches += 1;
        // Launches are queued: only every eighth one is waited for.
        if launches % 8 == 0 || stream.device().is_cpu() {
            stream.synchronize()?;
            let ms = start.elapsed().as_secs_f64() * 1e3;
            if ms >= window_ms {
                return Ok(ms / f64::from(launches));
            }
        }
    }
}

/// ‖found − expected‖ / ‖expected‖
fn relative_error(found: &Tensor, expected: &Tensor, stream: &Stream) -> Result<f64> {
    let [found, expected] = [Array::download(found, stream)?, Array::download(expected, stream)?];
    let [found, expected] = [&found, &expected].map(|array| array.to_f32(0..array.len()));
    let pairs = found.iter().zip(&expected);
    let [error, size] = pairs.fold([0.0; 2], |[error, size], (&found, &expected)| {
        let [found, expected] = [found, expected].map(f64::from);
        [error + (found - expected).powi(2), size + expected.powi(2)]
    });
    Ok((error / size.max(f64::MIN_POSITIVE)).sqrt())
}

/// Mean part of the softmax that visited keys have in dense attention: a quotient of denominators.
fn visited_mass(visited: &Tensor, all: &Tensor, stream: &Stream) -> Result<f64> {
    let [visited, all] = [visited.to_vec::<f32>(stream)?, all.to_vec::<f32>(stream)?];
    let sum: f64 = visited.iter().zip(&all).map(|(part, all)| f64::from(part - all).exp()).sum();
    Ok(sum / all.len().max(1) as f64)
}
