//! Is a result right? Both operations again, slowly and independently of the library, in f64.
//!
//! The allowed error is twice that of a plain computation in the same precision (f32 sums, results rounded to the output's
//! type), plus a floor for what rounding alone does. Large problems are checked on a sample that contains the first and the
//! last row.

mod attention;
mod bsr_matmul;

pub use attention::{AttentionCase, attention};
pub use bsr_matmul::{Activation, BsrCase, bsr_matmul};

use blockflash_sys::DType;
use half::{bf16, f16};

/// Multiply-adds that a check may cost: seconds on two cores.
const BUDGET: u64 = 1 << 30;

/// How far a result is from the reference.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Comparison {
    /// Elements that were compared.
    pub checked: u64,
    /// Elements of the whole result.
    pub total: u64,
    /// Largest absolute error; infinite where the result is NaN or infinite and the reference is not, or the reverse.
    pub error: f64,
    /// What is allowed.
    pub limit: f64,
    /// ‖result − reference‖ / ‖reference‖ over the checked elements.
    pub relative: f64,
    #[serde(skip)]
    plain_error: f64,
    #[serde(skip)]
    floor: f64,
    #[serde(skip)]
    error_squares: f64,
    #[serde(skip)]
    reference_squares: f64,
}

impl Comparison {
    /// Whether every checked element is within the limit.
    pub fn passed(&self) -> bool {
        self.error <= self.limit
    }

    fn add(&mut self, result: f32, reference: f64, plain: f32, floor: f64) {
        self.checked += 1;
        let error = distance(result, reference);
        self.error = self.error.max(error);
        self.error_squares += error * error;
        self.reference_squares += if reference.is_finite() { reference * reference } else { 0.0 };
        let plain = distance(plain, reference);
        // An overflow of the plain computation says nothing about what is allowed elsewhere.
        if plain.is_finite() {
            self.plain_error = self.plain_error.max(plain);
        }
        self.floor = self.floor.max(floor);
    }

    fn merge(self, other: Self) -> Self {
        Self {
            checked: self.checked + other.checked,
            total: self.total + other.total,
            error: self.error.max(other.error),
            plain_error: self.plain_error.max(other.plain_error),
            floor: self.floor.max(other.floor),
            error_squares: self.error_squares + other.error_squares,
            reference_squares: self.reference_squares + other.reference_squares,
            limit: 0.0,
            relative: 0.0,
        }
    }

    fn finish(self, total: usize) -> Self {
        // Without a reference that is not zero any error is infinite, and none is none.
        let scale = if self.error_squares == 0.0 { 1.0 } else { self.reference_squares };
        let relative = (self.error_squares / scale).sqrt();
        Self { total: total as u64, limit: 2.0 * self.plain_error + self.floor, relative, ..self }
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

/// Unit roundoff: the largest relative error of rounding to nearest.
fn roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        DType::F32 | DType::I32 => 2f64.powi(-24),
    }
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
        DType::F32 | DType::I32 => value,
    }
}

/// Positions to check, ascending, with the first and the last: that is where masks and tails go wrong.
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
