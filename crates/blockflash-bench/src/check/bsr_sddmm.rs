use super::{BUDGET, Comparison, Element, Mismatch, ensure, representable, round, sample};
use super::{PRODUCTS, PartialSums, ProductSum, Rounding};
use crate::io::Array;
use blockflash_sys::Major;
use rayon::prelude::*;

/// `alpha · A·B + beta · old` at the blocks of a block-sparse matrix: row `i` of blocks has the
/// columns `col_idx[row_ptr[i]..row_ptr[i + 1]]`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct SddmmCase<'a> {
    pub row_ptr: &'a [i32],
    pub col_idx: &'a [i32],
    /// m, n, k.
    pub sizes: [usize; 3],
    /// `[m, k]`, or `[k, m]` if A is column-major.
    pub a: &'a Array,
    /// `[k, n]`, or `[n, k]` if B is column-major.
    pub b: &'a Array,
    /// Of A and B.
    pub majors: [Major; 2],
    /// `[nnz_blocks, block_size, block_size]`, as it was before.
    pub old: Option<&'a Array>,
    pub alpha: f32,
    pub beta: f32,
}

/// Compares `result` (`[nnz_blocks, block_size, block_size]`) with the reference. `progress` is
/// told the fraction that is done.
///
/// # Errors
/// If shapes or indices do not belong together.
pub fn bsr_sddmm(
    case: &SddmmCase<'_>,
    result: &Array,
    seed: u64,
    progress: impl Fn(f64) + Sync,
) -> Result<Comparison, Mismatch> {
    let ([m, n, k], &[blocks, size, _]) = (case.sizes, result.shape()) else {
        return Err(Mismatch(format!("the result is {:?}, not [nnz, b, b]", result.shape())));
    };
    ensure(result.shape() == [case.col_idx.len(), size, size] && size > 0, || {
        format!("the result is {:?} for {} blocks", result.shape(), case.col_idx.len())
    })?;
    let last = case.row_ptr.last().is_some_and(|&last| usize::try_from(last) == Ok(blocks));
    let ascends = case.row_ptr.first() == Some(&0) && case.row_ptr.is_sorted();
    ensure(case.row_ptr.len() == m.div_ceil(size) + 1 && ascends && last, || {
        "row_ptr does not lead through the blocks".to_owned()
    })?;
    ensure(
        case.col_idx
            .iter()
            .all(|&col| usize::try_from(col).is_ok_and(|col| col < n.div_ceil(size))),
        || "a block column is out of range".to_owned(),
    )?;
    ensure(case.a.len() == m * k && case.b.len() == k * n, || {
        "a or b has another shape".to_owned()
    })?;
    ensure(case.old.is_none_or(|old| old.shape() == result.shape()), || {
        "the old values have another shape".to_owned()
    })?;

    let [a_major, b_major] = case.majors;
    let a = along_k(case.a, k, m, a_major == Major::Row);
    let b = along_k(case.b, k, n, b_major == Major::Column);
    let affordable = (BUDGET / (size * k).max(1) as u64).max(1) as usize;
    let rows = sample(affordable.min(blocks * size), blocks * size, seed, 0);
    let done = std::sync::atomic::AtomicUsize::new(0);
    let compared = rows.par_iter().map(|&row| {
        let compared = compare_row(case, result, row, &a, &b);
        let finished = 1 + done.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        progress(finished as f64 / rows.len() as f64);
        compared
    });
    Ok(compared.reduce(Comparison::default, Comparison::merge).finish(result.len()))
}

/// The elements `[lines, k]` in f32, of an array that holds them so or transposed.
fn along_k(array: &Array, k: usize, lines: usize, is_so: bool) -> Vec<f32> {
    let values = array.to_f32(0..array.len());
    if is_so {
        return values;
    }
    (0..lines)
        .into_par_iter()
        .flat_map_iter(|line| values.iter().skip(line).step_by(lines.max(1)).take(k).copied())
        .collect()
}

/// Row `row % size` of block `row / size`; `a` is `[m, k]` and `b` `[n, k]`.
fn compare_row(
    case: &SddmmCase<'_>,
    result: &Array,
    row: usize,
    a: &[f32],
    b: &[f32],
) -> Comparison {
    let ([m, n, k], size, dtype) = (case.sizes, result.shape()[1], result.dtype());
    let block = row / size;
    let block_row = case.row_ptr.partition_point(|&first| first as usize <= block) - 1;
    let (i, first_col) = (block_row * size + row % size, case.col_idx[block] as usize * size);
    let values = result.to_f32(row * size..(row + 1) * size);
    let old =
        case.old.filter(|_| case.beta != 0.0).map(|old| old.to_f32(row * size..(row + 1) * size));
    let elements = values.iter().enumerate().map(|(at, &value)| {
        let j = first_col + at;
        if i >= m || j >= n {
            return Element {
                result: value,
                reference: 0.0,
                plain: 0.0,
                magnitude: 0.0,
                partial: 0.0,
            };
        }
        let (mut sum, mut partial, mut plain) =
            (ProductSum::default(), PartialSums::default(), 0f32);
        for (a, b) in a[i * k..][..k].chunks(PRODUCTS).zip(b[j * k..][..k].chunks(PRODUCTS)) {
            for (&a, &b) in a.iter().zip(b) {
                sum.add(f64::from(a) * f64::from(b));
                plain += a * b;
            }
            partial.settle(sum);
        }
        let old = old.as_ref().map_or(0.0, |old| old[at]);
        let (alpha, added) = (f64::from(case.alpha), f64::from(case.beta) * f64::from(old));
        Element {
            result: value,
            reference: representable(dtype, alpha * sum.sum + added),
            plain: round(dtype, case.alpha * plain + case.beta * old),
            magnitude: alpha.abs() * sum.squares.sqrt() + added.abs(),
            partial: alpha.abs() * partial.mean(),
        }
    });
    // Alpha and beta are two operations.
    let rounding = Rounding::of_products(k, 2, dtype);
    let mut comparison = Comparison::default();
    comparison.add_row(elements, |sizes| rounding.largest(sizes));
    comparison
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::Values;

    fn array(shape: &[usize], values: &[f32]) -> Array {
        Array::new(shape, Values::F32(values.to_vec())).unwrap()
    }

    #[test]
    fn on_paper() {
        // A·B of 3 × 3 in blocks of 2; the stored block has rows 2, 3 and columns 0, 1 of [1 2 3] ·
        // [[1 0 2] [0 1 2] [1 1 2]].
        let a = array(&[3, 3], &[9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 1.0, 2.0, 3.0]);
        let b = array(&[3, 3], &[1.0, 0.0, 2.0, 0.0, 1.0, 2.0, 1.0, 1.0, 2.0]);
        let old = array(&[1, 2, 2], &[10.0, 20.0, f32::NAN, f32::NAN]);
        let case = SddmmCase {
            row_ptr: &[0, 0, 1],
            col_idx: &[0],
            sizes: [3, 3, 3],
            a: &a,
            b: &b,
            majors: [Major::Row, Major::Row],
            old: Some(&old),
            alpha: 2.0,
            beta: 0.5,
        };
        let check = |case: &SddmmCase<'_>, values: [f32; 4]| {
            bsr_sddmm(case, &array(&[1, 2, 2], &values), 0, |_| ()).map(|found| found.passed())
        };
        assert!(check(&case, [13.0, 20.0, 0.0, 0.0]).unwrap());
        for wrong in [[13.1, 20.0, 0.0, 0.0], [13.0, 20.0, 0.0, 1.0], [13.0, 20.0, f32::NAN, 0.0]] {
            assert!(!check(&case, wrong).unwrap());
        }
        assert!(check(&SddmmCase { beta: 0.0, ..case }, [8.0, 10.0, 0.0, 0.0]).unwrap());
        // The same numbers as the transposed matrices.
        let transposed = SddmmCase { majors: [Major::Column, Major::Column], beta: 0.0, ..case };
        // Row 2 of Aᵀ is (9, 9, 3), columns 0 and 1 of Bᵀ are (1, 0, 2) and (0, 1, 2).
        assert!(check(&transposed, [30.0, 30.0, 0.0, 0.0]).unwrap());
        assert!(check(&SddmmCase { row_ptr: &[0, 1], ..case }, [0.0; 4]).is_err());
        assert!(check(&SddmmCase { row_ptr: &[0, 2, 1], ..case }, [0.0; 4]).is_err());
        assert!(check(&SddmmCase { col_idx: &[2], ..case }, [0.0; 4]).is_err());
        assert!(check(&SddmmCase { sizes: [3, 3, 4], ..case }, [0.0; 4]).is_err());
    }
}
