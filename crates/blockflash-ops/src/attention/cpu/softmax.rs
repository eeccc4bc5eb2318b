//! The running softmax of a panel: each lane is a row of queries.

use super::visible::Seen;
use crate::attention::ScoresProblem;
use crate::math;
use crate::panels::{LANES, Lanes};
use pulp::{Simd, WithSimd};

/// The running softmax of the rows of a panel.
#[derive(Clone)]
pub(super) struct Running {
    /// Largest score of each row, −∞ before the first.
    pub(super) max: Lanes,
    /// Sum of probabilities of each row, relative to `max`.
    pub(super) sum: Lanes,
}

impl Running {
    pub(super) const START: Self = Self { max: [f32::NEG_INFINITY; LANES], sum: [0.0; LANES] };
}

/// Turns scores, a row for each key, into probabilities relative to the new maxima. Masked pairs
/// become 0. The result is what earlier sums shrink by.
pub(super) struct Softmax<'a> {
    pub(super) s: &'a mut [Lanes],
    pub(super) running: &'a mut Running,
    pub(super) scores: &'a ScoresProblem,
    /// What the scores of each row are multiplied with, if they are not scaled yet.
    pub(super) factors: Option<&'a Lanes>,
    /// What is added to the scores.
    pub(super) terms: Option<&'a [Lanes]>,
    /// If some rows do not see some keys.
    pub(super) seen: Option<&'a Seen>,
}

impl WithSimd for Softmax<'_> {
    type Output = Lanes;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> Lanes {
        let Self { s, running, scores, factors, terms, seen } = self;
        if let Some(factors) = factors {
            for s in &mut *s {
                s.iter_mut().zip(factors).for_each(|(s, factor)| *s *= factor);
            }
        }
        scores.cap(s.as_flattened_mut());
        if let Some(terms) = terms {
            add(s.as_flattened_mut(), terms.as_flattened());
        }
        let mut max = running.max;
        if let Some(seen) = seen {
            seen.mask(s, f32::NEG_INFINITY);
        }
        for s in &*s {
            for lane in 0..LANES {
                // A comparison that NaN fails.
                max[lane] = if s[lane] > max[lane] { s[lane] } else { max[lane] };
            }
        }
        let mut shifts = [0.0; LANES];
        let mut shrink = [0.0; LANES];
        for lane in 0..LANES {
            shifts[lane] = shift(max[lane]);
            shrink[lane] = math::exp(running.max[lane] - shifts[lane]);
        }
        let mut sum = [0.0; LANES];
        for s in s {
            for lane in 0..LANES {
                s[lane] = math::exp(s[lane] - shifts[lane]);
                sum[lane] += s[lane];
            }
        }
        for lane in 0..LANES {
            running.max[lane] = max[lane];
            running.sum[lane] = running.sum[lane] * shrink[lane] + sum[lane];
        }
        shrink
    }
}

/// Turns the sums of a row into its output, and returns its log-sum-exp. One more score has no
/// value. Values are multiplied with a factor.
pub(super) fn finish([old, sum]: [f32; 2], score: f32, factor: f32, o: &mut [f32]) -> f32 {
    let max = if score > old { score } else { old };
    let shift = shift(max);
    let shrink = math::exp(old - shift);
    let total = sum * shrink + math::exp(score - shift);
    if total == 0.0 {
        // No key was attended, or only keys with a score of −∞, whose NaN stays.
        o.iter_mut().for_each(|o| *o *= 0.0);
        return f32::NEG_INFINITY;
    }
    // The same where the sum has more than keys: 0 for any factor.
    let factor = if sum == 0.0 { 1.0 } else { factor };
    o.iter_mut().for_each(|o| *o = *o * shrink / total * factor);
    shift + total.ln()
}

/// Adds what is added to scores.
#[inline(always)]
pub(super) fn add(s: &mut [f32], terms: &[f32]) {
    s.iter_mut().zip(terms).for_each(|(s, term)| *s += term);
}

/// The shift of scores: their maximum, or 0 while it is −∞, since −∞ − (−∞) is NaN.
#[inline(always)]
pub(super) fn shift(max: f32) -> f32 {
    if max == f32::NEG_INFINITY { 0.0 } else { max }
}
