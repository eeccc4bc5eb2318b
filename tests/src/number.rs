//! Bits and rounding of the 16-bit types, and normal random numbers.

use blockflash_ops::E4M3;
pub use blockflash_oracle::{round, unit_roundoff};
use blockflash_sys::DType;
use half::{bf16, f16};
use rand::{Rng, SeedableRng, rngs::StdRng};
use rand_distr::StandardNormal;
use rayon::prelude::*;

/// Every byte of a poisoned buffer: as f16, bf16 and f32 this is a NaN that no computation
/// produces.
pub const POISON: u8 = 0xFF;
/// The bits of a poisoned element.
pub fn poison(dtype: DType) -> u32 {
    u32::MAX >> (32 - 8 * dtype.size())
}

/// The bits of `x` rounded to nearest in a floating-point type.
pub fn encode(dtype: DType, x: f32) -> u32 {
    match dtype {
        DType::F16 => f16::from_f32(x).to_bits().into(),
        DType::BF16 => bf16::from_f32(x).to_bits().into(),
        DType::F32 => x.to_bits(),
        DType::E4M3 => E4M3::from_f32(x).0.into(),
        _ => panic!("{dtype} tensors hold no real numbers"),
    }
}

/// The value of the bits of a floating-point type, exact in f32.
pub fn decode(dtype: DType, bits: u32) -> f32 {
    match dtype {
        DType::F16 => f16::from_bits(bits as u16).to_f32(),
        DType::BF16 => bf16::from_bits(bits as u16).to_f32(),
        DType::F32 => f32::from_bits(bits),
        DType::E4M3 => E4M3(bits as u8).to_f32(),
        _ => panic!("{dtype} tensors hold no real numbers"),
    }
}

/// Rounds a slice in place.
pub fn round_all(dtype: DType, values: &mut [f32]) {
    values.iter_mut().for_each(|x| *x = round(dtype, *x));
}

/// `n` independent N(0,1) numbers. The same seed gives the same numbers on every machine.
pub fn normal(seed: u64, n: usize) -> Vec<f32> {
    const CHUNK: usize = 1 << 14;
    let mut values = vec![0f32; n];
    values.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, values)| {
        let mut rng =
            StdRng::seed_from_u64(seed ^ (chunk as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        values.iter_mut().for_each(|x| *x = rng.sample(StandardNormal));
    });
    values
}

/// `n` independent N(0,1) numbers, rounded to `dtype`.
pub fn normal_rounded(seed: u64, n: usize, dtype: DType) -> Vec<f32> {
    let mut values = normal(seed, n);
    values.par_chunks_mut(1 << 14).for_each(|chunk| round_all(dtype, chunk));
    values
}

/// A generator for choices that are not data (positions, permutations).
pub fn rng(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed ^ 0x5EED_5EED_5EED_5EED)
}
