//! Compares the layer with all blocks to layers with fewer blocks: time, error and break-even.

use super::layer::{Activations, Mlp};
use super::reference;
use super::results::device_name;
use super::rivals::{Rival, Rivals};
use super::weights::{Ranking, Weights};
use blockflash_bench::report;
use blockflash_bench::timing::{Cache, Repeat, flush_bytes, median};
use blockflash_bench::{Error, Result};
use blockflash_ops::{Device, Stream};
use serde::Serialize;
use std::time::Duration;

/// Sizes and settings of the comparison.
#[derive(Clone, Debug)]
pub struct Options {
    /// Features of a token.
    pub features: usize,
    /// Features between the projections.
    pub intermediate: usize,
    pub blocks: Vec<usize>,
    /// Fractions of the blocks to store; 1 is added if it is missing.
    pub densities: Vec<f64>,
    /// Numbers of tokens to measure.
    pub tokens: Vec<usize>,
    /// How unequal the norms of blocks are.
    pub spread: f32,
    pub seed: u64,
    /// Number of windows per layer.
    pub rounds: usize,
    /// Milliseconds of a window, and of the pause before it.
    pub window_ms: f64,
    pub gap_ms: f64,
    pub device: Device,
}

/// Result of one layer for one number of tokens.
#[derive(Clone, Debug, Serialize)]
pub struct Point {
    pub tokens: usize,
    pub block_size: usize,
    /// Fraction of the blocks that is stored, over both projections.
    pub density: f64,
    /// Microseconds of the layer.
    pub us: f64,
    /// Microseconds of the layer with all blocks, measured in turns with this one; its block size
    /// is the fastest for this number of tokens.
    pub dense_us: f64,
    /// `dense_us / us`.
    pub speedup: f64,
    /// Useful TFLOP/s.
    pub tflops: f64,
    /// ‖y − y of all blocks‖ / ‖y of all blocks‖ over the sampled tokens, where y of all blocks is
    /// computed on the host without rounding.
    pub error: f64,
    /// The same against the host's result for the same blocks: the error of bf16.
    pub rounding: f64,
    /// Rivals that multiply the same blocks.
    pub rivals: Vec<Rival>,
}

/// Density at which sparse weights stop being faster.
#[derive(Clone, Debug, Serialize)]
pub struct BreakEven {
    pub tokens: usize,
    pub block_size: usize,
    /// `all blocks` for our own product, or the dense product of another library.
    pub over: String,
    /// `None` if not even the lowest density is faster.
    pub density: Option<f64>,
}

/// The dense products of another library for a number of tokens.
#[derive(Clone, Debug, Serialize)]
pub struct Dense {
    pub tokens: usize,
    #[serde(flatten)]
    pub rival: Rival,
}

/// Result of the study.
#[derive(Debug, Serialize)]
pub struct Study {
    pub device: String,
    pub features: usize,
    pub intermediate: usize,
    pub spread: f32,
    pub seed: u64,
    pub points: Vec<Point>,
    pub dense: Vec<Dense>,
    pub break_even: Vec<BreakEven>,
}

/// Value of [`BreakEven::over`] for our own product with all blocks.
pub const ALL_BLOCKS: &str = "all blocks";

/// Largest error that bf16 can cause; a larger one means a wrong result.
const LARGEST_ROUNDING: f64 = 0.01;

/// Weights, layers and stream.
struct Bench<'a> {
    options: &'a Options,
    weights: [Weights; 2],
    /// One list per block size, by ascending density; the last layer has all blocks.
    layers: Vec<Vec<Mlp>>,
    stream: Stream,
}

/// Draws and prunes the weights, and measures every layer for every number of tokens. `step` is
/// called with progress messages.
///
/// # Errors
/// Invalid options, a wrong result, or a device that fails or lacks such a kernel. The failure of a
/// rival goes into its record.
pub fn run(options: &Options, rivals: &mut Rivals, step: impl Fn(&str)) -> Result<Study> {
    step("drawing and pruning the weights");
    let bench = Bench::new(options)?;
    let Options { features, intermediate, spread, seed, .. } = *options;
    let device = device_name(&options.device);
    let none = (Vec::new(), Vec::new(), Vec::new());
    let (points, dense, break_even) = none;
    let mut study =
        Study { device, features, intermediate, spread, seed, points, dense, break_even };
    for &tokens in &options.tokens {
        bench.measure(tokens, rivals, &mut study, &step)?;
    }
    Ok(study)
}

impl<'a> Bench<'a> {
    fn new(options: &'a Options) -> Result<Self> {
        let Options { features, intermediate, spread, seed, ref blocks, ref tokens, .. } = *options;
        let mut densities = options.densities.clone();
        let wrong = |what: &str| Err(Error::Option(what.to_owned()));
        if densities.iter().any(|density| !(*density > 0.0 && *density <= 1.0)) {
            return wrong("densities are above 0 and at most 1");
        }
        if [features, intermediate, options.rounds].contains(&0) || tokens.contains(&0) {
            return wrong("features, intermediate features, tokens and rounds must be positive");
        }
        if blocks.is_empty() || tokens.is_empty() || !spread.is_finite() {
            return wrong("block sizes, numbers of tokens and a finite spread are needed");
        }
        // Pauses and windows longer than an hour are certainly mistakes.
        if [options.window_ms, options.gap_ms].iter().any(|ms| !(0.0..3.6e6).contains(ms)) {
            return wrong("windows and pauses take milliseconds, from 0 to an hour");
        }
        densities.push(1.0);
        densities.sort_by(f64::total_cmp);
        densities.dedup();
        let stream = options.device.stream()?;
        let up = Weights::draw([intermediate, features], spread, seed, 0)?;
        let weights = [up, Weights::draw([features, intermediate], spread, seed, 1)?];
        let [up, down] = &weights;
        let of_block = |&block: &usize| -> Result<Vec<Mlp>> {
            let rankings: [Ranking; 2] = [up.rank(block)?, down.rank(block)?];
            let fresh = flush_bytes(&stream);
            let layer = |&density: &f64| Mlp::new([up, down], &rankings, density, fresh, &stream);
            densities.iter().map(layer).collect()
        };
        let layers = blocks.iter().map(of_block).collect::<Result<_>>()?;
        Ok(Self { options, weights, layers, stream })
    }

    /// Measures all layers for a number of tokens.
    fn measure(
        &self,
        tokens: usize,
        rivals: &mut Rivals,
        study: &mut Study,
        step: &impl Fn(&str),
    ) -> Result<()> {
        let sizes = [self.options.features, self.options.intermediate];
        let mut activations = Activations::new(sizes, tokens, self.options.seed, &self.stream)?;
        let input = activations.input(&self.stream)?;
        let host = |mlp: &Mlp| reference::mlp(self.weights.each_ref(), mlp.kept.each_ref(), &input);
        let dense = self.fastest_dense(&mut activations)?;
        let expected = host(dense);
        let samples = activations.sampled().len();
        for (block, mlp) in
            self.layers.iter().enumerate().flat_map(|(at, of)| of.iter().map(move |mlp| (at, mlp)))
        {
            let (block_size, density) = (mlp.block_size(), mlp.density());
            step(&format!("{tokens} tokens, blocks of {block_size}, density {density:.3}"));
            let found = activations.output(mlp, &self.stream)?;
            let rounding = reference::relative_error(&found, &host(mlp), samples);
            if rounding.is_nan() || rounding > LARGEST_ROUNDING {
                return Err(Error::Option(format!(
                    "wrong result of {tokens} tokens, blocks of {block_size}, density {density}: \
                     relative error {rounding:.1e}"
                )));
            }
            let mut others = rivals.named(false);
            let sparse = others.len();
            // Dense products do not depend on the blocks, so they are measured once.
            if block == 0 && density == 1.0 {
                others.extend(rivals.named(true));
            }
            let [us, dense_us] = self.turns([mlp, dense], &mut activations, &mut others, rivals)?;
            let mut others: Vec<_> = others.into_iter().map(Rival::finish).collect();
            study.dense.extend(others.drain(sparse..).map(|rival| Dense { tokens, rival }));
            study.points.push(Point {
                tokens,
                block_size,
                density,
                us,
                dense_us,
                speedup: dense_us / us,
                tflops: mlp.flops() * tokens as f64 / us * 1e-6,
                error: reference::relative_error(&found, &expected, samples),
                rounding,
                rivals: others,
            });
        }
        study.find_break_even(tokens);
        Ok(())
    }

    /// The layer with all blocks whose launches are fastest for this number of tokens.
    fn fastest_dense(&self, activations: &mut Activations) -> Result<&Mlp> {
        let mut fastest: Option<(f64, &Mlp)> = None;
        for mlp in self.layers.iter().filter_map(|of_block| of_block.last()) {
            let repeat =
                Repeat::new(&self.stream, Cache::Warm, |stream| activations.forward(mlp, stream))?;
            if fastest.is_none_or(|(us, _)| repeat.launch_us() < us) {
                fastest = Some((repeat.launch_us(), mlp));
            }
        }
        // There is at least one block size, and each has a layer with all blocks.
        fastest.map(|(_, mlp)| mlp).ok_or_else(|| Error::Option("no block sizes".to_owned()))
    }

    /// Times two layers in microseconds. They take turns with the rivals, which run first with one
    /// projection and then with the other.
    fn turns(
        &self,
        mlps: [&Mlp; 2],
        activations: &mut Activations,
        others: &mut [Rival],
        rivals: &mut Rivals,
    ) -> Result<[f64; 2]> {
        let Options { rounds, window_ms, gap_ms, .. } = *self.options;
        let pause = || std::thread::sleep(Duration::from_secs_f64(gap_ms * 1e-3));
        let mut repeat =
            |mlp| Repeat::new(&self.stream, Cache::Warm, |stream| activations.forward(mlp, stream));
        let mut repeats = [repeat(mlps[0])?, repeat(mlps[1])?];
        let mut times = [Vec::new(), Vec::new()];
        let projections = if others.is_empty() { 1 } else { self.weights.len() };
        for projection in 0..projections {
            if !others.is_empty() {
                let tokens = activations.tokens();
                rivals.prepare(
                    others,
                    &self.weights[projection],
                    &mlps[0].kept[projection],
                    tokens,
                )?;
            }
            // The first round is a warm-up.
            for round in 0..=rounds {
                for ((repeat, mlp), times) in repeats.iter_mut().zip(mlps).zip(&mut times) {
                    pause();
                    let window = repeat.window(&self.stream, window_ms, |stream| {
                        activations.forward(mlp, stream)
                    })?;
                    times.extend((round > 0).then_some(window.us));
                }
                for rival in others.iter_mut().filter(|rival| rival.error.is_none()) {
                    pause();
                    rivals.window(rival, window_ms, (round > 0).then_some(projection));
                }
            }
        }
        rivals.forget();
        // At least one round is counted, so there is a median.
        Ok(times.map(|mut times| median(&mut times).unwrap_or(f64::NAN)))
    }
}

impl Study {
    /// Finds the break-even of each block size with each dense product.
    fn find_break_even(&mut self, tokens: usize) {
        let mut against = vec![(ALL_BLOCKS, None)];
        let dense = self.dense.iter().filter(|dense| dense.tokens == tokens);
        against.extend(
            dense.filter_map(|dense| Some((dense.rival.name.as_str(), Some(dense.rival.us?)))),
        );
        let points = || self.points.iter().filter(|point| point.tokens == tokens);
        for of_block in points().collect::<Vec<_>>().chunk_by(|a, b| a.block_size == b.block_size) {
            for &(over, us) in &against {
                let time = |point: &&Point| point.us / us.unwrap_or(point.dense_us);
                let line: Vec<_> =
                    of_block.iter().map(|point| (point.density, time(point))).collect();
                self.break_even.push(BreakEven {
                    tokens,
                    block_size: of_block[0].block_size,
                    over: over.to_owned(),
                    density: report::break_even(&line).and_then(report::BreakEven::density),
                });
            }
        }
    }
}
