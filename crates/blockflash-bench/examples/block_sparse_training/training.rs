//! Training: the student network learns from the teacher.

use super::data::Batch;
use super::network::{Network, Product};
use super::results::device_name;
use super::sparsity::Sparsity;
use blockflash_bench::{Error, Result};
use blockflash_ops::{DType, Device, Stream};
use serde::Serialize;
use std::time::Instant;

/// Sizes, data and settings of a training run.
#[derive(Clone, Debug)]
pub struct Options {
    pub inputs: usize,
    pub hidden: usize,
    pub outputs: usize,
    pub block: usize,
    /// Fraction of the blocks that is stored.
    pub density: f64,
    /// Samples per step.
    pub batch: usize,
    /// Number of batches to learn from, used in turns.
    pub batches: usize,
    pub steps: usize,
    pub rate: f32,
    pub momentum: f32,
    /// Fraction of the first loss that may remain.
    pub goal: f64,
    pub seed: u64,
    pub dtype: DType,
    pub device: Device,
}

/// A point of the training curve.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Point {
    /// Number of steps before this point.
    pub step: usize,
    /// Loss relative to the loss of answering 0, averaged over the steps since the previous point;
    /// at the start, the loss of the first batch.
    pub training: f64,
    /// The same for held-out samples.
    pub held_out: f64,
    /// Milliseconds per step since the previous point.
    pub ms: Option<f64>,
}

/// Result of a training run.
#[derive(Debug, Serialize)]
pub struct Study {
    pub device: String,
    pub dtype: &'static str,
    pub sizes: [usize; 3],
    pub block: usize,
    /// Fraction of the blocks that is stored, over both layers.
    pub density: f64,
    pub batch: usize,
    pub batches: usize,
    pub rate: f32,
    pub momentum: f32,
    pub seed: u64,
    pub products: Vec<Product>,
    pub points: Vec<Point>,
    /// Fraction of the first held-out loss that remains.
    pub left: f64,
    /// Fraction of the first loss that may remain.
    pub goal: f64,
}

impl Study {
    /// Whether the loss has fallen as far as required; false for NaN.
    pub fn learned(&self) -> bool {
        self.left <= self.goal
    }
}

/// Number of points of the curve after the first.
const POINTS: usize = 20;
/// Number of held-out batches.
const HELD_OUT: usize = 2;

impl Options {
    /// Stored blocks of both layers, equal for student and teacher.
    ///
    /// # Errors
    /// Invalid sizes or an invalid density.
    pub fn sparsities(&self) -> Result<[Sparsity; 2]> {
        let draw = |sizes, lane| Sparsity::draw(sizes, self.block, self.density, self.seed ^ lane);
        Ok([
            draw([self.hidden, self.inputs], 1 << 32)?,
            draw([self.outputs, self.hidden], 2 << 32)?,
        ])
    }

    /// Seed of the teacher's weights.
    pub fn teacher_seed(&self) -> u64 {
        self.seed ^ 3 << 32
    }

    /// Seed of the student's initial weights.
    pub fn student_seed(&self) -> u64 {
        self.seed ^ 4 << 32
    }

    /// Checks the options.
    ///
    /// # Errors
    /// The first invalid option.
    pub fn check(&self) -> Result<()> {
        let refuse = |what: &str| Err(Error::Option(what.to_owned()));
        if self.batch == 0 || self.batches == 0 || self.steps == 0 {
            return refuse("samples, batches and steps must be positive");
        }
        if !(self.rate > 0.0 && self.rate.is_finite() && (0.0..1.0).contains(&self.momentum)) {
            return refuse("the rate must be positive, the momentum at least 0 and below 1");
        }
        if !(self.goal > 0.0 && self.goal < 1.0) {
            return refuse("the goal is what may be left of the first loss, above 0 and below 1");
        }
        self.sparsities().map(|_| ())
    }
}

/// Trains the student; `step` is called with progress messages.
///
/// # Errors
/// Invalid options, or a device that fails or lacks such kernels. A loss that does not fall is no
/// error here: see [`Study::learned`].
pub fn run(options: &Options, stream: &Stream, step: impl Fn(&str)) -> Result<Study> {
    options.check()?;
    let &Options {
        inputs,
        hidden,
        outputs,
        block,
        batch,
        batches,
        rate,
        momentum,
        goal,
        seed,
        dtype,
        ..
    } = options;
    let sparsities = options.sparsities()?;
    step("drawing weights and samples");
    let mut teacher = Network::new(&sparsities, batch, options.teacher_seed(), dtype, stream)?;
    let mut student = Network::new(&sparsities, batch, options.student_seed(), dtype, stream)?;
    // The gradient check has drawn its samples with the seed itself.
    let mut draw = |at: usize| {
        Batch::draw([batch, inputs], &mut teacher, seed ^ (5 << 32 | at as u64), dtype, stream)
    };
    let samples = (0..batches).map(&mut draw).collect::<Result<Vec<_>>>()?;
    let held_out = (batches..batches + HELD_OUT).map(&mut draw).collect::<Result<Vec<_>>>()?;
    let products = student.products(&samples[0].x)?;

    let first = student.loss(&samples[0])? / samples[0].loss_of_nothing();
    let start = Point {
        step: 0,
        training: first,
        held_out: relative_loss(&mut student, &held_out)?,
        ms: None,
    };
    let mut points = vec![start];
    let (mut since, mut seen) = (Instant::now(), Vec::new());
    for at in 1..=options.steps {
        let batch = &samples[(at - 1) % batches];
        seen.push(student.find_gradients(batch)? / batch.loss_of_nothing());
        student.descend(rate, momentum)?;
        if at * POINTS / options.steps > (at - 1) * POINTS / options.steps {
            let ms = since.elapsed().as_secs_f64() * 1e3 / seen.len() as f64;
            let training = seen.iter().sum::<f64>() / seen.len() as f64;
            let held_out = relative_loss(&mut student, &held_out)?;
            step(&format!("step {at}: loss {training:.4}, held out {held_out:.4}"));
            points.push(Point { step: at, training, held_out, ms: Some(ms) });
            (since, seen) = (Instant::now(), Vec::new());
        }
    }
    let left = points.last().map_or(f64::NAN, |last| last.held_out / start.held_out);
    let all: usize = sparsities
        .iter()
        .map(|layer| layer.outputs.div_ceil(block) * layer.inputs.div_ceil(block))
        .sum();
    let stored: usize = sparsities.iter().map(|layer| layer.blocks.len()).sum();
    Ok(Study {
        device: device_name(&options.device),
        dtype: dtype.name(),
        sizes: [inputs, hidden, outputs],
        block,
        density: stored as f64 / all as f64,
        batch,
        batches,
        rate,
        momentum,
        seed,
        products,
        points,
        left,
        goal,
    })
}

/// Loss relative to the loss of answering 0.
fn relative_loss(network: &mut Network, batches: &[Batch]) -> Result<f64> {
    let mut losses = 0.0;
    for batch in batches {
        losses += network.loss(batch)? / batch.loss_of_nothing();
    }
    Ok(losses / batches.len() as f64)
}
