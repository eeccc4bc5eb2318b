//! Is a result right? Every operation again, slowly and independently of the library, in f64.
//!
//! Each row of the output is held to twice the error that a plain computation in the same precision
//! makes in it (f32 sums, probabilities and results rounded to their types), plus a floor for what
//! a correct computation is free to round once. The row that comes closest to its limit, or exceeds
//! it most, is reported. Large problems are checked on a sample that contains the first and the
//! last row.

mod attention;
mod block_scores;
mod blocks;
mod bsr_matmul;
mod bsr_sddmm;
mod rounding;
mod sequences;

pub use attention::{AttentionCase, attention, attention_output};
pub use block_scores::block_scores;
pub use blocks::Blocks;
pub use bsr_matmul::{Activation, BsrCase, bsr_matmul};
pub use bsr_sddmm::{SddmmCase, bsr_sddmm};
pub use rounding::{
    PRODUCTS, PartialSums, ProductSum, Rounding, Sizes, TRUNCATION, subnormal_roundoff,
    unit_roundoff,
};

use blockflash_sys::DType;
use half::{bf16, f16};

/// Multiply-adds that a check may cost: seconds on two cores. Tests sample sooner.
const BUDGET: u64 = if cfg!(test) { 1 << 22 } else { 1 << 30 };

/// How far a result is from the reference.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Comparison {
    /// Elements that were compared.
    pub checked: u64,
    /// Elements of the whole result.
    pub total: u64,
    /// Largest absolute error in the worst row; infinite where the result is NaN or infinite and
    /// the reference is not, or the reverse.
    pub error: f64,
    /// What is allowed in that row.
    pub limit: f64,
    /// ‖result − reference‖ / ‖reference‖ over the checked elements.
    pub relative: f64,
    #[serde(skip)]
    error_squares: f64,
    #[serde(skip)]
    reference_squares: f64,
}

/// One element: what was computed, what is right, what a plain computation gives, and the sizes
/// that [`Sizes`] names.
struct Element {
    result: f32,
    reference: f64,
    plain: f32,
    magnitude: f64,
    partial: f64,
}

impl Comparison {
    /// Whether every checked row is within its limit.
    pub fn passed(&self) -> bool {
        self.error <= self.limit
    }

    /// Adds a row; `floor` gives what may be rounded, of the largest sizes.
    fn add_row(&mut self, elements: impl Iterator<Item = Element>, floor: impl Fn(Sizes) -> f64) {
        let mut row = Self::default();
        let (mut plain_error, mut largest) = (0f64, Sizes::default());
        let finite = |value: f64| if value.is_finite() { value } else { 0.0 };
        for element in elements {
            let reference = finite(element.reference);
            let error = distance(element.result, element.reference);
            row.checked += 1;
            row.error = row.error.max(error);
            row.error_squares += error * error;
            row.reference_squares += reference * reference;
            // An overflow of the plain computation says nothing about what is allowed elsewhere.
            plain_error = plain_error.max(finite(distance(element.plain, element.reference)));
            largest.exact = largest.exact.max(reference.abs());
            largest.magnitude = largest.magnitude.max(finite(element.magnitude));
            largest.partial = largest.partial.max(finite(element.partial));
        }
        row.limit = 2.0 * plain_error + floor(largest);
        *self = self.merge(row);
    }

    fn merge(self, other: Self) -> Self {
        let excess = |row: &Self| if row.error == 0.0 { 0.0 } else { row.error / row.limit };
        let worst = if excess(&other) >= excess(&self) { other } else { self };
        Self {
            checked: self.checked + other.checked,
            error_squares: self.error_squares + other.error_squares,
            reference_squares: self.reference_squares + other.reference_squares,
            ..worst
        }
    }

    fn finish(self, total: usize) -> Self {
        // Without a reference that is not zero any error is infinite, and none is none.
        let scale = if self.error_squares == 0.0 { 1.0 } else { self.reference_squares };
        Self { total: total as u64, relative: (self.error_squares / scale).sqrt(), ..self }
    }
}

/// Why a check cannot be made: the operands do not belong together.
#[derive(Debug, thiserror::Error)]
#[error("cannot check: {0}")]
pub struct Mismatch(String);

fn ensure(condition: bool, what: impl FnOnce() -> String) -> Result<(), Mismatch> {
    if condition { Ok(()) } else { Err(Mismatch(what())) }
}

fn distance(result: f32, reference: f64) -> f64 {
    let result = f64::from(result);
    if result.is_nan() && reference.is_nan() || result == reference {
        0.0
    } else if result.is_finite() && reference.is_finite() {
        (result - reference).abs()
    } else {
        f64::INFINITY
    }
}

/// Largest error of rounding a value of this size to nearest.
fn rounding(dtype: DType, size: f64) -> f64 {
    (size * unit_roundoff(dtype)).max(subnormal_roundoff(dtype))
}

/// The reference as the output's type would hold it: f16 overflows to infinity beyond its range.
fn representable(dtype: DType, value: f64) -> f64 {
    match dtype {
        DType::F16 if f16::from_f64(value).is_infinite() => f64::from(f16::from_f64(value)),
        DType::BF16 if bf16::from_f64(value).is_infinite() => f64::from(bf16::from_f64(value)),
        _ => value,
    }
}

fn round(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::BF16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Positions to check, ascending, with the first and the last: that is where masks and tails go
/// wrong.
fn sample(count: usize, total: usize, seed: u64, lane: u64) -> Vec<usize> {
    let mut chosen = crate::random::choose(count, total, seed, lane);
    if let Some(first) = chosen.first_mut() {
        *first = 0;
    }
    if let Some(last) = chosen.last_mut().filter(|_| total > 0) {
        *last = total - 1;
    }
    chosen
}

#[cfg(test)]
mod tests;
