//! The values of a sampled product, computed by the oracle. Only what stored blocks need is read.

use super::{SddmmCase, SddmmData};
use crate::number::rng;
use crate::tolerance::Reference;
use blockflash_oracle::{Activation, Dot, Element, Epilogue, Rounding};
use rand::Rng;
use rayon::prelude::*;

/// Exact and plain values of all rows of all blocks, or of a sample.
#[derive(Clone, Debug, Default)]
pub struct SddmmReference {
    /// The rows: inner row `j` of block `i` is row `i · block + j`.
    pub rows: Vec<usize>,
    /// `[rows, block]`.
    pub values: Reference,
}

impl SddmmReference {
    /// Computes the reference. At most about `budget` multiply-adds are spent on each of the two
    /// computations: larger cases are sampled (first and last row of the first and last block,
    /// others at random).
    pub fn compute(case: &SddmmCase, data: &SddmmData, budget: f64) -> Self {
        let (size, k) = (case.block_size, case.mnk[2]);
        let rows =
            sample(case, data.structure.col_idx.len() * size, budget / (size * (k + 1)) as f64);
        // A column of B is read for every row of a block.
        let b: Vec<f32> = transposed(&data.b, k, case.mnk[1]);
        let elements: Vec<Element> = rows
            .par_iter()
            .flat_map_iter(|&row| (0..size).map(move |col| row * size + col))
            .map(|at| element(case, data, &b, at))
            .collect();
        let mut values = Reference { width: size, ..Reference::default() };
        values.extend(elements);
        Self { rows, values }
    }

    /// What a correct implementation may round: the sum, the two operations of alpha and beta, and
    /// the result.
    pub fn rounding(case: &SddmmCase) -> Rounding {
        Rounding::of_products(case.mnk[2], 2, case.values_dtype)
    }
}

fn transposed(b: &[f32], k: usize, n: usize) -> Vec<f32> {
    (0..n).flat_map(|col| (0..k).map(move |row| b[row * n + col])).collect()
}

fn sample(case: &SddmmCase, rows: usize, affordable: f64) -> Vec<usize> {
    if rows as f64 <= affordable {
        return (0..rows).collect();
    }
    let mut random = rng(case.seed);
    let mut sampled = vec![0, case.block_size - 1, rows - case.block_size, rows - 1];
    sampled.extend((0..affordable as usize).map(|_| random.random_range(0..rows)));
    sampled.sort_unstable();
    sampled.dedup();
    sampled
}

/// A value; zero beyond the matrix. `b` is transposed.
fn element(case: &SddmmCase, data: &SddmmData, b: &[f32], at: usize) -> Element {
    let Some((row, col)) = data.position(case, at) else { return Element::default() };
    let k = case.mnk[2];
    let epilogue = Epilogue {
        alpha: case.alpha,
        beta: case.beta,
        activation: Activation::None,
        output: case.values_dtype,
    };
    Dot::of(&data.a[row * k..][..k], &b[col * k..][..k]).finish(&epilogue, data.old[at], 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bsr::Pattern;
    use approx::assert_abs_diff_eq;
    use blockflash_sys::DType;

    #[test]
    fn equals_the_dense_product_where_blocks_are() {
        let mut beyond = 0;
        for pattern in [Pattern::Random(0.4), Pattern::Full, Pattern::EmptyRows(0.5)] {
            let simple = SddmmCase::simple(DType::BF16, 16, [37, 50, 9], pattern);
            let case = SddmmCase { alpha: 0.5, beta: -2.0, values_dtype: DType::F32, ..simple };
            let data = SddmmData::generate(&case);
            let reference = SddmmReference::compute(&case, &data, f64::INFINITY);
            for at in 0..data.old.len() {
                let (exact, plain) = (reference.values.exact[at], reference.values.plain[at]);
                let Some((i, j)) = data.position(&case, at) else {
                    assert_eq!((exact, plain), (0.0, 0.0));
                    beyond += 1;
                    continue;
                };
                let dot: f64 = (0..9)
                    .map(|l| f64::from(data.a[i * 9 + l]) * f64::from(data.b[l * 50 + j]))
                    .sum();
                let expected = 0.5 * dot - 2.0 * f64::from(data.old[at]);
                assert_abs_diff_eq!(exact, expected, epsilon = 1e-12);
                assert_abs_diff_eq!(plain, expected, epsilon = 1e-4);
            }
        }
        assert!(beyond > 0, "there are blocks that reach beyond the matrix");
    }

    #[test]
    fn what_no_block_reads_is_nan_and_does_not_leak() {
        let case = SddmmCase::simple(DType::F16, 16, [64, 96, 5], Pattern::Random(0.15));
        let data = SddmmData::generate(&case);
        assert!(
            data.a.iter().chain(&data.b).any(|x| x.is_nan()) && data.old.iter().all(|x| x.is_nan())
        );
        let reference = SddmmReference::compute(&case, &data, f64::INFINITY).values;
        assert!(reference.exact.iter().chain(&reference.plain).all(|x| x.is_finite()));
        let nan = SddmmCase { nan_inside: true, pattern: Pattern::Full, ..case };
        let reference =
            SddmmReference::compute(&nan, &SddmmData::generate(&nan), f64::INFINITY).values;
        assert_eq!(reference.exact.iter().filter(|x| x.is_nan()).count(), 64 + 96 - 1);
    }

    #[test]
    fn large_products_are_sampled() {
        let case = SddmmCase::simple(DType::F16, 32, [320, 1000, 100], Pattern::Full);
        let rows = SddmmReference::compute(&case, &SddmmData::generate(&case), 1e5).rows;
        assert!(rows.len() < 50 && rows.contains(&0) && rows.contains(&(320 * 32 - 1)));
    }
}
