//! The steps between the products, for which the library has no kernels: they run on the host, in
//! f32. Sums over rows are taken in a fixed order, whatever the number of threads.

use super::layer::rounded;
use super::text::BYTES;
use blockflash_bench::Result;
use blockflash_bench::io::Array;
use blockflash_ops::{DType, Stream, Tensor};
use rayon::prelude::*;

/// Rows that one task takes.
const ROWS: usize = 64;
/// Keeps the inverse root mean square of a row finite.
const EPSILON: f32 = 1e-5;

/// Where the products are computed, and in which element type.
#[derive(Clone)]
pub struct Place {
    pub stream: Stream,
    pub dtype: DType,
}

impl Place {
    /// Numbers for products, rounded to the type of the place.
    ///
    /// # Errors
    /// Too little memory, or a device that fails.
    pub fn upload(&self, values: &[f32], shape: &[usize]) -> Result<Tensor> {
        Ok(rounded(values, shape, self.dtype)?.upload(&self.stream)?)
    }

    /// Waits for a tensor.
    ///
    /// # Errors
    /// A device that fails.
    pub fn download(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        let array = Array::download(tensor, &self.stream)?;
        Ok(array.to_f32(0..array.len()))
    }

    /// A tensor that is written before it is read.
    ///
    /// # Errors
    /// Too little memory.
    pub fn empty(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        Ok(Tensor::empty(&self.stream, dtype, shape)?)
    }
}

/// Parameters that only the host needs.
pub struct Vector {
    pub values: Vec<f32>,
    /// Of the loss of a token, on average.
    pub gradient: Vec<f32>,
}

impl Vector {
    /// These parameters.
    pub fn new(values: Vec<f32>) -> Self {
        Self { gradient: vec![0.0; values.len()], values }
    }
}

/// A norm: each row is divided by its root mean square and multiplied by a gain per feature.
pub struct Norm {
    pub gain: Vector,
    /// The last input, for the backward pass.
    x: Vec<f32>,
}

impl Norm {
    /// With a gain of 1.
    pub fn new(features: usize) -> Self {
        Self { gain: Vector::new(vec![1.0; features]), x: Vec::new() }
    }

    /// `[rows, features]`, normalised.
    pub fn forward(&mut self, x: &[f32]) -> Vec<f32> {
        self.x = x.to_vec();
        let gain = &self.gain.values;
        let mut y = self.x.clone();
        y.par_chunks_mut(gain.len()).for_each(|row| {
            let scale = inverse_rms(row);
            row.iter_mut().zip(gain).for_each(|(y, gain)| *y *= scale * gain);
        });
        y
    }

    /// The gradient of the input, given that of the output; that of the gain is kept.
    pub fn backward(&mut self, dy: &[f32]) -> Vec<f32> {
        let Self { gain: Vector { values: gain, gradient }, x } = self;
        let features = gain.len();
        let mut dx = dy.to_vec();
        let pieces = dx.par_chunks_mut(ROWS * features).zip(x.par_chunks(ROWS * features));
        let sums = pieces.map(|(dx, x)| {
            let mut sums = vec![0f32; features];
            for (row, x) in dx.chunks_mut(features).zip(x.chunks(features)) {
                let scale = inverse_rms(x);
                let mut along = 0.0;
                for (((d, &x), sum), gain) in row.iter_mut().zip(x).zip(&mut sums).zip(&*gain) {
                    *sum += *d * x * scale;
                    *d *= gain * scale;
                    along += *d * x;
                }
                along *= scale * scale / features as f32;
                row.iter_mut().zip(x).for_each(|(d, &x)| *d -= along * x);
            }
            sums
        });
        let sums: Vec<_> = sums.collect();
        let rows = (x.len() / features) as f32;
        gradient.fill(0.0);
        sums.iter().for_each(|sums| add(gradient, sums));
        gradient.iter_mut().for_each(|gradient| *gradient /= rows);
        dx
    }
}

fn inverse_rms(row: &[f32]) -> f32 {
    let squares: f32 = row.iter().map(|x| x * x).sum();
    (squares / row.len() as f32 + EPSILON).sqrt().recip()
}

/// The loss over all rows of logits in nats, and its gradient, which takes the place of the logits.
pub fn cross_entropy(logits: &mut [f32], targets: &[u8]) -> f64 {
    let rows = logits.par_chunks_mut(BYTES).zip(targets.par_iter());
    let losses = rows.map(|(row, &target)| {
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let own = f64::from(row[target as usize] - most);
        row.iter_mut().for_each(|logit| *logit = (*logit - most).exp());
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|part| *part /= sum);
        row[target as usize] -= 1.0;
        f64::from(sum).ln() - own
    });
    losses.collect::<Vec<_>>().iter().sum()
}

/// `x += y`
pub fn add(x: &mut [f32], y: &[f32]) {
    x.par_iter_mut().zip(y).with_min_len(1 << 14).for_each(|(x, y)| *x += y);
}

/// The gradient of `relu(x)` with respect to x, given its output.
pub fn relu_backward(gradient: &mut [f32], output: &[f32]) {
    let pairs = gradient.par_iter_mut().zip(output).with_min_len(1 << 14);
    pairs.filter(|&(_, &output)| output <= 0.0).for_each(|(gradient, _)| *gradient = 0.0);
}
