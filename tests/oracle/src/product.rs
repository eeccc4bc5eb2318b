//! Sums of products, and what follows them.

use crate::elements::{Element, round};
use crate::rounding::{PRODUCTS, PartialSums, ProductSum};
use blockflash_sys::DType;

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
    /// The function in f64.
    pub fn apply(self, x: f64) -> f64 {
        match self {
            Activation::None => x,
            // Not `max`, which would drop NaN.
            Activation::Relu if x < 0.0 => 0.0,
            Activation::Relu => x,
            Activation::Gelu => x * 0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2),
            Activation::Silu => x / (1.0 + (-x).exp()),
        }
    }

    fn apply_f32(self, x: f32) -> f32 {
        match self {
            Activation::None => x,
            Activation::Relu if x < 0.0 => 0.0,
            Activation::Relu => x,
            Activation::Gelu => x * 0.5 * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2)),
            Activation::Silu => x / (1.0 + (-x).exp()),
        }
    }
}

/// What follows a sum: `activation(alpha · sum + beta · old + bias)`, rounded to `output`.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue {
    /// Factor of the sum.
    pub alpha: f32,
    /// Factor of what was there; with 0 it does not matter, even if it is NaN.
    pub beta: f32,
    /// Applied last.
    pub activation: Activation,
    /// Type of the result.
    pub output: DType,
}

/// A sum of products, exactly and plainly.
#[derive(Clone, Copy, Debug, Default)]
pub struct Dot {
    sum: ProductSum,
    partial: PartialSums,
    plain: f32,
}

impl Dot {
    /// The sum of the products of two equally long slices.
    pub fn of(a: &[f32], b: &[f32]) -> Self {
        let mut dot = Self::default();
        for (a, b) in a.chunks(PRODUCTS).zip(b.chunks(PRODUCTS)) {
            for (&a, &b) in a.iter().zip(b) {
                dot.sum.add(f64::from(a) * f64::from(b));
                dot.plain += a * b;
            }
            dot.partial.settle(dot.sum);
        }
        dot
    }

    /// The result for a sum, with the value that was there and the bias.
    pub fn finish(&self, epilogue: &Epilogue, old: f32, bias: f32) -> Element {
        let Epilogue { alpha, beta, activation, output } = *epilogue;
        let old = if beta == 0.0 { 0.0 } else { old };
        let plain = activation.apply_f32(alpha * self.plain + beta * old + bias);
        let (alpha, bias) = (f64::from(alpha), f64::from(bias));
        let added = f64::from(beta) * f64::from(old);
        let squares = alpha * alpha * self.sum.squares + added * added + bias * bias;
        Element {
            exact: activation.apply(alpha * self.sum.sum + added + bias),
            plain: f64::from(round(output, plain)),
            magnitude: squares.sqrt(),
            partial: alpha.abs() * self.partial.mean(),
        }
    }
}

/// A row of sums, to which rows of a matrix are added, each with a factor.
#[derive(Clone, Debug)]
pub struct ProductRow {
    sums: Vec<ProductSum>,
    partials: Vec<PartialSums>,
    plain: Vec<f32>,
}

impl ProductRow {
    /// Zeros.
    pub fn new(width: usize) -> Self {
        Self {
            sums: vec![ProductSum::default(); width],
            partials: vec![PartialSums::default(); width],
            plain: vec![0.0; width],
        }
    }

    /// Adds `a[i] · row(i)` for each factor; tensor cores add [`PRODUCTS`] at once.
    pub fn add<'b>(&mut self, a: &[f32], row: impl Fn(usize) -> &'b [f32]) {
        let Self { sums, partials, plain } = self;
        for (step, a) in a.chunks(PRODUCTS).enumerate() {
            for (inner, &a) in a.iter().enumerate() {
                let row = row(step * PRODUCTS + inner);
                for ((sum, plain), &b) in sums.iter_mut().zip(plain.iter_mut()).zip(row) {
                    sum.add(f64::from(a) * f64::from(b));
                    *plain += a * b;
                }
            }
            partials.iter_mut().zip(&*sums).for_each(|(partial, &sum)| partial.settle(sum));
        }
    }

    /// The sums.
    pub fn dots(&self) -> impl Iterator<Item = Dot> {
        let sums = self.sums.iter().zip(&self.partials).zip(&self.plain);
        sums.map(|((&sum, &partial), &plain)| Dot { sum, partial, plain })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_by_known_values() {
        assert_eq!(Activation::Relu.apply(-2.0), 0.0);
        assert!(Activation::Relu.apply(f64::NAN).is_nan());
        assert!((Activation::Gelu.apply(1.0) - 0.841_344_746_068_542_9).abs() < 1e-15);
        assert!((Activation::Gelu.apply(-6.0) + 6.0 * 9.865_876_450_376_946e-10).abs() < 1e-20);
        assert!((Activation::Silu.apply(1.0) - 0.731_058_578_630_004_9).abs() < 1e-15);
        for activation in [Activation::None, Activation::Relu, Activation::Gelu, Activation::Silu] {
            for x in [-3.0f32, -0.5, 0.0, 0.7, 4.0] {
                let difference =
                    f64::from(activation.apply_f32(x)) - activation.apply(f64::from(x));
                assert!(difference.abs() < 1e-6, "{activation:?} {x}");
            }
        }
    }
}
