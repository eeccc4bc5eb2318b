//! Floating point of 8 bits, exact and in plain integer arithmetic, which vectorises.

/// What a format consists of: bits of the fraction, bias of the exponent, the greatest magnitude,
/// and the code of what is beyond it, which is NaN or an infinity.
struct Format {
    fraction: u32,
    bias: u32,
    max: f32,
    beyond: u8,
}

/// The code of every NaN.
const NAN: u8 = 0x7f;

impl Format {
    /// Rounds to nearest, ties to even. What rounds beyond the greatest magnitude becomes that if
    /// `saturates`, and `beyond` otherwise.
    #[inline(always)]
    const fn code(&self, x: f32, saturates: bool) -> u8 {
        let sign = (x.to_bits() >> 24) as u8 & 0x80;
        let magnitude = x.abs();
        // The smallest number whose exponent is not the least, and the distance below it.
        let normal = f32::from_bits((128 - self.bias) << 23);
        let step = f32::from_bits((128 - self.bias - self.fraction) << 23);
        // A sum with 2^23 steps rounds to steps, with their number in its last bits.
        let shifted = (magnitude + step * 8_388_608.0).to_bits() as u8;
        let dropped = 23 - self.fraction;
        let bits = magnitude.to_bits();
        let rounded = bits.wrapping_add((1 << (dropped - 1)) - 1 + (bits >> dropped & 1));
        let kept = (rounded >> dropped).wrapping_sub((127 - self.bias) << self.fraction);
        let limit = self.max.to_bits() >> dropped;
        let code = if magnitude < normal {
            shifted
        } else if rounded >> dropped <= limit {
            kept as u8
        } else if saturates {
            limit.wrapping_sub((127 - self.bias) << self.fraction) as u8
        } else {
            self.beyond
        };
        if x.is_nan() { NAN } else { sign | code }
    }
}

macro_rules! float8 {
    ($(#[$doc:meta])* $name:ident, $format:expr, |$code:ident| $value:expr) => {
        $(#[$doc])*
        ///
        /// Equality is that of codes.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        #[derive(bytemuck::Pod, bytemuck::Zeroable)]
        #[repr(transparent)]
        pub struct $name(
            /// The code: sign, exponent, fraction.
            pub u8,
        );

        impl $name {
            const FORMAT: Format = $format;
            /// The greatest number.
            pub const MAX: f32 = Self::FORMAT.max;

            /// The nearest number, of two the one with an even code. What rounds beyond the
            /// greatest one is NaN, or an infinity where the format has them.
            #[inline(always)]
            pub const fn from_f32(x: f32) -> Self {
                Self(Self::FORMAT.code(x, false))
            }

            /// The same, and what is beyond the greatest number, also an infinity, becomes that
            /// number with its sign. NaN stays NaN.
            #[inline(always)]
            pub const fn saturated(x: f32) -> Self {
                Self(Self::FORMAT.code(x, true))
            }

            /// The number itself.
            #[inline(always)]
            pub const fn to_f32(self) -> f32 {
                let $code = self.0;
                $value
            }
        }
    };
}

/// f32 of the bits of f16 whose exponent is not the greatest, without the sign.
#[inline(always)]
const fn widened(half: u32) -> f32 {
    // The bias is 127 in place of 15. Without a leading one, these are multiples of 2⁻²⁴.
    if half < 0x0400 {
        half as f32 * (1.0 / 16_777_216.0)
    } else {
        f32::from_bits((half << 13) + (112 << 23))
    }
}

#[inline(always)]
const fn signed(code: u8, magnitude: f32) -> f32 {
    f32::from_bits((code as u32 & 0x80) << 24 | magnitude.to_bits())
}

float8! {
    /// 8-bit floating point with 4 bits of exponent and 3 of fraction: OCP E4M3, called
    /// `float8_e4m3fn` in torch. The greatest number is 448; there are no infinities.
    E4M3,
    Format { fraction: 3, bias: 7, max: 448.0, beyond: NAN },
    |code| {
        let magnitude = code as u32 & 0x7f;
        // Shifted into f16 it is too small by the difference of the biases, 2⁸.
        let number = widened(magnitude << 7) * 256.0;
        signed(code, if magnitude == 0x7f { f32::NAN } else { number })
    }
}

float8! {
    /// 8-bit floating point with 5 bits of exponent and 2 of fraction: OCP E5M2, the upper half of
    /// f16. The greatest number is 57344.
    E5M2,
    Format { fraction: 2, bias: 15, max: 57344.0, beyond: 0x7c },
    |code| {
        let magnitude = code as u32 & 0x7f;
        let number = widened(magnitude << 8);
        let special = if magnitude == 0x7c { f32::INFINITY } else { f32::NAN };
        signed(code, if magnitude >= 0x7c { special } else { number })
    }
}

#[cfg(test)]
#[path = "float8_tests.rs"]
mod tests;
