//! The floating-point element types of the CPU backends: everything is computed in f32 panels.

use crate::panels::vectorized;
use blockflash_safe::{E4M3, E5M2, Element};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use pulp::{Simd, WithSimd};

/// An element type that converts to and from f32.
pub(crate) trait Float: Element {
    /// Converts a slice; both have the same length. Inlined into code that is
    /// [`vectorized`](crate::panels::vectorized).
    fn widen_inline(source: &[Self], target: &mut [f32]);

    /// Converts a slice; both have the same length.
    fn widen(source: &[Self], target: &mut [f32]) {
        vectorized(Widen(source, target));
    }

    /// Rounds a slice to nearest, ties to even; both have the same length.
    fn narrow(source: &[f32], target: &mut [Self]);

    /// The elements themselves if they are f32.
    fn as_f32(_source: &[Self]) -> Option<&[f32]> {
        None
    }

    /// Whether this is 0 or −0.
    fn is_zero(&self) -> bool;
}

struct Widen<'a, T>(&'a [T], &'a mut [f32]);

impl<T: Float> WithSimd for Widen<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        T::widen_inline(self.0, self.1);
    }
}

impl Float for f16 {
    #[inline(always)]
    fn widen_inline(source: &[Self], target: &mut [f32]) {
        assert_eq!(source.len(), target.len(), "conversions keep the length");
        for (target, source) in target.iter_mut().zip(source) {
            *target = widened(*source);
        }
    }

    fn narrow(source: &[f32], target: &mut [Self]) {
        target.convert_from_f32_slice(source);
    }

    fn is_zero(&self) -> bool {
        self.to_bits() << 1 == 0
    }
}

/// `f16::to_f32` without branches, which vectorises.
#[inline(always)]
fn widened(x: f16) -> f32 {
    const INFINITE: u32 = 0x7c00;
    let magnitude = u32::from(x.to_bits() & 0x7fff);
    let sign = u32::from(x.to_bits() & 0x8000) << 16;
    // The exponent is biased by 127 in place of 15.
    let normal = (magnitude << 13) + (112 << 23);
    // Multiples of 2⁻²⁴.
    let denormal = (magnitude as i32 as f32 * (1.0 / 16_777_216.0)).to_bits();
    let infinite = f32::INFINITY.to_bits() | magnitude << 13;
    let quiet = if magnitude > INFINITE { 1 << 22 } else { 0 };
    let bits = if magnitude < 0x0400 { denormal } else { normal };
    f32::from_bits(sign | if magnitude >= INFINITE { infinite | quiet } else { bits })
}

impl Float for bf16 {
    #[inline(always)]
    fn widen_inline(source: &[Self], target: &mut [f32]) {
        assert_eq!(source.len(), target.len(), "conversions keep the length");
        // bf16 is the upper half of f32; this plain loop vectorises.
        for (target, source) in target.iter_mut().zip(source) {
            *target = f32::from_bits(u32::from(source.to_bits()) << 16);
        }
    }

    fn narrow(source: &[f32], target: &mut [Self]) {
        vectorized(Narrow(source, target));
    }

    fn is_zero(&self) -> bool {
        self.to_bits() << 1 == 0
    }
}

struct Narrow<'a>(&'a [f32], &'a mut [bf16]);

impl WithSimd for Narrow<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self(source, target) = self;
        assert_eq!(source.len(), target.len(), "conversions keep the length");
        for (target, source) in target.iter_mut().zip(source) {
            let bits = source.to_bits();
            // To nearest, ties to even; a NaN must not become an infinity.
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            let nan = bits >> 16 | 0x40;
            *target = bf16::from_bits(if source.is_nan() { nan } else { rounded } as u16);
        }
    }
}

impl Float for f32 {
    #[inline(always)]
    fn widen_inline(source: &[Self], target: &mut [f32]) {
        target.copy_from_slice(source);
    }

    fn narrow(source: &[f32], target: &mut [Self]) {
        target.copy_from_slice(source);
    }

    fn as_f32(source: &[Self]) -> Option<&[f32]> {
        Some(source)
    }

    fn is_zero(&self) -> bool {
        *self == 0.0
    }
}

/// Rounds each element by a function.
struct NarrowTo<'a, T, F>(&'a [f32], &'a mut [T], F);

impl<T, F: Fn(f32) -> T> WithSimd for NarrowTo<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self(source, target, round) = self;
        assert_eq!(source.len(), target.len(), "conversions keep the length");
        target.iter_mut().zip(source).for_each(|(target, &x)| *target = round(x));
    }
}

/// Codes: numbers beyond the greatest one become that.
macro_rules! codes {
    ($($name:ty => $widen:expr, $narrow:expr, $is_zero:expr;)*) => {$(
        impl Float for $name {
            #[inline(always)]
            fn widen_inline(source: &[Self], target: &mut [f32]) {
                assert_eq!(source.len(), target.len(), "conversions keep the length");
                target.iter_mut().zip(source).for_each(|(target, &code)| *target = $widen(code));
            }

            fn narrow(source: &[f32], target: &mut [Self]) {
                vectorized(NarrowTo(source, target, |x| $narrow(x)));
            }

            fn is_zero(&self) -> bool {
                $is_zero(*self)
            }
        }
    )*};
}

codes! {
    E4M3 => E4M3::to_f32, E4M3::saturated, |code: E4M3| code.0 << 1 == 0;
    E5M2 => E5M2::to_f32, E5M2::saturated, |code: E5M2| code.0 << 1 == 0;
    // Symmetric, so that a code times its scale has the sign of the code; NaN is 0.
    i8 => f32::from, |x: f32| x.round_ties_even().clamp(-127.0, 127.0) as i8, |code| code == 0;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_are_those_of_half() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let mut found = vec![0.0; all.len()];
        let halves: Vec<f16> = all.iter().map(|&bits| f16::from_bits(bits)).collect();
        f16::widen(&halves, &mut found);
        for (x, found) in halves.iter().zip(&found) {
            assert_eq!(found.to_bits(), x.to_f32().to_bits(), "{:#x}", x.to_bits());
        }
        let halves: Vec<bf16> = all.iter().map(|&bits| bf16::from_bits(bits)).collect();
        bf16::widen(&halves, &mut found);
        for (x, found) in halves.iter().zip(&found) {
            assert_eq!(found.to_bits() >> 16, u32::from(x.to_bits()));
        }
        // Below, at and above the middle of two neighbours.
        for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let wide: Vec<f32> =
                all.iter().map(|&high| f32::from_bits(u32::from(high) << 16 | low)).collect();
            let mut narrow = vec![bf16::ZERO; wide.len()];
            bf16::narrow(&wide, &mut narrow);
            for (x, found) in wide.iter().zip(narrow) {
                let expected = bf16::from_f32(*x);
                assert_eq!(found.to_bits(), expected.to_bits(), "{:#x}", x.to_bits());
            }
        }
    }
}
