//! Checks the gradients: some weights are moved a little in both directions, and the change of the
//! loss is compared with the gradient.
//!
//! The check runs in f32 on the CPU, where rounding does not swamp the differences. If training
//! runs elsewhere or in another type, all its gradients for the same samples are compared with the
//! gradients of the CPU.

use super::data::{Batch, squares};
use super::network::Network;
use super::training::Options;
use blockflash_bench::{Result, random};
use blockflash_ops::{DType, Device, Stream};
use serde::Serialize;

/// Number of samples.
const SAMPLES: usize = 32;
/// Number of weights per layer that are compared.
const WEIGHTS: usize = 8;
/// Step size relative to the standard deviation of the layer's weights.
const STEP: f32 = 0.02;
/// Tolerance of a difference, relative to the gradient or, if that is larger, to the root mean
/// square of the layer's gradients.
const TOLERANCE: f64 = 0.01;
/// Tolerance of gradients in half precision, relative to their norm.
const ROUNDING: f64 = 0.05;

/// The comparison for one weight.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Difference {
    /// Layer, 1 or 2.
    pub layer: usize,
    /// Position among the layer's values.
    pub at: usize,
    pub gradient: f64,
    /// (loss on the one side − loss on the other) / distance.
    pub difference: f64,
    /// |difference − gradient|, relative to the larger of gradient and root mean square.
    pub error: f64,
}

/// Result of the check.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    pub differences: Vec<Difference>,
    /// For each layer, ‖gradient of the device − gradient of the CPU‖ / ‖gradient of the CPU‖.
    pub on_device: [f64; 2],
}

impl Check {
    /// Whether enough weights could be compared and all errors are within tolerance; false for NaN.
    pub fn passed(&self) -> bool {
        let right = |difference: &Difference| difference.error <= TOLERANCE;
        self.differences.len() == 2 * WEIGHTS
            && self.differences.iter().all(right)
            && self.on_device.iter().all(|&error| error <= ROUNDING)
    }
}

/// Checks the network with which training starts.
///
/// # Errors
/// Invalid options, or a device that fails or lacks such kernels.
pub fn run(options: &Options, stream: &Stream) -> Result<Check> {
    let cpu = Device::cpu().stream()?;
    let (mut network, batch) = start(options, DType::F32, &cpu)?;
    network.find_gradients(&batch)?;
    let gradients = gradients_of(&mut network, &cpu)?;
    let mut differences = Vec::new();
    for (layer, (gradients, sparsity)) in gradients.iter().zip(&options.sparsities()?).enumerate() {
        let inside = (0..gradients.len()).filter(|&at| sparsity.is_inside(at)).collect::<Vec<_>>();
        differences.extend(compare(&mut network, &batch, layer, gradients, &inside, options.seed)?);
    }
    let (mut network, batch) = start(options, options.dtype, stream)?;
    network.find_gradients(&batch)?;
    let found = gradients_of(&mut network, stream)?;
    let on_device = [0, 1].map(|layer| relative_error(&found[layer], &gradients[layer]));
    Ok(Check { differences, on_device })
}

/// Compares some weights of a layer, drawn from these positions.
fn compare(
    network: &mut Network,
    batch: &Batch,
    layer: usize,
    gradients: &[f32],
    inside: &[usize],
    seed: u64,
) -> Result<Vec<Difference>> {
    let cpu = Device::cpu().stream()?;
    let root_mean_square = |values: &[f32]| (squares(values) / values.len().max(1) as f64).sqrt();
    let weights =
        inside.iter().map(|&at| network.layers()[layer].weights()[at]).collect::<Vec<_>>();
    let (step, usual) = (STEP * root_mean_square(&weights) as f32, root_mean_square(gradients));
    let mut candidates = random::choose(4 * WEIGHTS, inside.len(), seed, layer as u64);
    random::shuffle(&mut candidates, seed);
    let mut differences = Vec::new();
    for candidate in candidates {
        let (at, weight) = (inside[candidate], weights[candidate]);
        let mut moved = |weight| -> Result<(f64, Vec<bool>)> {
            network.layers()[layer].update(&cpu, |weights, _| weights[at] = weight)?;
            Ok((network.loss(batch)?, network.active()?))
        };
        let (below, above) = (weight - step, weight + step);
        let [low, high, _] = [moved(below)?, moved(above)?, moved(weight)?];
        // A pre-activation that changes its sign puts a kink of the loss between the two points, so
        // the difference is no slope.
        if low.1 != high.1 {
            continue;
        }
        // The actual distance: f32 rounds the sums.
        let difference = (high.0 - low.0) / (f64::from(above) - f64::from(below));
        let gradient = f64::from(gradients[at]);
        let error = (difference - gradient).abs() / gradient.abs().max(usual);
        differences.push(Difference { layer: layer + 1, at, gradient, difference, error });
        if differences.len() == WEIGHTS {
            break;
        }
    }
    Ok(differences)
}

/// Student and samples.
fn start(options: &Options, dtype: DType, stream: &Stream) -> Result<(Network, Batch)> {
    let sparsities = options.sparsities()?;
    let mut teacher = Network::new(&sparsities, SAMPLES, options.teacher_seed(), dtype, stream)?;
    let student = Network::new(&sparsities, SAMPLES, options.student_seed(), dtype, stream)?;
    let batch = Batch::draw([SAMPLES, options.inputs], &mut teacher, options.seed, dtype, stream)?;
    Ok((student, batch))
}

fn gradients_of(network: &mut Network, stream: &Stream) -> Result<[Vec<f32>; 2]> {
    let [first, second] = network.layers();
    Ok([first.gradient(stream)?, second.gradient(stream)?])
}

fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    let differences: Vec<_> =
        found.iter().zip(expected).map(|(found, expected)| found - expected).collect();
    (squares(&differences) / squares(expected)).sqrt()
}
