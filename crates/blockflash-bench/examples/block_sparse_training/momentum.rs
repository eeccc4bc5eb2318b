//! Gradient descent with momentum.

use super::layer::Layer;
use super::sparsity::Sparsity;
use blockflash_bench::Result;
use blockflash_ops::Stream;

/// The state of the optimizer for the weights of one layer.
pub struct Momentum {
    velocity: Vec<f32>,
    fan_in: usize,
}

impl Momentum {
    /// The start for a layer with these blocks.
    pub fn new(sparsity: &Sparsity) -> Self {
        let values = sparsity.blocks.len() * sparsity.block_size * sparsity.block_size;
        Self { velocity: vec![0.0; values], fan_in: sparsity.fan_in() }
    }

    /// One step. The rate applies to an output with one input; it is divided for outputs with more
    /// inputs, which react to the sum of their steps.
    ///
    /// # Errors
    /// A device that fails.
    pub fn descend(
        &mut self,
        layer: &mut Layer,
        rate: f32,
        momentum: f32,
        stream: &Stream,
    ) -> Result<()> {
        let rate = rate / self.fan_in as f32;
        layer.update(stream, |weights, gradient| {
            for ((weight, velocity), gradient) in
                weights.iter_mut().zip(&mut self.velocity).zip(gradient)
            {
                *velocity = momentum * *velocity + gradient;
                *weight -= rate * *velocity;
            }
        })
    }
}
