//! What the product means, in f64 and in the plain same-precision form. Blocks that are not stored
//! are never read.

use super::{BiasKind, BsrCase, BsrData};
use crate::number::{rng, round};
use crate::tolerance::{PRODUCTS, PartialSums, ProductSum, Reference, Rounding};
use blockflash_ops::bsr_matmul::Activation;
use rand::Rng;
use rayon::prelude::*;

/// Exact and plain values of all rows of C, or of a sample.
#[derive(Clone, Debug, Default)]
pub struct BsrReference {
    /// The rows of C.
    pub rows: Vec<usize>,
    /// `[rows, n]`.
    pub c: Reference,
}

impl BsrReference {
    /// Computes the reference. At most about `budget` multiply-adds are spent on each of the two
    /// computations: larger cases are sampled (first and last row of the first and last block row,
    /// others at random).
    pub fn compute(case: &BsrCase, data: &BsrData, budget: f64) -> Self {
        let n = case.mnk[1];
        let rows = sample(case, data, budget);
        let mut computed = vec![Row::default(); rows.len()];
        computed.par_iter_mut().zip(&rows).for_each(|(out, &i)| *out = row(case, data, i));
        let mut reference = Self { rows, ..Self::default() };
        reference.c.width = n;
        for row in computed {
            reference.c.exact.extend(row.exact);
            reference.c.plain.extend(row.plain);
            reference.c.magnitude.extend(row.magnitude);
            reference.c.partial.extend(row.partial);
        }
        reference
    }

    /// What a correct implementation may round: the sum of the longest row, the epilogue's 4
    /// operations (alpha, beta·C, bias, activation), and the result.
    pub fn rounding(case: &BsrCase, data: &BsrData) -> Rounding {
        let longest =
            data.row_ptr.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap_or(0);
        Rounding::of_products(longest * case.block_size, 4, case.c_dtype)
    }
}

/// The activation in f64.
pub fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::None => x,
        // `f64::max` would turn NaN into 0.
        Activation::Relu => {
            if x < 0.0 {
                0.0
            } else {
                x
            }
        }
        Activation::Gelu => x * 0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2),
        Activation::Silu => x / (1.0 + (-x).exp()),
        other => panic!("the oracle knows no activation {other:?}"),
    }
}

fn activate_f32(activation: Activation, x: f32) -> f32 {
    match activation {
        Activation::None => x,
        Activation::Relu => {
            if x < 0.0 {
                0.0
            } else {
                x
            }
        }
        Activation::Gelu => x * 0.5 * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2)),
        Activation::Silu => x / (1.0 + (-x).exp()),
        other => panic!("the oracle knows no activation {other:?}"),
    }
}

fn sample(case: &BsrCase, data: &BsrData, budget: f64) -> Vec<usize> {
    let m = case.mnk[0];
    let cost = |i: usize| {
        let row = i / case.block_size;
        ((data.row_ptr[row + 1] - data.row_ptr[row]) as usize * case.block_size + 1) as f64
            * case.mnk[1] as f64
    };
    if (0..m).map(cost).sum::<f64>() <= budget {
        return (0..m).collect();
    }
    let mut random = rng(case.seed);
    let mut rows =
        vec![0, m.min(case.block_size) - 1, (m - 1) / case.block_size * case.block_size, m - 1];
    let mut spent: f64 = rows.iter().map(|&row| cost(row)).sum();
    while spent < budget {
        let row = random.random_range(0..m);
        spent += cost(row);
        rows.push(row);
    }
    rows.sort_unstable();
    rows.dedup();
    rows
}

#[derive(Clone, Default)]
struct Row {
    exact: Vec<f64>,
    plain: Vec<f64>,
    magnitude: Vec<f64>,
    partial: Vec<f64>,
}

fn row(case: &BsrCase, data: &BsrData, i: usize) -> Row {
    let [_, n, k] = case.mnk;
    let size = case.block_size;
    let (block_row, inner_row) = (i / size, i % size);
    let mut sums = vec![ProductSum::default(); n];
    let mut partials = vec![PartialSums::default(); n];
    let mut plain = vec![0f32; n];
    for at in data.row_ptr[block_row] as usize..data.row_ptr[block_row + 1] as usize {
        let first = data.col_idx[at] as usize * size;
        let end = k.min(first + size);
        for step in (first..end).step_by(PRODUCTS) {
            for col in step..end.min(step + PRODUCTS) {
                let a = data.values[(at * size + inner_row) * size + col - first];
                for ((sum, plain), &b) in
                    sums.iter_mut().zip(&mut plain).zip(&data.b[col * n..][..n])
                {
                    sum.add(f64::from(a) * f64::from(b));
                    *plain += a * b;
                }
            }
            partials.iter_mut().zip(&sums).for_each(|(partial, &sum)| partial.settle(sum));
        }
    }
    let (alpha, beta) = (f64::from(case.alpha), f64::from(case.beta));
    let mut row = Row::default();
    for (j, (sum, plain)) in sums.into_iter().zip(plain).enumerate() {
        let bias = match case.bias {
            BiasKind::None => 0.0,
            BiasKind::PerRow => data.bias[i],
            BiasKind::PerColumn => data.bias[j],
        };
        // With beta 0 the old C is not read: it may be NaN.
        let old = if case.beta == 0.0 { 0.0 } else { data.c[i * n + j] };
        let added = [beta * f64::from(old), f64::from(bias)];
        row.exact.push(activate(case.activation, alpha * sum.sum + added[0] + added[1]));
        let plain = activate_f32(case.activation, case.alpha * plain + case.beta * old + bias);
        row.plain.push(f64::from(round(case.c_dtype, plain)));
        row.magnitude
            .push((alpha * alpha * sum.squares + added[0].powi(2) + added[1].powi(2)).sqrt());
        row.partial.push(alpha.abs() * partials[j].mean());
    }
    row
}

#[cfg(test)]
mod tests {
    use super::super::{NanInB, Pattern};
    use super::*;
    use blockflash_sys::DType;

    fn dense(case: &BsrCase, data: &BsrData) -> Vec<f64> {
        let [m, _, k] = case.mnk;
        let mut a = vec![0.0; m * k];
        for row in 0..case.blocks()[0] {
            for at in data.row_ptr[row] as usize..data.row_ptr[row + 1] as usize {
                for (i, &x) in data.values[at * case.block_size.pow(2)..][..case.block_size.pow(2)]
                    .iter()
                    .enumerate()
                {
                    let (r, c) = (row * case.block_size + i / case.block_size, i % case.block_size);
                    let c = data.col_idx[at] as usize * case.block_size + c;
                    if r < m && c < k {
                        a[r * k + c] = f64::from(x);
                    } else {
                        assert_eq!(x, 0.0, "padding");
                    }
                }
            }
        }
        a
    }

    #[test]
    fn equals_the_dense_product() {
        for pattern in
            [Pattern::Random(0.4), Pattern::Full, Pattern::Banded, Pattern::EmptyRows(0.5)]
        {
            let case = BsrCase {
                alpha: 0.5,
                beta: -2.0,
                bias: BiasKind::PerColumn,
                nan_in_b: NanInB::Nowhere,
                c_dtype: DType::F32,
                ..BsrCase::simple(DType::BF16, 16, [37, 9, 50], pattern)
            };
            let data = BsrData::generate(&case);
            let (a, [m, n, k]) = (dense(&case, &data), case.mnk);
            let reference = BsrReference::compute(&case, &data, f64::INFINITY);
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let product: f64 =
                    (0..k).map(|l| a[i * k + l] * f64::from(data.b[l * n + j])).sum();
                let expected =
                    0.5 * product - 2.0 * f64::from(data.c[i * n + j]) + f64::from(data.bias[j]);
                assert!((reference.c.exact[i * n + j] - expected).abs() < 1e-12);
                assert!((reference.c.plain[i * n + j] - expected).abs() < 1e-4);
            }
        }
    }

    #[test]
    fn activations_by_known_values() {
        assert_eq!(activate(Activation::Relu, -2.0), 0.0);
        assert!(activate(Activation::Relu, f64::NAN).is_nan());
        assert!((activate(Activation::Gelu, 1.0) - 0.841_344_746_068_542_9).abs() < 1e-15);
        assert!((activate(Activation::Gelu, -6.0) + 6.0 * 9.865_876_450_376_946e-10).abs() < 1e-20);
        assert!((activate(Activation::Silu, 1.0) - 0.731_058_578_630_004_9).abs() < 1e-15);
        for activation in [Activation::None, Activation::Relu, Activation::Gelu, Activation::Silu] {
            for x in [-3.0f32, -0.5, 0.0, 0.7, 4.0] {
                let difference =
                    f64::from(activate_f32(activation, x)) - activate(activation, f64::from(x));
                assert!(difference.abs() < 1e-6, "{activation:?} {x}");
            }
        }
    }

    #[test]
    fn unread_rows_of_b_and_old_c_are_nan_and_do_not_leak() {
        let case = BsrCase::simple(DType::F16, 16, [64, 5, 96], Pattern::Random(0.2));
        let data = BsrData::generate(&case);
        assert!(data.b.iter().any(|b| b.is_nan()) && data.c.iter().all(|c| c.is_nan()));
        let reference = BsrReference::compute(&case, &data, f64::INFINITY);
        assert!(reference.c.exact.iter().chain(&reference.c.plain).all(|c| c.is_finite()));
    }

    #[test]
    fn large_products_are_sampled() {
        let case = BsrCase::simple(DType::F16, 32, [1000, 100, 320], Pattern::Full);
        let data = BsrData::generate(&case);
        let rows = BsrReference::compute(&case, &data, 1e6).rows;
        assert!(rows.len() < 50 && rows.contains(&0) && rows.contains(&999));
    }
}
