//! Comparison of a result with the oracle, row by row.
//!
//! The limit of each row of the output is twice the error that a plain computation in the same
//! precision makes in it, plus a floor for the roundings that a correct computation is free to make
//! once. The row closest to its limit, or furthest beyond it, is reported. Large problems are
//! checked on a sample that contains the first and the last row.

use crate::elements::Element;
use crate::rounding::{Sizes, subnormal_roundoff, unit_roundoff};
use blockflash_sys::DType;
use half::{bf16, f16};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Largest number of multiply-adds of a check, which takes seconds on two cores. Tests sample
/// earlier.
pub(crate) const BUDGET: u64 = if cfg!(test) { 1 << 22 } else { 1 << 30 };

/// The distance of a result from the reference.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Comparison {
    /// Elements that were compared.
    pub checked: u64,
    /// Elements of the whole result.
    pub total: u64,
    /// Largest absolute error in the worst row. Infinite where the result is NaN or infinite and
    /// the reference is not, or the reverse.
    pub error: f64,
    /// The limit of that row.
    pub limit: f64,
    /// ‖result − reference‖ / ‖reference‖ over the checked elements.
    pub relative: f64,
    #[serde(skip)]
    error_squares: f64,
    #[serde(skip)]
    reference_squares: f64,
}

impl Comparison {
    /// Whether every checked row is within its limit.
    pub fn passed(&self) -> bool {
        self.error <= self.limit
    }

    /// Compares a row of a result of this type. `floor` returns the error that is free, from the
    /// largest sizes in the row.
    pub(crate) fn of_row(
        dtype: DType,
        row: impl Iterator<Item = (f32, Element)>,
        floor: impl Fn(Sizes) -> f64,
    ) -> Self {
        let mut found = Self::default();
        let (mut plain_error, mut largest) = (0f64, Sizes::default());
        let finite = |value: f64| if value.is_finite() { value } else { 0.0 };
        for (result, element) in row {
            let exact = representable(dtype, element.exact);
            let error = distance(f64::from(result), exact);
            let exact_size = finite(exact).abs();
            found.checked += 1;
            found.error = found.error.max(error);
            found.error_squares += error * error;
            found.reference_squares += exact_size * exact_size;
            // Where the plain computation overflows, it says nothing about the errors of other
            // elements.
            plain_error = plain_error.max(finite(distance(element.plain, exact)));
            largest.exact = largest.exact.max(exact_size);
            largest.magnitude = largest.magnitude.max(finite(element.magnitude));
            largest.partial = largest.partial.max(finite(element.partial));
        }
        found.limit = 2.0 * plain_error + floor(largest);
        found
    }

    /// Comparisons of parts as one of a result of `total` elements.
    pub fn of_parts(parts: impl Iterator<Item = Self>, total: usize) -> Self {
        parts.fold(Self::default(), Self::merge).finish(total)
    }

    pub(crate) fn merge(self, other: Self) -> Self {
        let excess = |row: &Self| if row.error == 0.0 { 0.0 } else { row.error / row.limit };
        let worst = if excess(&other) >= excess(&self) { other } else { self };
        Self {
            checked: self.checked + other.checked,
            error_squares: self.error_squares + other.error_squares,
            reference_squares: self.reference_squares + other.reference_squares,
            ..worst
        }
    }

    pub(crate) fn finish(self, total: usize) -> Self {
        // Relative to a reference of zero, any error is infinite and no error is 0.
        let scale = if self.error_squares == 0.0 { 1.0 } else { self.reference_squares };
        Self { total: total as u64, relative: (self.error_squares / scale).sqrt(), ..self }
    }
}

/// The reason why a check cannot be made: the operands do not belong together.
#[derive(Debug, thiserror::Error)]
#[error("cannot check: {0}")]
pub struct Mismatch(pub(crate) String);

pub(crate) fn ensure(condition: bool, what: impl FnOnce() -> String) -> Result<(), Mismatch> {
    if condition { Ok(()) } else { Err(Mismatch(what())) }
}

fn distance(result: f64, reference: f64) -> f64 {
    if result.is_nan() && reference.is_nan() || result == reference {
        0.0
    } else if result.is_finite() && reference.is_finite() {
        (result - reference).abs()
    } else {
        f64::INFINITY
    }
}

/// Largest error of rounding a value of this size to nearest.
pub(crate) fn rounding(dtype: DType, size: f64) -> f64 {
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

/// Reports the fraction that is done to `progress`.
pub(crate) struct Steps<'a> {
    done: AtomicUsize,
    all: usize,
    progress: &'a (dyn Fn(f64) + Sync),
}

impl<'a> Steps<'a> {
    pub(crate) fn new(all: usize, progress: &'a (dyn Fn(f64) + Sync)) -> Self {
        Self { done: AtomicUsize::new(0), all, progress }
    }

    /// Counts one more unit of work as done.
    pub(crate) fn step(&self) {
        let done = 1 + self.done.fetch_add(1, Ordering::Relaxed);
        (self.progress)(done as f64 / self.all as f64);
    }
}

/// Positions to check, ascending. The first and the last are always among them, because masks and
/// tails fail there.
pub(crate) fn sample(count: usize, total: usize, seed: u64, lane: u64) -> Vec<usize> {
    let mut random = SmallRng::seed_from_u64(seed ^ lane.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mut chosen = rand::seq::index::sample(&mut random, total, count.min(total)).into_vec();
    chosen.sort_unstable();
    if let Some(first) = chosen.first_mut() {
        *first = 0;
    }
    if let Some(last) = chosen.last_mut().filter(|_| total > 0) {
        *last = total - 1;
    }
    chosen
}
