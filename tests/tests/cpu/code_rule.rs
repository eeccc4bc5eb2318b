//! The rule of the suites accepts attention over codes as kernels compute it, and refuses it with a
//! mistake.

use blockflash_ops::DType;
use blockflash_oracle::round;
use blockflash_tests::attention::{
    AttentionCase, AttentionData, AttentionReference, Codes, MoreContent, OperandScale,
};
use blockflash_tests::tolerance::check;

/// Keys of a tile.
const TILE: usize = 64;
const KEYS: usize = 4096;
const D: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    None,
    /// Sums over all keys stay in the tensor core.
    NoPromotion,
    /// The key tile in the middle is left out.
    LostTile,
    /// Probabilities are not scaled before they are rounded, so that small ones vanish.
    NoUnit,
    /// They are rounded to one fraction bit.
    Coarse,
    /// The scale of the values is left out.
    NoScale,
}

/// A sum as a tensor core has it after 32 more products: what is below 13 bits is cut off.
fn add(sum: f32, products: &[f32]) -> f32 {
    let largest = products.iter().fold(sum.abs(), |largest, x| largest.max(x.abs()));
    if largest == 0.0 {
        return 0.0;
    }
    let step = 2f64.powi(f64::from(largest).log2().floor() as i32 - 13);
    let cut = |x: f32| (f64::from(x) / step).trunc() * step;
    (products.iter().map(|&x| cut(x)).sum::<f64>() + cut(sum)) as f32
}

fn row(data: &AttentionData, scales: [f32; 3], query: usize, mistake: Mistake) -> Vec<f64> {
    let [of_q, of_k, of_v] = scales;
    let factor = (1.0 / (D as f64).sqrt()) as f32 * of_q * of_k;
    let q = &data.q[query * D..][..D];
    let score = |key: usize| {
        let products: Vec<f32> = q.iter().zip(&data.k[key * D..]).map(|(q, k)| q * k).collect();
        products.chunks(32).fold(0.0, add) * factor
    };
    let scores: Vec<f32> = (0..KEYS).map(score).collect();
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let unit = if mistake == Mistake::NoUnit { 1.0 } else { 256.0 };
    let (mut total, mut o, mut within) = (0f32, vec![0f32; D], vec![0f32; D]);
    for (tile, scores) in scores.chunks(TILE).enumerate() {
        let of_tile = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let whole = mistake == Mistake::NoPromotion;
        let reference = if whole { largest } else { of_tile };
        let weight = (reference - largest).exp();
        total += scores.iter().map(|x| (x - largest).exp()).sum::<f32>();
        if mistake == Mistake::LostTile && tile == KEYS / TILE / 2 {
            continue;
        }
        let rounded = |x: &f32| {
            let p = (x - reference).exp() * unit;
            let coarse = f32::from_bits((p.to_bits() + (1 << 21)) & !((1 << 22) - 1));
            if mistake == Mistake::Coarse { coarse } else { round(DType::E4M3, p) }
        };
        let p: Vec<f32> = scores.iter().map(rounded).collect();
        for column in 0..D {
            let value = |key: usize| data.v[(tile * TILE + key) * D + column];
            let products: Vec<f32> = p.iter().enumerate().map(|(i, p)| p * value(i)).collect();
            let before = if whole { within[column] } else { 0.0 };
            within[column] = products.chunks(32).fold(before, add);
            if !whole {
                o[column] += within[column] * weight / unit;
            }
        }
    }
    if mistake == Mistake::NoPromotion {
        o = within.iter().map(|x| x / unit).collect();
    }
    let of_v = if mistake == Mistake::NoScale { 1.0 } else { of_v };
    o.iter().map(|x| f64::from(round(DType::BF16, x * of_v / total))).collect()
}

fn verdict(more: MoreContent, mistake: Mistake) -> Result<(), String> {
    // Sinks are as strong as they are said to be without a scale.
    let sinks = more == MoreContent::Sinks;
    let scales = [if sinks { OperandScale::Absent } else { OperandScale::Whole }; 3];
    let codes = Codes { more, scales, ..Codes::plain(TILE) };
    let case = AttentionCase::simple(DType::BF16, (1, 1), D, (6, KEYS)).coded(codes);
    let data = AttentionData::generate(&case);
    let reference = AttentionReference::compute(&case, &data, f64::INFINITY);
    let scales = [0, 1, 2].map(|which| case.scales(which).map_or(1.0, |(_, values)| values[0]));
    let got: Vec<f64> =
        reference.rows.iter().flat_map(|&[_, i, _]| row(&data, scales, i, mistake)).collect();
    check(&got, &reference.o, &reference.rounding(&case), |at| format!("element {at}"))
}

#[test]
fn what_kernels_compute_is_accepted() {
    for more in MoreContent::ALL {
        verdict(more, Mistake::None).unwrap_or_else(|error| panic!("{more:?}: {error}"));
    }
}

#[test]
fn mistakes_are_refused() {
    for (more, mistake) in [
        (MoreContent::MeanInValues, Mistake::NoPromotion),
        (MoreContent::MeanInValues, Mistake::LostTile),
        (MoreContent::Nothing, Mistake::LostTile),
        (MoreContent::Nothing, Mistake::NoScale),
        (MoreContent::MeanInValues, Mistake::NoScale),
        (MoreContent::Sinks, Mistake::NoUnit),
        (MoreContent::Nothing, Mistake::Coarse),
    ] {
        let error = verdict(more, mistake);
        assert!(error.is_err(), "{more:?}, {mistake:?}");
    }
}
