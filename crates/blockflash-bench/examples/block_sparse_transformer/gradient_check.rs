//! Checks the gradients before training.
//!
//! A tiny network runs in f32 on the CPU; its gradients are compared with differences of the loss
//! that an independent forward pass in f64 finds (`reference.rs`). Then the network that is trained
//! runs on short windows where it is trained, and on the CPU in f32; all gradients are compared.

use super::attention::Pattern;
use super::host::Place;
use super::model::{Sizes, Transformer};
use super::reference::{self, Parameters};
use super::text::Text;
use super::training::Options;
use blockflash_bench::{Result, random};
use blockflash_ops::{DType, Device};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeMap;

/// Parameters of each kind that are moved.
const MOVED: usize = 8;
/// How far: little, as a ReLU between the two points has a kink. f64 leaves the slope 9 digits.
const STEP: f64 = 1e-6;
/// Tolerance of a difference, relative to the gradient or, if that is larger, to the root mean
/// square of the gradients of its kind: f32 with a large margin.
const TOLERANCE: f64 = 1e-3;
/// Tolerance of gradients in half precision, relative to their norm.
const ROUNDING: f64 = 0.05;

/// What was found for the parameters of one name.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub name: String,
    /// Largest error against a difference of the f64 loss, dense and under the block mask.
    pub errors: [f64; 2],
    /// ‖gradient where training computes − gradient of the CPU‖ / ‖gradient of the CPU‖, likewise.
    pub on_device: [f64; 2],
}

/// Result of the check.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    pub rows: Vec<Row>,
}

impl Check {
    /// Whether all errors are within tolerance; false for NaN.
    pub fn passed(&self) -> bool {
        !self.rows.is_empty()
            && self.rows.iter().all(|row| {
                row.errors.iter().all(|&error| error <= TOLERANCE)
                    && row.on_device.iter().all(|&error| error <= ROUNDING)
            })
    }
}

/// Checks the network of the options, dense and under its block mask.
///
/// # Errors
/// Invalid options, or a device that fails or lacks such kernels.
pub fn run(options: &Options, text: &Text) -> Result<Check> {
    let [dense, sparse] = options.patterns();
    let on_device = [on_device(options, dense, text)?, on_device(options, sparse, text)?];
    let errors = [
        against_differences(options, Pattern::Dense, text)?,
        against_differences(options, Pattern::Blocks { block: 64, local: 0, stride: 2 }, text)?,
    ];
    let found = |of: &[BTreeMap<String, f64>; 2], name: &str| {
        of.each_ref().map(|of| of.get(name).copied().unwrap_or(f64::NAN))
    };
    let row = |name: &String| Row {
        name: name.clone(),
        errors: found(&errors, name),
        on_device: found(&on_device, name),
    };
    Ok(Check { rows: errors[0].keys().map(row).collect() })
}

/// Largest error of each kind of a tiny network with as many layers.
fn against_differences(
    options: &Options,
    pattern: Pattern,
    text: &Text,
) -> Result<BTreeMap<String, f64>> {
    let (seed, layers) = (options.seed, options.sizes.layers);
    let sizes =
        Sizes { layers, heads: 2, head_dim: 8, hidden: 32, block: 8, density: 0.5, pattern };
    let windows = [1, 200];
    let place = Place { stream: Device::cpu().stream()?, dtype: DType::F32 };
    let batch = text.draw(windows, seed, 0)?;
    let (parameters, gradients) = gradients(&sizes, windows, seed, &place, text)?;
    let mut errors = BTreeMap::new();
    let used = |name: &str, at: usize| match name {
        "byte" => batch.bytes.contains(&((at / sizes.features()) as u8)),
        "byte before" => batch.before.contains(&((at / sizes.features()) as u8)),
        _ => true,
    };
    for (name, gradient) in gradients {
        let square = gradient.iter().map(|x| x * x).sum::<f64>() / gradient.len() as f64;
        let mut places: Vec<usize> = (0..gradient.len()).filter(|&at| used(&name, at)).collect();
        random::shuffle(&mut places, seed);
        places.truncate(MOVED);
        let error = |&at: &usize| -> Result<f64> {
            let loss_at = |by: f64| {
                let mut moved = parameters.clone();
                moved.entry(name.clone()).and_modify(|values| values[at] += by);
                reference::loss(&sizes, windows, seed, &moved, &batch)
            };
            let difference = (loss_at(STEP)? - loss_at(-STEP)?) / (2.0 * STEP);
            let error = (difference - gradient[at]).abs();
            Ok(error / gradient[at].abs().max(square.sqrt()))
        };
        let found = places.par_iter().map(error).collect::<Result<Vec<f64>>>()?;
        // Unlike `f64::max`, this keeps a NaN.
        let worst = found.into_iter().max_by(f64::total_cmp).unwrap_or(f64::NAN);
        errors.insert(name, worst);
    }
    Ok(errors)
}

/// Distance of the gradients of each kind where training computes from those on the CPU in f32.
fn on_device(options: &Options, sizes: Sizes, text: &Text) -> Result<BTreeMap<String, f64>> {
    let windows = [options.windows[0].min(4), options.windows[1].min(1024)];
    let cpu = Place { stream: Device::cpu().stream()?, dtype: DType::F32 };
    let place = options.place()?;
    let (_, expected) = gradients(&sizes, windows, options.seed, &cpu, text)?;
    let (_, found) = gradients(&sizes, windows, options.seed, &place, text)?;
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let error = |(name, expected): (&String, &Vec<f64>)| {
        let mut differences = found[name].iter().zip(expected).map(|(x, y)| x - y);
        let error = norm(&mut differences) / norm(&mut expected.iter().copied());
        (name.clone(), error)
    };
    Ok(expected.iter().map(error).collect())
}

/// Parameters of a network at its start, and their gradients for its first batch.
fn gradients(
    sizes: &Sizes,
    windows: [usize; 2],
    seed: u64,
    place: &Place,
    text: &Text,
) -> Result<(Parameters, Parameters)> {
    let mut model = Transformer::new(sizes, windows, seed, place)?;
    let batch = text.draw(windows, seed, 0)?;
    let (_, d_logits) = model.forward(&batch)?;
    model.backward(&batch, &d_logits)?;
    let [mut parameters, mut gradients] = [Parameters::new(), Parameters::new()];
    let exact = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    model.update(&mut |name, values, gradient| {
        parameters.insert(name.to_owned(), exact(values));
        gradients.insert(name.to_owned(), exact(gradient));
    })?;
    Ok((parameters, gradients))
}
