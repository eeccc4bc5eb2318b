use crate::comparison::{BUDGET, Comparison, Mismatch, Steps, ensure, sample};
use crate::elements::Elements;
use crate::product::{Activation, Epilogue, ProductRow};
use crate::rounding::Rounding;
use rayon::prelude::*;

/// Columns that a sample takes from a large problem.
const SAMPLED_COLUMNS: usize = 256;

/// `activation(alpha · A·b + beta · c + bias)` with A in block sparse rows: row `i` of blocks has
/// the columns `col_idx[row_ptr[i]..row_ptr[i + 1]]`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct BsrCase<'a> {
    pub row_ptr: &'a [i32],
    pub col_idx: &'a [i32],
    /// `[nnz_blocks, block_size, block_size]`.
    pub values: &'a dyn Elements,
    /// `[k, n]`.
    pub b: &'a dyn Elements,
    /// `[m, n]`, as it was before.
    pub c: Option<&'a dyn Elements>,
    pub alpha: f32,
    pub beta: f32,
    /// `[m]`.
    pub bias_per_row: Option<&'a dyn Elements>,
    /// `[n]`.
    pub bias_per_column: Option<&'a dyn Elements>,
    pub activation: Activation,
}

/// Compares `result` (`[m, n]`) with the reference. `progress` is told the fraction that is done.
///
/// # Errors
/// If shapes or indices do not belong together.
pub fn bsr_matmul(
    case: &BsrCase<'_>,
    result: &dyn Elements,
    seed: u64,
    progress: impl Fn(f64) + Sync,
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
    let steps = Steps::new(rows.len(), &progress);
    let compared: Result<Vec<Comparison>, Mismatch> = rows
        .par_iter()
        .map(|&row| {
            let compared = compare_row(case, result, row, &columns, &b);
            steps.step();
            compared
        })
        .collect();
    Ok(compared?.into_iter().fold(Comparison::default(), Comparison::merge).finish(result.len()))
}

fn compare_row(
    case: &BsrCase<'_>,
    result: &dyn Elements,
    row: usize,
    columns: &[usize],
    b: &[f32],
) -> Result<Comparison, Mismatch> {
    let (block, n, k) = (case.values.shape()[1], case.b.shape()[1], case.b.shape()[0]);
    let (dtype, width) = (result.dtype(), columns.len());
    let bad = || Mismatch(format!("the indices of block row {} are out of range", row / block));
    let [start, end] = [row / block, row / block + 1]
        .map(|at| usize::try_from(case.row_ptr[at]).unwrap_or(usize::MAX));
    let blocks = case.col_idx.get(start..end).ok_or_else(bad)?;
    let mut sums = ProductRow::new(width);
    for (at, &col) in blocks.iter().enumerate() {
        let first = usize::try_from(col).map_err(|_| bad())? * block;
        let offset = ((start + at) * block + row % block) * block;
        let values = case.values.to_f32(offset..offset + block.min(k.saturating_sub(first)));
        sums.add(&values, |inner| &b[(first + inner) * width..][..width]);
    }
    let element = |array: Option<&dyn Elements>, at: usize| {
        array.map_or(0.0, |array| array.to_f32(at..at + 1).first().copied().unwrap_or(f32::NAN))
    };
    let bias_of_row = element(case.bias_per_row, row);
    let of_row = |array: &dyn Elements| array.to_f32(row * n..(row + 1) * n);
    let (found, old) = (of_row(result), case.c.map(of_row));
    let BsrCase { alpha, beta, activation, .. } = *case;
    let epilogue = Epilogue { alpha, beta, activation, output: dtype };
    let expected = columns.iter().zip(sums.dots()).map(|(&column, dot)| {
        let old = old.as_ref().map_or(0.0, |old| old[column]);
        let bias = bias_of_row + element(case.bias_per_column, column);
        (found[column], dot.finish(&epilogue, old, bias))
    });
    // The epilogue has four operations.
    let rounding = Rounding::of_products(blocks.len() * block, 4, dtype);
    Ok(Comparison::of_row(dtype, expected, |sizes| rounding.largest(sizes)))
}
