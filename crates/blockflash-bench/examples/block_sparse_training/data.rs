//! Samples of a teacher: random inputs, and what a network of the same shape with other weights
//! makes of them.

use super::layer::rounded;
use super::network::Network;
use blockflash_bench::{Result, random};
use blockflash_ops::{DType, Stream, Tensor};

/// Some samples.
pub struct Batch {
    /// `[samples, inputs]` on the device, ~ N(0, 1).
    pub x: Tensor,
    /// `[samples, outputs]`
    targets: Vec<f32>,
}

impl Batch {
    /// Draws inputs and asks the teacher.
    ///
    /// # Errors
    /// Too little memory, a device that has no such kernels or fails.
    pub fn draw(
        [samples, inputs]: [usize; 2],
        teacher: &mut Network,
        seed: u64,
        dtype: DType,
        stream: &Stream,
    ) -> Result<Self> {
        let x = random::normals(samples * inputs, seed);
        let x = rounded(&x, &[samples, inputs], dtype)?.upload(stream)?;
        Ok(Self { targets: teacher.forward(&x)?, x })
    }

    /// y − targets.
    pub fn errors(&self, y: &[f32]) -> Vec<f32> {
        y.iter().zip(&self.targets).map(|(y, target)| y - target).collect()
    }

    /// Half the squared error of a sample, on average.
    pub fn loss(&self, errors: &[f32]) -> f64 {
        0.5 * squares(errors) / self.x.shape()[0] as f64
    }

    /// The loss of a network that answers 0 to everything.
    pub fn loss_of_nothing(&self) -> f64 {
        self.loss(&self.targets)
    }
}

/// Their sum.
pub fn squares(values: &[f32]) -> f64 {
    values.iter().map(|&value| f64::from(value).powi(2)).sum()
}
