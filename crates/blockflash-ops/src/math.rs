//! Elementary functions over rows of f32, written so that the compiler vectorises them.
//!
//! Polynomials are Chebyshev interpolants of the function named beside them, in single precision as
//! good as correctly rounded coefficients allow.

/// Elements that are reduced side by side; a multiple of every vector width.
const LANES: usize = 16;

/// `e^x` for `x` up to 88, within 2 ulp; 0 below −87 (what follows is denormal), NaN for NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Adding 1.5·2²³ leaves round(x·log2 e) in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts: multiples of the first by up to 2⁸ are exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    // (e^r - 1 - r) / r² on ±ln 2 / 2.
    let mut tail = 0.001_392_618_3f32;
    tail = tail * r + 0.008_363_18;
    tail = tail * r + 0.041_666_554;
    tail = tail * r + 0.166_665_77;
    tail = tail * r + 0.5;
    let fraction = 1.0 + (r + r * r * tail);
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1f32.to_bits()));
    // A comparison that NaN fails.
    if x < -87.0 { 0.0 } else { fraction * power }
}

/// `e^x`; infinite beyond 88, where a log-sum-exp does not belong to its scores.
#[inline(always)]
pub(crate) fn probability(x: f32) -> f32 {
    let p = exp(x);
    if x > 88.0 { f32::INFINITY } else { p }
}

/// `tanh x` within 3 ulp; NaN for NaN.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    tanh_and_slope(x)[0]
}

/// [`tanh`] and its slope `1 - tanh² x`, whose digits do not cancel where tanh is close to ±1.
#[inline(always)]
pub(crate) fn tanh_and_slope(x: f32) -> [f32; 2] {
    let magnitude = x.abs();
    let square = x * x;
    // (tanh x / x - 1) / x² in x², on 0 to 0.625.
    let mut tail = 0.002_292_744_9f32;
    tail = tail * square - 0.008_343_946;
    tail = tail * square + 0.021_768_918;
    tail = tail * square - 0.053_959_26;
    tail = tail * square + 0.133_333_04;
    tail = tail * square - 0.333_333_34;
    let near = x + x * square * tail;
    // The exponential must not overflow. Beyond 10 the result is ±1, and beyond 40 the slope is 0
    // in every sum.
    let bounded = if magnitude > 40.0 { 40.0 } else { magnitude };
    let missing = 2.0 / (exp(2.0 * bounded) + 1.0);
    let far = (1.0 - missing).copysign(x);
    if magnitude > 0.625 { [far, missing * (2.0 - missing)] } else { [near, 1.0 - near * near] }
}

/// The largest element that is not NaN; −∞ when there is none.
#[inline(always)]
pub(crate) fn max(row: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, x);
        }
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, larger)
}

/// Replaces each x by `e^(x - shift)` and returns the sum. No x is greater than the shift.
#[inline(always)]
pub(crate) fn exp_sum(row: &mut [f32], shift: f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let mut chunks = row.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *x = exp(*x - shift);
            *lane += *x;
        }
    }
    let mut rest = 0.0;
    for x in chunks.into_remainder() {
        *x = exp(*x - shift);
        rest += *x;
    }
    lanes.iter().sum::<f32>() + rest
}

/// The sum of products of two equally long slices.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum::<f32>();
    for (a, b) in a.zip(b) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += a * b;
        }
    }
    lanes.iter().sum::<f32>() + rest
}

/// Whether an element is NaN or infinite.
#[inline(always)]
pub(crate) fn any_non_finite(row: &[f32]) -> bool {
    // Without an early exit: this vectorises.
    row.iter().fold(false, |found, x| found | !x.is_finite())
}

/// `x·Φ(x)`, Φ the standard normal distribution.
pub(crate) fn gelu(x: f32) -> f32 {
    // In f64, so that the tail of Φ keeps its relative precision in f32.
    let x = f64::from(x);
    (0.5 * x * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)) as f32
}

/// `x / (1 + e^-x)`.
pub(crate) fn silu(x: f32) -> f32 {
    let x = f64::from(x);
    (x / (1.0 + (-x).exp())) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Difference in units of the last place of the true value.
    fn ulps(found: f32, expected: f64) -> f64 {
        let ulp = f64::from((expected as f32).abs().next_up() - (expected as f32).abs());
        (f64::from(found) - expected).abs() / ulp
    }

    #[test]
    fn exp_is_precise() {
        let worst = (0..=870_000)
            .map(|i| i as f32 * -1e-4)
            .map(|x| ulps(exp(x), f64::from(x).exp()))
            .fold(0.0, f64::max);
        assert!(worst <= 2.0, "{worst}");
        assert_eq!((exp(0.0), exp(-0.0)), (1.0, 1.0));
        assert_eq!((exp(-87.5), exp(-1e30), exp(f32::NEG_INFINITY)), (0.0, 0.0, 0.0));
        assert!(exp(f32::NAN).is_nan());
        assert!(ulps(exp(20.0), 20f64.exp()) <= 2.0);
    }

    #[test]
    fn probabilities_beyond_one_are_infinite() {
        assert_eq!((probability(0.0), probability(-88.0)), (1.0, 0.0));
        assert_eq!((probability(88.5), probability(f32::MAX)), (f32::INFINITY, f32::INFINITY));
        assert_eq!(probability(f32::INFINITY), f32::INFINITY);
        assert!(probability(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_is_precise() {
        let worst = (-120_000..=120_000)
            .map(|i| i as f32 * 1e-4)
            .filter(|&x| x != 0.0)
            .map(|x| ulps(tanh(x), f64::from(x).tanh()))
            .fold(0.0, f64::max);
        assert!(worst <= 3.0, "{worst}");
        assert_eq!((tanh(0.0), tanh(f32::INFINITY), tanh(-1e30)), (0.0, 1.0, -1.0));
        assert!(tanh(f32::NAN).is_nan());
        assert!(ulps(tanh(1e-20), 1e-20f64.tanh()) <= 1.0);
    }

    #[test]
    fn the_slope_of_tanh_is_precise() {
        for x in (0..2000).map(|i| i as f32 / 50.0) {
            let exact = f64::from(x).cosh().powi(-2);
            let [_, slope] = tanh_and_slope(-x);
            assert!((f64::from(slope) / exact - 1.0).abs() < 1e-6, "{x}");
        }
        assert!(tanh_and_slope(f32::INFINITY)[1] < 1e-30);
    }

    #[test]
    fn rows_of_every_length() {
        for length in 0..70 {
            let row: Vec<f32> = (0..length).map(|i| ((i * 37) % 23) as f32 - 11.5).collect();
            let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(max(&row), largest);
            let squares: f32 = row.iter().map(|x| x * x).sum();
            assert_eq!(dot(&row, &row), squares, "multiples of 1/4 are summed exactly");
            let mut exps = row.clone();
            let sum = f64::from(exp_sum(&mut exps, 12.0));
            let expected: f64 = row.iter().map(|&x| f64::from(x - 12.0).exp()).sum();
            let close = approx::abs_diff_eq!(sum, expected, epsilon = 1e-6 * expected);
            assert!(close, "{length}");
            for (x, e) in row.iter().zip(&exps) {
                assert!(ulps(*e, f64::from(x - 12.0).exp()) <= 2.0);
            }
        }
    }

    #[test]
    fn nan_is_no_maximum_and_stays() {
        let mut row = vec![f32::NAN; 40];
        assert_eq!(max(&row), f32::NEG_INFINITY);
        row[33] = 2.0;
        assert_eq!(max(&row), 2.0);
        assert!(exp_sum(&mut row, 2.0).is_nan());
        assert_eq!(row[33], 1.0);
        assert!(row[0].is_nan() && any_non_finite(&row) && !any_non_finite(&[0.0; 20]));
        assert!(any_non_finite(&[0.0, f32::NEG_INFINITY]));
    }

    #[test]
    fn activations() {
        // Reference values with 20 digits.
        for (x, expected) in [
            (0.0, 0.0),
            (1.0, 0.841_344_746_068_542_9),
            (-1.0, -0.158_655_253_931_457_05),
            (-5.0, -1.433_257_859_621_196_5e-6),
            (9.0, 9.0),
        ] {
            assert!(ulps(gelu(x), expected) <= 1.0, "gelu({x}) = {}", gelu(x));
        }
        assert!(ulps(silu(1.0), 0.731_058_578_630_004_9) <= 1.0);
        assert!(ulps(silu(-3.0), -0.142_277_619_753_130_3) <= 1.0);
        for extreme in [-1e30f32, -200.0] {
            assert_eq!((gelu(extreme), silu(extreme)), (0.0, 0.0));
        }
        assert_eq!((gelu(f32::INFINITY), silu(f32::INFINITY)), (f32::INFINITY, f32::INFINITY));
        assert!(gelu(f32::NAN).is_nan() && silu(f32::NAN).is_nan());
    }
}
