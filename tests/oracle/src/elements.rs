//! The objects of a comparison: arrays, and single elements of them.

use blockflash_sys::DType;
use half::{bf16, f16};
use std::fmt::Debug;
use std::ops::Range;

/// A row-major array in host memory.
pub trait Elements: Debug + Sync {
    /// Sizes, outermost first.
    fn shape(&self) -> &[usize];
    /// Element type.
    fn dtype(&self) -> DType;
    /// A range of elements in f32, which holds every floating-point type exactly; empty if the
    /// range is outside.
    fn to_f32(&self, range: Range<usize>) -> Vec<f32>;

    /// Number of elements.
    fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Whether there are no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The expected value of an element of a result.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Element {
    /// Its value in f64.
    pub exact: f64,
    /// The value of a plain computation in the precision of the tensors: f32 sums, probabilities
    /// and the result rounded to their types.
    pub plain: f64,
    /// Root of the sum of squares of the terms that are added up.
    pub magnitude: f64,
    /// Mean size of the partial sums in a tensor core; 0 where there is none.
    pub partial: f64,
}

/// `x` rounded to the nearest value of a floating-point type; in e4m3, which has no infinities,
/// numbers saturate.
pub fn round(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(x).to_f32(),
        DType::BF16 => bf16::from_f32(x).to_f32(),
        DType::E4M3 => round_e4m3(x),
        _ => x,
    }
}

/// The nearest number of three fraction bits, from 2^-9 to 448; NaN for what is not finite.
fn round_e4m3(x: f32) -> f32 {
    if !x.is_finite() {
        return f32::NAN;
    }
    // Below 2^-6 numbers are 2^-9 apart.
    let exponent = ((x.to_bits() >> 23 & 0xff) as i32 - 127).max(-6);
    let step = 2f32.powi(exponent - 3);
    ((x / step).round_ties_even() * step).clamp(-448.0, 448.0)
}
