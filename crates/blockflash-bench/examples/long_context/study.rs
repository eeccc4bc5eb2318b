//! Dense attention against attention over chosen blocks: time, density, error.

use super::data::Recipe;
use blockflash_bench::io::Array;
use blockflash_bench::timing::{Cache, Repeat};
use blockflash_bench::{Error, Result};
use blockflash_ops::block_sparse::block_mean_scores;
use blockflash_ops::{Align, Attention, BlockGeometry, BlockMask, DType, Device, Mask, Stream, Tensor};
use rayon::prelude::*;
use serde::Serialize;

/// What is compared.
#[derive(Clone, Debug)]
pub struct Options {
    pub recipe: Recipe,
    /// Queries and keys of a block.
    pub block: usize,
    /// Blocks at the beginning that every query visits.
    pub sink: usize,
    /// Blocks before its own that every query visits.
    pub window: usize,
    /// Blocks with the best scores that are visited besides, one point for each number.
    pub top_k: Vec<usize>,
    /// Milliseconds for which each choice is timed.
    pub window_ms: f64,
    pub device: Device,
}

/// One choice of blocks.
#[derive(Clone, Debug, Serialize)]
pub struct Point {
    /// `top-k`, or `window` for as many blocks without any scores.
    pub choice: &'static str,
    /// Blocks beyond sink and window.
    pub blocks: usize,
    /// Visited pairs of a query and a key by those that the causal mask shows.
    pub density: f64,
    /// Microseconds of a launch.
    pub us: f64,
    /// Time of dense attention by this one.
    pub speedup: f64,
    /// Useful TFLOP/s.
    pub tflops: f64,
    /// ‖output − dense output‖ / ‖dense output‖.
    pub error: f64,
    /// Mean part of the softmax that the visited keys have in dense attention.
    pub mass: f64,
}

/// All of them.
#[derive(Debug, Serialize)]
pub struct Study {
    pub device: String,
    pub seqlen: usize,
    pub num_heads_q: usize,
    pub num_heads_kv: usize,
    pub head_dim: usize,
    pub block: usize,
    pub sink: usize,
    pub window: usize,
    pub segment: usize,
    pub seed: u64,
    /// Microseconds of a launch of dense causal attention.
    pub dense_us: f64,
    pub dense_tflops: f64,
    pub points: Vec<Point>,
}

/// The names of the choices.
pub const TOP_K: &str = "top-k";
pub const WINDOW: &str = "window";

/// What attention computes.
struct Output {
    o: Array,
    lse: Array,
    us: f64,
}

/// Operands where they are used: on the host to choose blocks, on the device to attend.
struct Operands {
    host: [Array; 2],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stream: Stream,
}

/// Draws the document, attends densely, then over each choice of blocks; `step` is told what happens. The mask of the point in
/// the middle is returned as well, to look at.
///
/// # Errors
/// Sizes that do not fit each other, a device that has no such kernel or fails.
pub fn run(options: &Options, step: impl Fn(&str)) -> Result<(Study, BlockMask)> {
    let Options { recipe, block, sink, window, ref top_k, .. } = *options;
    let geometry = BlockGeometry::new(recipe.seqlen, recipe.seqlen, block, block)?;
    let most = geometry.cols().saturating_sub(sink + window + 1);
    if top_k.is_empty() || top_k.iter().any(|&k| k > most) {
        return Err(Error::Option(format!(
            "--top-k takes numbers up to {most}: {} blocks of keys without sink, window and diagonal",
            geometry.cols()
        )));
    }
    step("drawing the document");
    let operands = Operands::new(options)?;
    step("dense attention");
    let dense = operands.attend(None, options.window_ms)?;
    let fixed = |window: usize| -> Result<BlockMask> {
        let local = BlockMask::window(geometry, Some(window), Some(0), Align::BottomRight)?;
        Ok(local.union(&BlockMask::sink(geometry, sink)?)?.intersect_mask(Mask::causal())?)
    };
    step("scores of blocks");
    let scores = operands.scores(geometry, recipe.heads_q / recipe.heads_kv, &fixed(window)?)?;
    let visible = Mask::causal().visited_pairs(recipe.seqlen, recipe.seqlen) as f64;
    let flops = 4.0 * visible * (recipe.heads_q * recipe.head_dim) as f64;
    let mut study = Study::new(options, dense.us, flops / dense.us * 1e-6);
    let mut looked_at = None;
    for (index, &blocks) in top_k.iter().enumerate() {
        let best =
            BlockMask::top_k_from_scores(geometry, 1, recipe.heads_kv, &scores, blocks, Mask::causal())?;
        let by_scores = best.union(&fixed(window)?)?;
        for (choice, mask) in [(TOP_K, by_scores), (WINDOW, fixed(window + blocks)?)] {
            step(&format!("{choice}, {blocks} blocks"));
            let output = operands.attend(Some(&mask), options.window_ms)?;
            let density = mask.visited_pairs(Mask::causal())? as f64 / (visible * mask.heads() as f64);
            study.points.push(Point {
                choice,
                blocks,
                density,
                us: output.us,
                speedup: dense.us / output.us,
                tflops: flops * density / output.us * 1e-6,
                error: relative_error(&output.o, &dense.o),
                mass: mass(&output.lse, &dense.lse),
            });
            if choice == TOP_K && index == top_k.len() / 2 {
                looked_at = Some(mask);
            }
        }
    }
    // There is a middle, since there is a first.
    let mask = looked_at.map_or_else(|| fixed(window), Ok)?;
    Ok((study, mask))
}

impl Study {
    fn new(options: &Options, dense_us: f64, dense_tflops: f64) -> Self {
        let Options { recipe, block, sink, window, ref device, .. } = *options;
        let name = device.cuda_properties().map_or("CPU".to_owned(), |gpu| gpu.name.clone());
        Self {
            device: name,
            seqlen: recipe.seqlen,
            num_heads_q: recipe.heads_q,
            num_heads_kv: recipe.heads_kv,
            head_dim: recipe.head_dim,
            block,
            sink,
            window,
            segment: recipe.segment,
            seed: recipe.seed,
            dense_us,
            dense_tflops,
            points: Vec::new(),
        }
    }
}

impl Operands {
    fn new(options: &Options) -> Result<Self> {
        let stream = options.device.stream()?;
        let [q, k, v] = options.recipe.draw()?;
        let device = [q.upload(&stream)?, k.upload(&stream)?, v.upload(&stream)?];
        let [device_q, device_k, device_v] = device;
        Ok(Self { host: [q, k], q: device_q, k: device_k, v: device_v, stream })
    }

    /// Scores of blocks for each key-value head, `[1, heads_kv, rows, cols]`: a block is worth what it is worth to the query
    /// head that wants it most, and nothing if it is visited anyway.
    fn scores(&self, geometry: BlockGeometry, group: usize, visited: &BlockMask) -> Result<Vec<f32>> {
        let [q, k] = &self.host;
        let of_query_heads = block_mean_scores(geometry, q.view()?, k.view()?)?;
        let size = geometry.rows() * geometry.cols();
        let best = |heads: &[f32], block: usize| {
            (0..group).map(|head| heads[head * size + block]).fold(f32::NEG_INFINITY, f32::max)
        };
        let visited = visited.to_bool()?;
        let score =
            |heads: &[f32], block: usize| if visited[block] { f32::NEG_INFINITY } else { best(heads, block) };
        let mut scores = Vec::with_capacity(of_query_heads.len() / group);
        for heads in of_query_heads.chunks_exact(group * size) {
            scores.extend((0..size).map(|block| score(heads, block)));
        }
        Ok(scores)
    }

    /// Causal attention, over the blocks of a mask or all of them.
    fn attend(&self, mask: Option<&BlockMask>, window_ms: f64) -> Result<Output> {
        let Self { q, k, v, stream, .. } = self;
        let mask = mask.map(|mask| mask.to(stream)).transpose()?;
        let [batch, seqlen, heads, _] = *q.shape() else {
            return Err(Error::Option(format!("q is {:?}", q.shape())));
        };
        let mut o = Tensor::empty(stream, q.dtype(), q.shape())?;
        let mut lse = Tensor::empty(stream, DType::F32, &[batch, heads, seqlen])?;
        let attention = Attention::new(q.view(), k.view(), v.view());
        let attention = Attention { mask: Mask::causal(), block_mask: mask.as_ref(), ..attention };
        let mut launch =
            |stream: &Stream| Ok(attention.forward_into(o.view_mut(), Some(lse.view_mut()), stream)?);
        let mut repeat = Repeat::new(stream, Cache::Warm, &mut launch)?;
        let us = repeat.window(stream, window_ms, &mut launch)?.us;
        Ok(Output { o: Array::download(&o, stream)?, lse: Array::download(&lse, stream)?, us })
    }
}

/// Rows that are compared at a time.
const PIECE: usize = 1 << 16;

fn relative_error(found: &Array, expected: &Array) -> f64 {
    let squares = |start: usize| {
        let range = start..(start + PIECE).min(expected.len());
        let pairs = found.to_f32(range.clone()).into_iter().zip(expected.to_f32(range));
        pairs.fold([0.0, 0.0], |[error, size], (found, expected)| {
            let [found, expected] = [found, expected].map(f64::from);
            [error + (found - expected).powi(2), size + expected.powi(2)]
        })
    };
    let starts: Vec<_> = (0..expected.len()).step_by(PIECE).collect();
    // In a fixed order, so that the sum does not depend on threads.
    let pieces: Vec<_> = starts.into_par_iter().map(squares).collect();
    let [error, size] =
        pieces.into_iter().fold([0.0, 0.0], |sum, piece| [sum[0] + piece[0], sum[1] + piece[1]]);
    if error == 0.0 { 0.0 } else { (error / size).sqrt() }
}

/// Mean of the visited part of the softmax: the quotient of the denominators.
fn mass(visited: &Array, all: &Array) -> f64 {
    let pairs = visited.to_f32(0..visited.len()).into_iter().zip(all.to_f32(0..all.len()));
    let sum: f64 = pairs.map(|(visited, all)| f64::from(visited - all).exp()).sum();
    sum / all.len().max(1) as f64
}
