//! The rows of a product, computed by the oracle. Blocks that are not stored are never read.

use super::{BiasKind, BsrCase, BsrData};
use crate::number::rng;
use crate::tolerance::Reference;
use blockflash_cases::case::oracle_activation;
use blockflash_ops::bsr_matmul::Activation;
use blockflash_oracle::{self as oracle, Element, Epilogue, ProductRow, Rounding};
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
        let computed: Vec<Vec<Element>> = rows.par_iter().map(|&i| row(case, data, i)).collect();
        let mut reference = Self { rows, ..Self::default() };
        reference.c.width = n;
        reference.c.extend(computed.into_iter().flatten());
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

/// The activation as the oracle names it.
fn activation(activation: Activation) -> oracle::Activation {
    oracle_activation(activation).unwrap_or_else(|| panic!("no oracle for {activation:?}"))
}

/// The activation in f64.
pub fn activate(function: Activation, x: f64) -> f64 {
    activation(function).apply(x)
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

fn row(case: &BsrCase, data: &BsrData, i: usize) -> Vec<Element> {
    let ([_, n, k], size) = (case.mnk, case.block_size);
    let (block_row, inner_row) = (i / size, i % size);
    let mut sums = ProductRow::new(n);
    for at in data.row_ptr[block_row] as usize..data.row_ptr[block_row + 1] as usize {
        let first = data.col_idx[at] as usize * size;
        let a = &data.values[(at * size + inner_row) * size..][..size.min(k - first)];
        sums.add(a, |inner| &data.b[(first + inner) * n..][..n]);
    }
    let epilogue = Epilogue {
        alpha: case.alpha,
        beta: case.beta,
        activation: activation(case.activation),
        output: case.c_dtype,
    };
    let element = |(j, dot): (usize, oracle::Dot)| {
        let bias = match case.bias {
            BiasKind::None => 0.0,
            BiasKind::PerRow => data.bias[i],
            BiasKind::PerColumn => data.bias[j],
        };
        dot.finish(&epilogue, data.c[i * n + j], bias)
    };
    sums.dots().enumerate().map(element).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{NanInB, Pattern};
    use super::*;
    use approx::assert_abs_diff_eq;
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
                assert_abs_diff_eq!(reference.c.exact[i * n + j], expected, epsilon = 1e-12);
                assert_abs_diff_eq!(reference.c.plain[i * n + j], expected, epsilon = 1e-4);
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
