//! Reproducible inputs: the same seed gives the same values, whatever the number of threads.

use crate::io::{Array, Scalar};
use blockflash_ops::{E4M3, E5M2};
use blockflash_sys::DType;
use half::{bf16, f16};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;
use rayon::prelude::*;

/// Elements that one generator makes.
const PIECE: usize = 1 << 14;

/// Steps of i8 that stand for 1.
pub const I8_STEPS: f32 = 32.0;

/// An array of N(0, 1) values, of i8 times [`I8_STEPS`]. `lane` separates the tensors that are made
/// from one seed; `progress` is told how many elements are done, piece by piece.
///
/// # Errors
/// The number of bytes needed, if they cannot be had, or `u64::MAX` if it cannot be counted.
pub fn normal(
    dtype: DType,
    shape: &[usize],
    seed: u64,
    lane: u64,
    progress: impl Fn(u64) + Sync,
) -> Result<Array, u64> {
    let count = shape
        .iter()
        .try_fold(1usize, |product, &size| product.checked_mul(size))
        .ok_or(u64::MAX)?;
    let array = match dtype {
        DType::F16 => Array::new(shape, fill::<f16>(count, seed, lane, &progress)?),
        DType::BF16 => Array::new(shape, fill::<bf16>(count, seed, lane, &progress)?),
        DType::F32 => Array::new(shape, fill::<f32>(count, seed, lane, &progress)?),
        DType::I32 => Array::new(shape, fill::<i32>(count, seed, lane, &progress)?),
        DType::U8 => Array::new(shape, fill::<u8>(count, seed, lane, &progress)?),
        DType::E4M3 => Array::new(shape, fill::<E4M3>(count, seed, lane, &progress)?),
        DType::E5M2 => Array::new(shape, fill::<E5M2>(count, seed, lane, &progress)?),
        DType::I8 => Array::new(shape, fill::<i8>(count, seed, lane, &progress)?),
        _ => None,
    };
    array.ok_or(u64::MAX)
}

fn fill<T: Scalar>(
    count: usize,
    seed: u64,
    lane: u64,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Vec<T>, u64> {
    let mut values = Vec::<T>::new();
    values.try_reserve_exact(count).map_err(|_| count as u64 * size_of::<T>() as u64)?;
    values.resize(count, T::default());
    values.par_chunks_mut(PIECE).enumerate().for_each(|(piece, values)| {
        let mut generator = generator(seed, lane, piece as u64);
        let steps = if T::DTYPE == DType::I8 { I8_STEPS } else { 1.0 };
        let mut drawn = || steps * generator.sample::<f32, _>(StandardNormal);
        values.iter_mut().for_each(|value| *value = T::from_f32(drawn()));
        progress(values.len() as u64);
    });
    Ok(values)
}

/// N(0, 1) values.
pub fn normals(count: usize, seed: u64) -> Vec<f32> {
    let mut generator = generator(seed, 0, 0);
    (0..count).map(|_| generator.sample(StandardNormal)).collect()
}

/// Words of random bits.
pub fn words(count: usize, seed: u64) -> Vec<i32> {
    let mut words = vec![0i32; count];
    words.par_chunks_mut(PIECE).enumerate().for_each(|(piece, words)| {
        let mut generator = generator(seed, 0, piece as u64);
        words.iter_mut().for_each(|word| *word = generator.random());
    });
    words
}

/// `count` of `total` positions, each set equally likely, ascending. All of them if
/// `count >= total`.
pub fn choose(count: usize, total: usize, seed: u64, lane: u64) -> Vec<usize> {
    let mut chosen =
        rand::seq::index::sample(&mut generator(seed, lane, 0), total, count.min(total)).into_vec();
    chosen.sort_unstable();
    chosen
}

/// Puts values into a random order.
pub fn shuffle<T>(values: &mut [T], seed: u64) {
    use rand::seq::SliceRandom;
    // A lane of its own: no tensor has this many.
    values.shuffle(&mut generator(seed, u64::MAX, 0));
}

fn generator(seed: u64, lane: u64, piece: u64) -> SmallRng {
    // Odd multipliers keep the three numbers apart; `seed_from_u64` mixes the sum.
    let mixed = lane
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        .wrapping_add(piece.wrapping_mul(0xD1B5_4A32_D192_ED03));
    SmallRng::seed_from_u64(seed ^ mixed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_abs_diff_eq;

    #[test]
    fn normal_and_reproducible() {
        let draw = |seed, lane| normal(DType::F32, &[300, 1000], seed, lane, |_| ()).unwrap();
        let values = draw(1, 0).to_f32(0..300_000);
        let mean =
            |power: i32| values.iter().map(|value| f64::from(value.powi(power))).sum::<f64>() / 3e5;
        assert_abs_diff_eq!(mean(1), 0.0, epsilon = 0.01);
        assert_abs_diff_eq!(mean(2), 1.0, epsilon = 0.01);
        assert_abs_diff_eq!(mean(4), 3.0, epsilon = 0.1);
        assert_eq!(draw(1, 0), draw(1, 0));
        assert!(draw(1, 0) != draw(2, 0) && draw(1, 0) != draw(1, 1));
        assert_eq!(normal(DType::F16, &[usize::MAX, 2], 0, 0, |_| ()), Err(u64::MAX));
    }

    #[test]
    fn chosen_positions_are_ascending_and_unique() {
        let chosen = choose(100, 1000, 3, 0);
        assert_eq!(chosen.len(), 100);
        assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]) && chosen[99] < 1000);
        assert_eq!(choose(7, 3, 0, 0), [0, 1, 2]);
    }
}
