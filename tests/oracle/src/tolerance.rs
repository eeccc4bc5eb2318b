//! The one rule by which a result is accepted.
//!
//! `plain` is the same computation done plainly in the same precision: inputs and probabilities
//! rounded to the input type, f32 accumulation, output rounded. An output tensor is accepted when
//!
//! 1. **max**: `max |got - exact| <= 2 · max |plain - exact| + floor` over the tensor, and
//! 2. **relative Frobenius, row by row**: `‖got - exact‖ <= 2 · ‖plain - exact‖ + floor`, which
//!    notices one missing key or block among thousands, in whatever row it is missing;
//! 3. elements whose exact value is NaN are NaN, infinite ones are the same infinity, and all
//!    others are finite.
//!
//! The floor keeps a lucky `plain` (a row of one key has no rounding error at all) from demanding
//! the impossible. It covers the roundings that any correct computation is free to make once: one
//! rounding of the result, one rounding of the factor that enters the second product (the
//! probabilities), the f32 roundings of the exponents from which that factor is computed (an
//! absolute error of an exponent is a relative one of the probability), the f32 roundings of the
//! epilogue, and the bits that tensor cores cut off while they add (derived in `rounding.rs`). Each
//! is a unit roundoff times the size of the rounded value; in the norm of a row, the first two
//! count with their root mean square, a unit roundoff / √3; the second with three times as much
//! where the rows that the factors multiply are parallel ([`Rounding::parallel`]). The floor has no
//! tunable factor and is never widened. For f16 and bf16 outputs, all terms but the first two are
//! small.

use crate::elements::Element;
use crate::rounding::{Rounding, Sizes};

/// Exact and plainly computed values of one output tensor, or of a sample of its rows.
#[derive(Clone, Debug, Default)]
pub struct Reference {
    /// Elements per row: the unit of the Frobenius rule.
    pub width: usize,
    /// Values in f64.
    pub exact: Vec<f64>,
    /// Values of the plain computation in the same precision.
    pub plain: Vec<f64>,
    /// Root of the sum of squares of the terms that were added up for an element.
    pub magnitude: Vec<f64>,
    /// Mean size of the partial sums in a tensor core; 0 where there is none.
    pub partial: Vec<f64>,
}

impl Extend<Element> for Reference {
    fn extend<E: IntoIterator<Item = Element>>(&mut self, elements: E) {
        for Element { exact, plain, magnitude, partial } in elements {
            self.exact.push(exact);
            self.plain.push(plain);
            self.magnitude.push(magnitude);
            self.partial.push(partial);
        }
    }
}

/// Accepts `got`, or returns a message with the rule that failed, the first bad element (named by
/// `name`), the values got and expected, and the limit.
pub fn check(
    got: &[f64],
    reference: &Reference,
    rounding: &Rounding,
    name: impl Fn(usize) -> String,
) -> Result<(), String> {
    judge(got, &reference.exact, reference, rounding, 1.0, name)
}

/// Accepts two results of the same problem when they differ by no more than the sum of the errors
/// that each may have against the exact result.
pub fn check_agreement(
    got: &[f64],
    other: &[f64],
    reference: &Reference,
    rounding: &Rounding,
    name: impl Fn(usize) -> String,
) -> Result<(), String> {
    judge(got, other, reference, rounding, 2.0, name)
}

/// The rule for `got` against `expected`. The limit counts once for each computation between the
/// two.
fn judge(
    got: &[f64],
    expected: &[f64],
    reference: &Reference,
    rounding: &Rounding,
    computations: f64,
    name: impl Fn(usize) -> String,
) -> Result<(), String> {
    let Reference { width, exact, plain, magnitude, partial } = reference;
    let lengths = [got.len(), expected.len(), plain.len(), magnitude.len(), partial.len()];
    assert!(
        lengths.iter().all(|&length| length == exact.len()),
        "{lengths:?} and {} elements",
        exact.len()
    );
    check_classes(got, expected, &name)?;
    // A number of which there is a result and an exact value: |error|, then what limits it.
    let sizes_of = |i: usize| {
        (expected[i].is_finite() && exact[i].is_finite()).then(|| {
            let (plain, exact) = (plain[i], exact[i]);
            assert!(plain.is_finite(), "the plain computation of {} gives {plain}", name(i));
            [
                (got[i] - expected[i]).abs(),
                (plain - exact).abs(),
                exact.abs(),
                magnitude[i],
                partial[i],
            ]
        })
    };
    let largest =
        (0..exact.len()).filter_map(sizes_of).fold([0.0; 5], |largest: [f64; 5], sizes| {
            std::array::from_fn(|i| largest[i].max(sizes[i]))
        });
    let [error, plain_error, exact_size, magnitude_size, partial_size] = largest;
    let floor = rounding.largest(Sizes {
        exact: exact_size,
        magnitude: magnitude_size,
        partial: partial_size,
    });
    let limit = computations * (2.0 * plain_error + floor);
    if error > limit {
        let error = |i: usize| (got[i] - expected[i]).abs();
        let off = |&i: &usize| sizes_of(i).is_some_and(|[error, ..]| error > limit);
        let bad: Vec<usize> = (0..exact.len()).filter(off).collect();
        let first = bad[0];
        let worst =
            bad.iter().copied().max_by(|&a, &b| error(a).total_cmp(&error(b))).unwrap_or(first);
        return Err(format!(
            "max error: {} of {} elements are off; first {}: got {}, expected {}, error {:.3e} > \
             limit {limit:.3e} \
             (plain error {plain_error:.3e}, floor {floor:.3e}); worst {}: got {}, expected {}",
            bad.len(),
            exact.len(),
            name(first),
            got[first],
            expected[first],
            error(first),
            name(worst),
            got[worst],
            expected[worst],
        ));
    }
    for row in (0..exact.len()).step_by((*width).max(1)) {
        let row = row..exact.len().min(row + (*width).max(1));
        let squares = row.clone().filter_map(sizes_of).fold([0.0; 5], |sums: [f64; 5], sizes| {
            std::array::from_fn(|i| sums[i] + sizes[i].powi(2))
        });
        let [error, plain_error, size, magnitude, partial] = squares.map(f64::sqrt);
        let sizes = Sizes { exact: size, magnitude, partial };
        let floor = rounding.norm(sizes, row.len());
        let limit = computations * (2.0 * plain_error + floor);
        if error > limit {
            return Err(format!(
                "relative Frobenius error of the row from {} to {}: ‖error‖ {error:.3e} > limit \
                 {limit:.3e} (plain \
                 {plain_error:.3e}, floor {floor:.3e}, ‖exact‖ {size:.3e}); its first element: \
                 got {}, expected {}",
                name(row.start),
                name(row.end - 1),
                got[row.start],
                expected[row.start],
            ));
        }
    }
    Ok(())
}

/// NaN and infinities must be exactly where they are expected; all other values must be finite.
fn check_classes(
    got: &[f64],
    expected: &[f64],
    name: &impl Fn(usize) -> String,
) -> Result<(), String> {
    let same = |got: f64, expected: f64| match expected {
        e if e.is_nan() => got.is_nan(),
        e if e.is_infinite() => got == e,
        _ => got.is_finite(),
    };
    let bad: Vec<usize> = (0..got.len()).filter(|&i| !same(got[i], expected[i])).collect();
    match bad.first() {
        None => Ok(()),
        Some(&i) => Err(format!(
            "NaN or infinity where it must not be, or missing: {} of {} elements; first {}: got \
             {}, expected {}",
            bad.len(),
            got.len(),
            name(i),
            got[i],
            expected[i]
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rounding::TRUNCATION;
    use blockflash_sys::DType;

    fn reference() -> Reference {
        Reference {
            width: 4,
            exact: vec![1.0, -2.0, 0.5, f64::NEG_INFINITY, 0.25, f64::NAN, 3.0, 0.0],
            plain: vec![1.0005, -2.0, 0.5, f64::NEG_INFINITY, 0.25, f64::NAN, 3.0, 0.0],
            magnitude: vec![1.0; 8],
            partial: vec![0.0; 8],
        }
    }
    const F16: Rounding = Rounding {
        output: DType::F16,
        factor: None,
        parallel: false,
        exponent: 0.0,
        steps: 1,
        additions: 0,
        truncation: TRUNCATION,
    };

    fn verdict(change: impl Fn(&mut Vec<f64>)) -> Result<(), String> {
        let mut got = reference().exact;
        change(&mut got);
        check(&got, &reference(), &F16, |i| format!("[{i}]"))
    }

    #[test]
    fn accepts_what_is_as_good_as_the_plain_computation() {
        verdict(|_| ()).unwrap();
        verdict(|got| got[0] += 0.001).unwrap();
    }

    #[test]
    fn a_sum_of_rounded_terms_shows_in_its_logarithm() {
        let reference = Reference {
            width: 1,
            exact: vec![3.0],
            plain: vec![3.0],
            magnitude: vec![3.0],
            partial: vec![0.0],
        };
        let rounding = Rounding { output: DType::F32, steps: 9, ..F16 };
        let verdict = |error: f64| check(&[3.0 + error], &reference, &rounding, |_| "lse".into());
        verdict(1e-6).unwrap();
        assert!(verdict(2f64.powi(-11)).is_err() && verdict(2f64.powi(-8)).is_err());
    }

    #[test]
    fn rejects_errors_nan_and_missing_infinities() {
        for change in [
            |got: &mut Vec<f64>| got[1] += 0.01,
            |got: &mut Vec<f64>| got[4] += 0.002, // passes the max rule, fails in its row
            |got: &mut Vec<f64>| got[2] = f64::NAN,
            |got: &mut Vec<f64>| got[2] = f64::INFINITY,
            |got: &mut Vec<f64>| got[3] = -1e30,
            |got: &mut Vec<f64>| got[3] = f64::INFINITY,
            |got: &mut Vec<f64>| got[5] = 0.0,
        ] {
            let message = verdict(change).unwrap_err();
            assert!(message.contains("got") && !message.contains('\n'), "{message}");
        }
    }
}
