use super::{BUDGET, Comparison, Element, Mismatch, ensure, representable, round, sample};
use super::{PRODUCTS, PartialSums, ProductSum, Rounding};
use crate::io::Array;
use rayon::prelude::*;

/// Columns that a sample takes from a large problem.
const SAMPLED_COLUMNS: usize = 256;

/// Function applied last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Activation {
    None,
    Relu,
    /// The exact one, with erf.
    Gelu,
    Silu,
}

impl Activation {
    pub(super) fn apply(self, x: f64) -> f64 {
        match self {
            Activation::None => x,
            // Not `max`, which would drop NaN.
            Activation::Relu => {
                if x < 0.0 {
                    0.0
                } else {
                    x
                }
            }
            Activation::Gelu => 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
            Activation::Silu => x / (1.0 + (-x).exp()),
        }
    }
}

/// `activation(alpha · A·b + beta · c + bias)` with A in block sparse rows: row `i` of blocks has
/// the columns `col_idx[row_ptr[i]..row_ptr[i + 1]]`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct BsrCase<'a> {
    pub row_ptr: &'a [i32],
    pub col_idx: &'a [i32],
    /// `[nnz_blocks, block_size, block_size]`.
    pub values: &'a Array,
    /// `[k, n]`.
    pub b: &'a Array,
    /// `[m, n]`, as it was before.
    pub c: Option<&'a Array>,
    pub alpha: f32,
    pub beta: f32,
    /// `[m]`.
    pub bias_per_row: Option<&'a Array>,
    /// `[n]`.
    pub bias_per_column: Option<&'a Array>,
    pub activation: Activation,
}

/// Compares `result` (`[m, n]`) with the reference. `progress` is told the fraction that is done.
///
/// # Errors
/// If shapes or indices do not belong together.
pub fn bsr_matmul(
    case: &BsrCase<'_>,
    result: &Array,
    seed: u64,
    progress: impl Fn(f64) + Sync,
) -> Result<Comparison, Mismatch> {
    compare(case, result, seed, &progress)
}

fn compare(
    case: &BsrCase<'_>,
    result: &Array,
    seed: u64,
    progress: &(dyn Fn(f64) + Sync),
) -> Result<Comparison, Mismatch> {
    let (&[_, block, _], &[k, n], &[m, columns]) =
        (case.values.shape(), case.b.shape(), result.shape())
    else {
        return Err(Mismatch("values must be [nnz, b, b], b [k, n] and c [m, n]".to_owned()));
    };
    ensure(columns == n && block > 0 && case.row_ptr.len() == m.div_ceil(block) + 1, || {
        format!(
            "c is {:?} for {} block rows of {block} and {n} columns",
            result.shape(),
            case.row_ptr.len()
        )
    })?;
    ensure(case.c.is_none_or(|c| c.shape() == [m, n]), || "c has another shape".to_owned())?;
    ensure(case.bias_per_row.is_none_or(|bias| bias.shape() == [m]), || {
        "bias is not [m]".to_owned()
    })?;
    ensure(case.bias_per_column.is_none_or(|bias| bias.shape() == [n]), || {
        "bias is not [n]".to_owned()
    })?;

    let row_cost = (case.col_idx.len() * block).div_ceil(m.div_ceil(block).max(1)).max(1) as u64;
    let all = BUDGET / row_cost >= (m * n) as u64;
    let columns = sample(if all { n } else { SAMPLED_COLUMNS }, n, seed, 0);
    let affordable = (BUDGET / row_cost / columns.len().max(1) as u64) as usize;
    let rows = sample(if all { m } else { affordable.max(1) }, m, seed, 1);
    let b: Vec<f32> = (0..k)
        .into_par_iter()
        .flat_map_iter(|row| {
            let row = case.b.to_f32(row * n..(row + 1) * n);
            columns.iter().map(move |&column| row[column]).collect::<Vec<_>>()
        })
        .collect();
    let done = std::sync::atomic::AtomicUsize::new(0);
    let compared: Result<Vec<Comparison>, Mismatch> = rows
        .par_iter()
        .map(|&row| {
            let compared = compare_row(case, result, row, &columns, &b);
            let finished = 1 + done.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            progress(finished as f64 / rows.len() as f64);
            compared
        })
        .collect();
    Ok(compared?.into_iter().fold(Comparison::default(), Comparison::merge).finish(result.len()))
}

fn compare_row(
    case: &BsrCase<'_>,
    result: &Array,
    row: usize,
    columns: &[usize],
    b: &[f32],
) -> Result<Comparison, Mismatch> {
    let (block, n, k) = (case.values.shape()[1], case.b.shape()[1], case.b.shape()[0]);
    let dtype = result.dtype();
    let width = columns.len();
    let (mut sums, mut plain) = (vec![ProductSum::default(); width], vec![0f32; width]);
    let mut partials = vec![PartialSums::default(); width];
    let bad = || Mismatch(format!("the indices of block row {} are out of range", row / block));
    let [start, end] = [row / block, row / block + 1]
        .map(|at| usize::try_from(case.row_ptr[at]).unwrap_or(usize::MAX));
    let blocks = case.col_idx.get(start..end).ok_or_else(bad)?;
    for (at, &col) in blocks.iter().enumerate() {
        let first = usize::try_from(col).map_err(|_| bad())? * block;
        let offset = ((start + at) * block + row % block) * block;
        let values = case.values.to_f32(offset..offset + block);
        for (step, values) in (first..k).step_by(PRODUCTS).zip(values.chunks(PRODUCTS)) {
            for (inner, &value) in (step..k).zip(values) {
                let b_row = &b[inner * width..(inner + 1) * width];
                for ((sum, plain), &b) in sums.iter_mut().zip(&mut plain).zip(b_row) {
                    sum.add(f64::from(value) * f64::from(b));
                    *plain += value * b;
                }
            }
            partials.iter_mut().zip(&sums).for_each(|(partial, &sum)| partial.settle(sum));
        }
    }
    let element = |array: Option<&Array>, at: usize| {
        array.map_or(0.0, |array| array.to_f32(at..at + 1).first().copied().unwrap_or(f32::NAN))
    };
    let bias_of_row = element(case.bias_per_row, row);
    let result_row = result.to_f32(row * n..(row + 1) * n);
    let c_row = case.c.filter(|_| case.beta != 0.0).map(|c| c.to_f32(row * n..(row + 1) * n));
    let elements = columns.iter().enumerate().map(|(at, &column)| {
        let bias = bias_of_row + element(case.bias_per_column, column);
        let c = c_row.as_ref().map_or(0.0, |c| c[column]);
        let (alpha, product) = (f64::from(case.alpha), &sums[at]);
        let sum = alpha * product.sum + f64::from(case.beta) * f64::from(c) + f64::from(bias);
        let plain_sum = case.alpha * plain[at] + case.beta * c + bias;
        Element {
            result: result_row[column],
            reference: representable(dtype, case.activation.apply(sum)),
            plain: round(dtype, case.activation.apply(f64::from(plain_sum)) as f32),
            magnitude: alpha.abs() * product.squares.sqrt()
                + f64::from(case.beta * c).abs()
                + f64::from(bias).abs(),
            partial: alpha.abs() * partials[at].mean(),
        }
    });
    // The epilogue has four operations.
    let rounding = Rounding::of_products(blocks.len() * block, 4, dtype);
    let mut comparison = Comparison::default();
    comparison.add_row(elements, |sizes| rounding.largest(sizes));
    Ok(comparison)
}

/// The error function to f64 precision: a series whose terms are all positive.
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut odd) = (x, x, 1.0);
    while term.abs() > sum.abs() * 1e-17 {
        odd += 2.0;
        term *= 2.0 * x * x / odd;
        sum += term;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}
