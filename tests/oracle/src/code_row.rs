//! The plain computation of one row of attention over e4m3 codes, as tensor cores of Hopper do it.
//!
//! Products of codes are exact. A tensor core aligns 32 of them and the sum so far to the largest
//! exponent among them, cuts off what is below 13 fraction bits, and adds (DeepSeek-V3, report of
//! 2024, section 3.5.2; Khattak and Mikaitis, arXiv:2512.07004). Sums of products with values are
//! therefore taken for one tile of keys and added in f32. Probabilities are relative to the maximum
//! of their tile, times 2^8, and rounded to e4m3: below 2^-6 it has steps of 2^-9, so what is
//! smaller than 2^-10, 2^-18 of the maximum, vanishes. Their sum is that of unrounded ones.

use crate::elements::round;
use crate::scores::{Added, Scores};
use blockflash_sys::DType;

/// What codes stand for, and how keys are divided.
#[derive(Clone, Copy, Debug)]
pub struct CodeRow {
    /// What scores are multiplied with beside their factor: the scale of the query times that of
    /// the keys.
    pub of_scores: f32,
    /// The scale of the values.
    pub of_values: f32,
    /// Keys of a tile.
    pub tile: usize,
}

/// Products that a tensor core adds to a sum at once.
pub const CODE_PRODUCTS: usize = 32;
/// Bits of a fraction behind the largest exponent that count in such an addition.
const FRACTION_BITS: i32 = 13;
/// Probabilities are multiplied with this before they are rounded.
const UNIT: f32 = 256.0;

/// Adds the products of factors and rows to sums, 32 at a time, as tensor cores do for each column.
fn add_rows(sums: &mut [f32], factors: &[f32], rows: &[&[f32]]) {
    let width = sums.len();
    let [mut largest, mut plain] = [(); 2].map(|()| vec![0f32; width]);
    let (mut steps, mut total) = (vec![0f64; width], vec![0i32; width]);
    for (factors, rows) in factors.chunks(CODE_PRODUCTS).zip(rows.chunks(CODE_PRODUCTS)) {
        // Loops over columns, which become vector instructions.
        for ((largest, plain), sum) in largest.iter_mut().zip(&mut plain).zip(&*sums) {
            (*largest, *plain) = (sum.abs(), *sum);
        }
        for (factor, row) in factors.iter().zip(rows) {
            for ((largest, plain), x) in largest.iter_mut().zip(&mut plain).zip(*row) {
                *largest = largest.max((factor * x).abs());
                *plain += factor * x;
            }
        }
        for (((steps, total), largest), sum) in
            steps.iter_mut().zip(&mut total).zip(&largest).zip(&*sums)
        {
            *steps = 2f64.powi(FRACTION_BITS - exponent(*largest));
            *total = cut(*sum, *steps);
        }
        for (factor, row) in factors.iter().zip(rows) {
            for ((total, steps), x) in total.iter_mut().zip(&steps).zip(*row) {
                *total += cut(factor * x, *steps);
            }
        }
        for (((sum, total), steps), plain) in sums.iter_mut().zip(&total).zip(&steps).zip(&plain) {
            // What is not finite is what it is without rounding.
            let rounded = (f64::from(*total) / steps) as f32;
            *sum = if plain.is_finite() { rounded } else { *plain };
        }
    }
}

/// The product of two rows.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sum = 0f32;
    for (a, b) in a.chunks(CODE_PRODUCTS).zip(b.chunks(CODE_PRODUCTS)) {
        let mut products = [0f32; CODE_PRODUCTS];
        products.iter_mut().zip(a).zip(b).for_each(|((x, a), b)| *x = a * b);
        let largest = products.iter().fold(sum.abs(), |largest, x| largest.max(x.abs()));
        let plain = sum + products.iter().sum::<f32>();
        if !plain.is_finite() {
            return plain;
        }
        let steps = 2f64.powi(FRACTION_BITS - exponent(largest));
        let total = products.iter().map(|&x| cut(x, steps)).sum::<i32>() + cut(sum, steps);
        sum = (f64::from(total) / steps) as f32;
    }
    sum
}

/// A number in steps, towards zero: at most 2^14 of them.
fn cut(x: f32, steps: f64) -> i32 {
    (f64::from(x) * steps) as i32
}

/// The exponent of the leading bit.
fn exponent(x: f32) -> i32 {
    let biased = (x.to_bits() >> 23 & 0xff) as i32;
    biased.max(1) - 127
}

/// The output before it is rounded, and the log-sum-exp. `alone` joins the sum and has no value.
#[expect(clippy::too_many_arguments, reason = "those of a row, and what a row knows already")]
pub(crate) fn plain_of_codes<'a>(
    codes: CodeRow,
    scores: Scores,
    alone: Option<f32>,
    query: &[f32],
    width: usize,
    keys: &[usize],
    row: impl Fn(usize) -> [&'a [f32]; 2],
    added: impl Fn(usize) -> Added,
) -> (Vec<f32>, f32) {
    let factor = scores.scale * codes.of_scores;
    let score = |&at: &usize| scores.plain(dot(query, row(at)[0]) * factor, added(at))[0];
    let of_keys: Vec<f32> = keys.iter().map(score).collect();
    let max = of_keys.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // Keys without a part in the sum: -inf minus -inf is NaN.
    let shift = |max: f32| if max == f32::NEG_INFINITY { 0.0 } else { max };
    let of_all = alone.map_or(max, |alone| max.max(alone));
    let reference = shift(of_all);
    let (mut total, mut o) = (alone.map_or(0.0, |x| (x - reference).exp()), vec![0f32; width]);
    let mut within = vec![0f32; width];
    let (mut at, tile_of) = (0, |at: usize| keys[at] / codes.tile.max(1));
    while at < keys.len() {
        let end = (at..keys.len()).find(|&other| tile_of(other) != tile_of(at));
        let tile = at..end.unwrap_or(keys.len());
        let of_tile = &of_keys[tile.clone()];
        let max = shift(of_tile.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let weight = (max - reference).exp();
        total += of_tile.iter().map(|score| (score - max).exp()).sum::<f32>() * weight;
        let rounded = |score: &f32| round(DType::E4M3, (score - max).exp() * UNIT);
        let p: Vec<f32> = of_tile.iter().map(rounded).collect();
        let values: Vec<&[f32]> = keys[tile.clone()].iter().map(|&key| row(key)[1]).collect();
        within.fill(0.0);
        add_rows(&mut within, &p, &values);
        o.iter_mut().zip(&within).for_each(|(o, within)| *o += within * (weight / UNIT));
        at = tile.end;
    }
    let normalised = if total == 0.0 { 0.0 } else { codes.of_values / total };
    o.iter_mut().for_each(|x| *x *= normalised);
    (o, reference + total.ln())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sum by both ways.
    fn sum(terms: &[f32]) -> f32 {
        let of_rows = |rows: &[&[f32]]| {
            let mut sums = [0.0];
            add_rows(&mut sums, &vec![1.0; terms.len()], rows);
            sums[0]
        };
        let found = of_rows(&terms.iter().map(std::slice::from_ref).collect::<Vec<_>>());
        let dot = dot(terms, &vec![1.0; terms.len()]);
        assert!(found.to_bits() == dot.to_bits() || found.is_nan() && dot.is_nan());
        found
    }

    #[test]
    fn additions_keep_13_bits_behind_the_largest_exponent() {
        let small = 2f32.powi(-13);
        assert_eq!(sum(&[1.0, small]), 1.0 + small);
        assert_eq!(sum(&[1.0, small / 2.0, small / 2.0]), 1.0);
        assert_eq!(sum(&[-1.0, -1.5 * small]), -1.0 - small);
        // Whatever is small counts where it is alone.
        let mut alone = vec![small / 2.0; 32];
        alone.push(1.0);
        assert_eq!(sum(&alone), 1.0 + 16.0 * small);
        assert!(sum(&[1.0, f32::NAN]).is_nan());
        assert_eq!([sum(&[]), sum(&[0.0; 40])], [0.0; 2]);
        assert_eq!(sum(&[448.0 * 448.0; 256]), 256.0 * 448.0 * 448.0);
        assert_eq!([1.0, 1.99, 448.0, 0.0].map(exponent), [0, 0, 8, -126]);
    }

    #[test]
    fn sums_of_many_lose_what_tiles_keep() {
        // 8192 times a weight of 1 and a value of 1.125: the sum stays behind.
        let terms = vec![1.125f32 * 0.9375; 8192];
        let whole = f64::from(sum(&terms));
        let tiles: f64 = (0..64).map(|_| f64::from(sum(&terms[..128]))).sum();
        let exact = 8192.0 * 1.125 * 0.9375;
        assert!((tiles / exact - 1.0).abs() < 1e-3, "{tiles} {exact}");
        assert!((whole / exact - 1.0).abs() > 1e-2, "{whole} {exact}");
    }

    #[test]
    fn a_row_of_equal_scores_is_the_mean_of_the_values() {
        let (query, key) = (vec![0f32; 16], vec![1f32; 16]);
        let values: Vec<[f32; 2]> = (0..200).map(|i| [2.0, (i % 2) as f32]).collect();
        let keys: Vec<usize> = (0..200).collect();
        let codes = CodeRow { of_scores: 3.0, of_values: 0.5, tile: 64 };
        let row = |at: usize| [&key[..], &values[at][..]];
        let scores = Scores::new(0.25, None);
        let (o, lse) =
            plain_of_codes(codes, scores, None, &query, 2, &keys, row, |_| Added::default());
        assert_eq!(o, [1.0, 0.25]);
        assert!((lse - 200f32.ln()).abs() < 1e-6);
    }
}
