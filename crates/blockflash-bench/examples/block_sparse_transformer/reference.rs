//! The forward pass in f64, token by token and without the library: what gradients are compared
//! with.

use super::attention::Pattern;
use super::model::Sizes;
use super::sparsity::Sparsity;
use super::text::{BYTES, Batch};
use blockflash_bench::Result;
use ndarray::Array2;
use std::collections::BTreeMap;

/// Parameters by name, in the order of the network.
pub type Parameters = BTreeMap<String, Vec<f64>>;

type Rows = Vec<Vec<f64>>;

/// The loss of a byte of the batch in nats.
///
/// # Errors
/// Sizes that no network has.
pub fn loss(
    sizes: &Sizes,
    [batch, seqlen]: [usize; 2],
    seed: u64,
    parameters: &Parameters,
    data: &Batch,
) -> Result<f64> {
    let features = sizes.features();
    let dense =
        |[outputs, inputs]: [usize; 2]| Sparsity::draw([outputs, inputs], sizes.block, 1.0, 0);
    let (square, logits) = (dense([features; 2])?, dense([BYTES, features])?);
    let row = |name: &str, byte: u8| &parameters[name][byte as usize * features..][..features];
    let mut x: Rows = (data.bytes.iter().zip(&data.before))
        .map(|(&byte, &before)| sum(row("byte", byte), row("byte before", before)))
        .collect();
    for layer in 0..sizes.layers {
        let of = |name: &str| &parameters[&format!("{layer} {name}")][..];
        let input = norm(&x, of("norm of attention"));
        let [q, k, v] =
            ["queries", "keys", "values"].map(|name| product(&square, of(name), &input));
        let mut heads = vec![vec![0.0; features]; x.len()];
        for (window, head) in (0..batch).flat_map(|w| (0..sizes.heads).map(move |h| (w, h))) {
            let part = head * sizes.head_dim..(head + 1) * sizes.head_dim;
            let first = window * seqlen;
            for i in 0..seqlen {
                let seen: Vec<usize> = (0..=i).filter(|&j| sees(sizes.pattern, i, j)).collect();
                let score = |&j: &usize| {
                    let pairs = q[first + i][part.clone()].iter().zip(&k[first + j][part.clone()]);
                    pairs.map(|(q, k)| q * k).sum::<f64>() / (sizes.head_dim as f64).sqrt()
                };
                let weights: Vec<f64> = seen.iter().map(score).map(f64::exp).collect();
                let all: f64 = weights.iter().sum();
                for (j, weight) in seen.iter().zip(weights) {
                    let to = heads[first + i][part.clone()].iter_mut();
                    to.zip(&v[first + j][part.clone()]).for_each(|(o, v)| *o += weight / all * v);
                }
            }
        }
        add(&mut x, &product(&square, of("heads"), &heads));
        let [up, down] = sizes.mlp(Sizes::seed_of(seed, layer))?;
        let mut hidden = product(&up, of("up"), &norm(&x, of("norm of mlp")));
        hidden.iter_mut().flatten().for_each(|x| *x = x.max(0.0));
        add(&mut x, &product(&down, of("down"), &hidden));
    }
    let logits = product(&logits, &parameters["logits"], &norm(&x, &parameters["last norm"]));
    let of_token = |(logits, &target): (&Vec<f64>, &u8)| {
        logits.iter().map(|logit| logit.exp()).sum::<f64>().ln() - logits[target as usize]
    };
    Ok(logits.iter().zip(&data.targets).map(of_token).sum::<f64>() / data.targets.len() as f64)
}

/// Whether token i attends token j, which is not later.
fn sees(pattern: Pattern, i: usize, j: usize) -> bool {
    match pattern {
        Pattern::Dense => true,
        Pattern::Blocks { block, local, stride } => {
            let distance = i / block - j / block;
            distance <= local || distance.is_multiple_of(stride)
        }
    }
}

/// `x·Wᵀ` with W in blocks.
fn product(sparsity: &Sparsity, values: &[f64], x: &Rows) -> Rows {
    let size = sparsity.block_size;
    let mut weights = Array2::zeros((sparsity.outputs, sparsity.inputs));
    for (at, &value) in values.iter().enumerate().filter(|&(at, _)| sparsity.is_inside(at)) {
        let (row, col) = sparsity.blocks[at / (size * size)];
        weights[[row * size + at / size % size, col * size + at % size]] = value;
    }
    let x = Array2::from_shape_fn((x.len(), sparsity.inputs), |(row, col)| x[row][col]);
    x.dot(&weights.t()).rows().into_iter().map(|row| row.to_vec()).collect()
}

fn norm(x: &Rows, gain: &[f64]) -> Rows {
    let of_row = |x: &Vec<f64>| {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + 1e-5).sqrt();
        x.iter().zip(gain).map(|(x, gain)| x * scale * gain).collect()
    };
    x.iter().map(of_row).collect()
}

fn sum(x: &[f64], y: &[f64]) -> Vec<f64> {
    x.iter().zip(y).map(|(x, y)| x + y).collect()
}

fn add(x: &mut Rows, y: &Rows) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x = sum(x, y));
}
