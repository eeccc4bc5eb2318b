//! Training: the same network with dense and with block-sparse attention, on the same windows of
//! the text.

use super::adam::Adam;
use super::attention::Pattern;
use super::host::Place;
use super::model::{Sizes, Transformer};
use super::results::device_name;
use super::text::Text;
use blockflash_bench::{Error, Result};
use blockflash_ops::{DType, Device};
use serde::Serialize;
use std::f64::consts::LN_2;
use std::time::{Duration, Instant};

/// What is trained, how and where.
#[derive(Clone, Debug)]
pub struct Options {
    /// The network with its block mask.
    pub sizes: Sizes,
    /// Windows of a step, and tokens of a window.
    pub windows: [usize; 2],
    pub steps: usize,
    /// Size of the largest step.
    pub rate: f32,
    /// Part of the entropy of a byte that the loss may be on held-out text.
    pub goal: f64,
    pub seed: u64,
    pub dtype: DType,
    pub device: Device,
}

/// A point of a training curve, in bits per byte.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Number of steps before this point.
    pub step: usize,
    /// Loss on average over the steps since the previous point; at the start, of the first batch.
    pub training: f64,
    pub held_out: f64,
}

/// Result of one training.
#[derive(Clone, Debug, Serialize)]
pub struct Curve {
    pub points: Vec<Point>,
    /// Milliseconds of a step, on average.
    pub ms: f64,
    /// Number of parameters.
    pub parameters: usize,
}

impl Curve {
    /// The last loss on held-out text.
    pub fn held_out(&self) -> f64 {
        self.points.last().map_or(f64::NAN, |last| last.held_out)
    }
}

/// Result of both trainings.
#[derive(Clone, Debug, Serialize)]
pub struct Study {
    pub dense: Curve,
    pub sparse: Curve,
    /// Entropy of a byte, and of a byte after a known one, in bits.
    pub entropies: [f64; 2],
    /// Most that the loss on held-out text may be at the end, in bits per byte.
    pub goal: f64,
}

impl Study {
    /// Whether both networks have learned as much as required; false for NaN.
    pub fn learned(&self) -> bool {
        [&self.dense, &self.sparse].iter().all(|curve| curve.held_out() <= self.goal)
    }
}

/// Number of points of a curve after the first.
const POINTS: usize = 20;
/// Part of the steps in which the rate rises; from then on it falls to 0.
const WARM_UP: f32 = 0.1;

impl Options {
    /// Long windows, in less than a minute on a GPU.
    pub fn usual(dtype: DType, device: Device) -> Self {
        let sizes = Sizes {
            layers: 2,
            heads: 4,
            head_dim: 64,
            hidden: 512,
            block: 64,
            density: 0.5,
            pattern: Pattern::Blocks { block: 64, local: 3, stride: 8 },
        };
        let (windows, steps) = ([1, 4096], 250);
        Self { sizes, windows, steps, rate: 3e-3, goal: 0.7, seed: 0, dtype, device }
    }

    /// Short windows and a small network, in seconds on a CPU. A GPU takes them as well.
    pub fn quick(dtype: DType, device: Device) -> Self {
        let pattern = Pattern::Blocks { block: 64, local: 1, stride: 3 };
        let usual = Self::usual(dtype, device);
        let sizes = Sizes { heads: 2, head_dim: 32, hidden: 128, pattern, ..usual.sizes };
        Self { sizes, windows: [2, 512], steps: 120, rate: 1e-2, goal: 0.8, ..usual }
    }

    /// Device, network and settings in one line.
    pub fn title(&self) -> String {
        let Self { sizes, windows: [batch, seqlen], rate, dtype, device, .. } = self;
        let Sizes { layers, heads, head_dim, hidden, density, .. } = sizes;
        let attended = match sizes.pattern {
            Pattern::Dense => "all blocks".to_owned(),
            Pattern::Blocks { block, local, stride } => {
                format!("blocks of {block}, {local} local, stride {stride}")
            }
        };
        format!(
            "{} · {layers} layers, {heads} heads of {head_dim}, MLP {hidden} ({:.0} % stored), \
             {dtype} · {attended} · {batch} × {seqlen} bytes, rate {rate}",
            device_name(device),
            density * 100.0
        )
    }

    /// The network with dense attention, and with its block mask.
    pub fn patterns(&self) -> [Sizes; 2] {
        [Sizes { pattern: Pattern::Dense, ..self.sizes }, self.sizes]
    }

    /// Where products are computed.
    ///
    /// # Errors
    /// A device that fails.
    pub fn place(&self) -> Result<Place> {
        Ok(Place { stream: self.device.stream()?, dtype: self.dtype })
    }

    /// Checks what no network checks.
    ///
    /// # Errors
    /// The first invalid option.
    pub fn check(&self) -> Result<()> {
        let refuse = |what: &str| Err(Error::Option(what.to_owned()));
        let Sizes { layers, heads, head_dim, .. } = self.sizes;
        if [layers, heads, head_dim, self.windows[0], self.windows[1], self.steps].contains(&0) {
            return refuse("layers, heads, features, windows and steps must be positive");
        }
        if layers > 64 || self.windows[0].saturating_mul(self.windows[1]) > 1 << 24 {
            return refuse("at most 64 layers, and 2^24 bytes in the windows of a step");
        }
        if !(self.rate > 0.0 && self.rate.is_finite()) {
            return refuse("the rate must be positive");
        }
        if !(self.goal > 0.0 && self.goal < 1.0) {
            return refuse("the goal is a part of the entropy of a byte, above 0 and below 1");
        }
        Ok(())
    }

    fn rate_of(&self, step: usize) -> f32 {
        let (steps, warm_up) = (self.steps as f32, (self.steps as f32 * WARM_UP).max(1.0));
        let step = step as f32;
        self.rate * (step / warm_up).min((steps - step) / (steps - warm_up).max(1.0)).clamp(0., 1.)
    }
}

/// Trains both networks; `say` is called with progress messages.
///
/// # Errors
/// Invalid options, or a device that fails or lacks such kernels. A loss that does not fall is no
/// error here: see [`Study::learned`].
pub fn run(options: &Options, text: &Text, say: impl Fn(&str)) -> Result<Study> {
    options.check()?;
    let [dense, sparse] = options.patterns();
    Ok(Study {
        dense: train(options, &dense, text, |line| say(&format!("dense, {line}")))?,
        sparse: train(options, &sparse, text, |line| say(&format!("block-sparse, {line}")))?,
        entropies: [text.entropy(), text.entropy_after_a_byte()],
        goal: options.goal * text.entropy(),
    })
}

fn train(options: &Options, sizes: &Sizes, text: &Text, say: impl Fn(&str)) -> Result<Curve> {
    let &Options { windows, steps, seed, .. } = options;
    let held_out = text.held_out(windows)?;
    let mut model = Transformer::new(sizes, windows, seed, &options.place()?)?;
    let mut parameters = 0;
    model.update(&mut |_, values, _| parameters += values.len())?;
    let loss_of =
        |model: &mut Transformer| -> Result<f64> { Ok(model.forward(&held_out)?.0 / LN_2) };
    let first = model.forward(&text.draw(windows, seed, 1)?)?.0 / LN_2;
    let mut points = vec![Point { step: 0, training: first, held_out: loss_of(&mut model)? }];
    let (mut adam, mut losses, mut time) = (Adam::default(), Vec::new(), Duration::ZERO);
    for step in 1..=steps {
        let start = Instant::now();
        let batch = text.draw(windows, seed, step as u64)?;
        let (loss, d_logits) = model.forward(&batch)?;
        losses.push(loss / LN_2);
        model.backward(&batch, &d_logits)?;
        let rate = options.rate_of(step);
        model.update(&mut |name, values, gradient| {
            adam.descend((step, rate), name, values, gradient);
        })?;
        time += start.elapsed();
        if step * POINTS / steps > (step - 1) * POINTS / steps {
            let training = losses.iter().sum::<f64>() / losses.len() as f64;
            losses.clear();
            let held_out = loss_of(&mut model)?;
            say(&format!("step {step}: {training:.3} bits per byte, held out {held_out:.3}"));
            points.push(Point { step, training, held_out });
        }
    }
    Ok(Curve { points, ms: time.as_secs_f64() * 1e3 / steps as f64, parameters })
}
