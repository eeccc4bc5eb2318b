//! Dense attention against attention over chosen blocks: time, density, error.

use super::data::Recipe;
use super::masks::{Choices, nearest};
use super::results::device_name;
use blockflash_bench::io::Array;
use blockflash_bench::timing::{Cache, Repeat};
use blockflash_bench::{Error, Result};
use blockflash_ops::{Attention, BlockGeometry, BlockMask, DType, Device, Mask, Stream, Tensor};
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
    /// Blocks of each row with the best scores, be they in sink and window or not: one point for
    /// each number.
    pub top_k: Vec<usize>,
    /// Milliseconds for which each choice is timed.
    pub window_ms: f64,
    pub device: Device,
}

impl Options {
    /// How the document is divided into blocks.
    ///
    /// # Errors
    /// Sizes that the library does not take.
    pub fn geometry(&self) -> Result<BlockGeometry> {
        let Self { recipe, block, .. } = *self;
        Ok(BlockGeometry::new(recipe.seqlen, recipe.seqlen, block, block)?)
    }
}

/// One choice of blocks.
#[derive(Clone, Debug, Serialize)]
pub struct Point {
    /// `top-k`, or `window` for as many blocks without any scores.
    pub choice: &'static str,
    /// Blocks with the best scores.
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
    /// Microseconds of building the mask, which are not in `us`; `None` for what needs no scores.
    pub mask_us: Option<f64>,
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
    /// Microseconds of computing the scores, which are not in the times of points.
    pub scores_us: f64,
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

/// Operands on the device.
struct Operands {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stream: Stream,
}

/// Draws the document, attends densely, then over each choice of blocks; `step` is told what
/// happens. The mask of the point in the middle is returned as well, to look at.
///
/// # Errors
/// Sizes that do not fit each other, a device that has no such kernel or fails.
pub fn run(options: &Options, step: impl Fn(&str)) -> Result<(Study, BlockMask)> {
    let Options { recipe, sink, ref top_k, window_ms, .. } = *options;
    let most = options.geometry()?.cols();
    if top_k.is_empty() || top_k.iter().any(|&k| k > most) {
        return Err(Error::Option(format!(
            "--top-k takes numbers up to {most}: there are {most} blocks of keys"
        )));
    }
    step("drawing the document");
    let operands = Operands::new(options)?;
    let stream = &operands.stream;
    step("dense attention");
    let dense = operands.attend(None, window_ms)?;
    step("scores of blocks");
    let choices = Choices::new(options, &operands.q, &operands.k, stream)?;
    let visible = Mask::causal().visited_pairs(recipe.seqlen, recipe.seqlen) as f64;
    let flops = 4.0 * visible * (recipe.heads_q * recipe.head_dim) as f64;
    let mut study = Study::new(options, dense.us, flops / dense.us * 1e-6, choices.scores_us);
    let mut looked_at = None;
    for (index, &blocks) in top_k.iter().enumerate() {
        step(&format!("mask of {blocks} blocks"));
        let (buffer, mask_us) = choices.best(blocks, window_ms, stream)?;
        // How many blocks are visited is known on the device only.
        let best = buffer.to_host(stream)?;
        let near = nearest(&best, sink)?;
        let near_device = near.to(stream)?;
        let both =
            [(TOP_K, &best, buffer.mask(), Some(mask_us)), (WINDOW, &near, &near_device, None)];
        for (choice, host, mask, mask_us) in both {
            step(&format!("{choice}, {blocks} blocks"));
            let output = operands.attend(Some(mask), window_ms)?;
            let density =
                host.visited_pairs(Mask::causal())? as f64 / (visible * host.heads() as f64);
            study.points.push(Point {
                choice,
                blocks,
                density,
                us: output.us,
                speedup: dense.us / output.us,
                tflops: flops * density / output.us * 1e-6,
                error: relative_error(&output.o, &dense.o),
                mass: mass(&output.lse, &dense.lse),
                mask_us,
            });
        }
        if index == top_k.len() / 2 {
            looked_at = Some(best);
        }
    }
    // There is a middle, since there is a first.
    let mask = looked_at.ok_or_else(|| Error::Option("no mask was built".to_owned()))?;
    Ok((study, mask))
}

impl Study {
    fn new(options: &Options, dense_us: f64, dense_tflops: f64, scores_us: f64) -> Self {
        let Options { recipe, block, sink, window, ref device, .. } = *options;
        Self {
            device: device_name(device),
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
            scores_us,
            points: Vec::new(),
        }
    }
}

impl Operands {
    fn new(options: &Options) -> Result<Self> {
        let stream = options.device.stream()?;
        let [q, k, v] = options.recipe.draw()?;
        Ok(Self { q: q.upload(&stream)?, k: k.upload(&stream)?, v: v.upload(&stream)?, stream })
    }

    /// Causal attention, over the blocks of a mask or all of them.
    fn attend(&self, mask: Option<&BlockMask>, window_ms: f64) -> Result<Output> {
        let Self { q, k, v, stream, .. } = self;
        let [batch, seqlen, heads, _] = *q.shape() else {
            return Err(Error::Option(format!("q is {:?}", q.shape())));
        };
        let mut o = Tensor::empty(stream, q.dtype(), q.shape())?;
        let mut lse = Tensor::empty(stream, DType::F32, &[batch, heads, seqlen])?;
        let attention = Attention::new(q.view(), k.view(), v.view());
        let attention = Attention { mask: Mask::causal(), block_mask: mask, ..attention };
        let us = time(stream, window_ms, |stream| {
            attention.forward_into(o.view_mut(), Some(lse.view_mut()), stream)
        })?;
        Ok(Output { o: Array::download(&o, stream)?, lse: Array::download(&lse, stream)?, us })
    }
}

/// Microseconds of a launch.
///
/// # Errors
/// A launch or a device that fails.
pub fn time(
    stream: &Stream,
    window_ms: f64,
    mut launch: impl FnMut(&Stream) -> blockflash_ops::Result<()>,
) -> Result<f64> {
    let mut launch = |stream: &Stream| Ok(launch(stream)?);
    let mut repeat = Repeat::new(stream, Cache::Warm, &mut launch)?;
    Ok(repeat.window(stream, window_ms, &mut launch)?.us)
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
