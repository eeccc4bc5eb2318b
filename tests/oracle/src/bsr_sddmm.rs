use crate::comparison::{BUDGET, Comparison, Mismatch, Steps, ensure, sample};
use crate::elements::{Element, Elements};
use crate::product::{Activation, Dot, Epilogue};
use crate::rounding::Rounding;
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
    pub a: &'a dyn Elements,
    /// `[k, n]`, or `[n, k]` if B is column-major.
    pub b: &'a dyn Elements,
    /// Of A and B.
    pub majors: [Major; 2],
    /// `[nnz_blocks, block_size, block_size]`, as it was before.
    pub old: Option<&'a dyn Elements>,
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
    result: &dyn Elements,
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
    let steps = Steps::new(rows.len(), &progress);
    let compared = rows.par_iter().map(|&row| {
        let compared = compare_row(case, result, row, &a, &b);
        steps.step();
        compared
    });
    Ok(compared.reduce(Comparison::default, Comparison::merge).finish(result.len()))
}

/// The elements `[lines, k]` in f32, of an array that holds them so or transposed.
fn along_k(array: &dyn Elements, k: usize, lines: usize, is_so: bool) -> Vec<f32> {
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
    result: &dyn Elements,
    row: usize,
    a: &[f32],
    b: &[f32],
) -> Comparison {
    let ([m, n, k], size, dtype) = (case.sizes, result.shape()[1], result.dtype());
    let block = row / size;
    let block_row = case.row_ptr.partition_point(|&first| first as usize <= block) - 1;
    let (i, first_col) = (block_row * size + row % size, case.col_idx[block] as usize * size);
    let of_row = |array: &dyn Elements| array.to_f32(row * size..(row + 1) * size);
    let (found, old) = (of_row(result), case.old.map(of_row));
    let SddmmCase { alpha, beta, .. } = *case;
    let epilogue = Epilogue { alpha, beta, activation: Activation::None, output: dtype };
    let expected = found.into_iter().enumerate().map(|(at, value)| {
        let j = first_col + at;
        if i >= m || j >= n {
            return (value, Element::default());
        }
        let old = old.as_ref().map_or(0.0, |old| old[at]);
        (value, Dot::of(&a[i * k..][..k], &b[j * k..][..k]).finish(&epilogue, old, 0.0))
    });
    // Alpha and beta are two operations.
    let rounding = Rounding::of_products(k, 2, dtype);
    Comparison::of_row(dtype, expected, |sizes| rounding.largest(sizes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::array;

    #[test]
    fn on_paper() {
        // A·B of 3 × 3 in blocks of 2; the stored block has rows 2, 3 and columns 0, 1 of [1 2 3] ·
        // [[1 0 2] [0 1 2] [1 1 2]].
        let a = array(&[3, 3], [9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 1.0, 2.0, 3.0]);
        let b = array(&[3, 3], [1.0, 0.0, 2.0, 0.0, 1.0, 2.0, 1.0, 1.0, 2.0]);
        let old = array(&[1, 2, 2], [10.0, 20.0, f32::NAN, f32::NAN]);
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
            bsr_sddmm(case, &array(&[1, 2, 2], values), 0, |_| ()).map(|found| found.passed())
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
