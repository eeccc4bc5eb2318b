//! The layer on the host for a few tokens, without any rounding between weights and output.

use super::weights::{Kept, Weights};
use rayon::prelude::*;

/// Tokens that are computed at a time.
pub const SAMPLES: usize = 8;

/// A feature of the sampled tokens.
pub type Sample = [f32; SAMPLES];

/// `y = down · silu(up · x)` over the blocks that stay. `x` and the result are `[features]`.
pub fn mlp([up, down]: [&Weights; 2], [of_up, of_down]: [&Kept; 2], x: &[Sample]) -> Vec<Sample> {
    let mut hidden = product(up, of_up, x);
    hidden.iter_mut().flatten().for_each(|x| *x /= 1.0 + (-*x).exp());
    product(down, of_down, &hidden)
}

/// `[rows]`, summed in f64.
fn product(weights: &Weights, kept: &Kept, x: &[Sample]) -> Vec<Sample> {
    let size = kept.block_size;
    let row = |row: usize| {
        let mut sums = [0f64; SAMPLES];
        let [start, end] = [row / size, row / size + 1].map(|at| kept.row_ptr[at] as usize);
        for &col in &kept.col_idx[start..end] {
            let first = col as usize * size;
            for (value, x) in weights.0.row(row).iter().skip(first).take(size).zip(&x[first..]) {
                let value = value.to_f64();
                sums.iter_mut().zip(x).for_each(|(sum, &x)| *sum += value * f64::from(x));
            }
        }
        sums.map(|sum| sum as f32)
    };
    (0..weights.0.nrows()).into_par_iter().map(row).collect()
}

/// ‖found − expected‖ / ‖expected‖ over the first `samples` tokens.
pub fn relative_error(found: &[Sample], expected: &[Sample], samples: usize) -> f64 {
    let (mut error, mut size) = (0.0, 0.0);
    for (found, expected) in found.iter().zip(expected) {
        for (&found, &expected) in found.iter().zip(expected).take(samples) {
            error += f64::from(found - expected).powi(2);
            size += f64::from(expected).powi(2);
        }
    }
    if error == 0.0 { 0.0 } else { (error / size).sqrt() }
}
