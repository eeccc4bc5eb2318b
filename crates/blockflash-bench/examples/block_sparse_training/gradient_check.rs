//! Are the gradients right? Some weights are moved a little to both sides, and the change of the
//! loss is held against the gradient.
//!
//! In f32 on the CPU, where differences are not lost in rounding. If training computes elsewhere or
//! in another type, the gradients of the same samples there are held against those of the CPU, all
//! of them.

use super::data::{Batch, squares};
use super::network::Network;
use super::training::Options;
use blockflash_bench::{Result, random};
use blockflash_ops::{DType, Device, Stream};
use serde::Serialize;

/// Samples of the check.
const SAMPLES: usize = 32;
/// Weights of a layer that are compared.
const WEIGHTS: usize = 8;
/// How far, by the deviation of the layer's weights.
const STEP: f32 = 0.02;
/// What a difference may be off, by the gradient or, if that is larger, by the root mean square of
/// the layer's gradients.
const TOLERANCE: f64 = 0.01;
/// What gradients of half precision may be off, by their norm.
const ROUNDING: f64 = 0.05;

/// One weight.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Difference {
    /// 1 or 2.
    pub layer: usize,
    /// Position among the layer's values.
    pub at: usize,
    pub gradient: f64,
    /// (loss on the one side − loss on the other) / distance.
    pub difference: f64,
    /// |difference − gradient|, by the larger of gradient and root mean square.
    pub error: f64,
}

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    pub differences: Vec<Difference>,
    /// Of each layer ‖gradient where training computes − gradient here‖ / ‖gradient here‖.
    pub on_device: [f64; 2],
}

impl Check {
    /// Whether enough could be compared and all is as it has to be. NaN is not.
    pub fn passed(&self) -> bool {
        let right = |difference: &Difference| difference.error <= TOLERANCE;
        self.differences.len() == 2 * WEIGHTS
            && self.differences.iter().all(right)
            && self.on_device.iter().all(|&error| error <= ROUNDING)
    }
}

/// Checks the network that training starts with.
///
/// # Errors
/// Options that make no sense, a device that has no such kernels or fails.
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

/// Some weights of a layer, drawn from these positions.
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
    let weights = inside.iter().map(|&at| network.layers()[layer].weight(at)).collect::<Vec<_>>();
    let (step, usual) = (STEP * root_mean_square(&weights) as f32, root_mean_square(gradients));
    let mut candidates = random::choose(4 * WEIGHTS, inside.len(), seed, layer as u64);
    random::shuffle(&mut candidates, seed);
    let mut differences = Vec::new();
    for candidate in candidates {
        let (at, weight) = (inside[candidate], weights[candidate]);
        let mut moved = |weight| -> Result<(f64, Vec<bool>)> {
            network.layers()[layer].set_weight(at, weight, &cpu)?;
            Ok((network.loss(batch)?, network.active()?))
        };
        let (below, above) = (weight - step, weight + step);
        let [low, high, _] = [moved(below)?, moved(above)?, moved(weight)?];
        // A sum before ReLU that changes its sign is a kink of the loss, across which a difference
        // is no slope.
        if low.1 != high.1 {
            continue;
        }
        // What was really moved: f32 rounds the sums.
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
