//! What the probes must write, computed on the host.

use blockflash_sys::Probe;
use half::{bf16, f16};

/// Elements of the matrix probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    F16,
    Bf16,
    E4m3,
}

impl Element {
    pub(super) fn of(probe: Probe) -> Option<Self> {
        match probe {
            Probe::MmaF16 | Probe::WgmmaF16 => Some(Element::F16),
            Probe::MmaBf16 | Probe::WgmmaBf16 => Some(Element::Bf16),
            Probe::MmaE4m3 | Probe::WgmmaE4m3 => Some(Element::E4m3),
            Probe::Exp2 | Probe::Read | Probe::Copy | Probe::Bulk => None,
        }
    }

    /// Elements in a 4-byte word.
    pub(super) fn per_word(self) -> usize {
        if self == Element::E4m3 { 4 } else { 2 }
    }

    /// The word that holds these values, rounded.
    pub(super) fn pack(self, values: &[f32]) -> i32 {
        let bits = |value: f32| match self {
            Element::F16 => u32::from(f16::from_f32(value).to_bits()),
            Element::Bf16 => u32::from(bf16::from_f32(value).to_bits()),
            Element::E4m3 => e4m3_bits(value),
        };
        let width = 32 / self.per_word();
        let place = |word, (at, &value)| word | bits(value) << (at * width);
        values.iter().enumerate().fold(0, place) as i32
    }

    fn unpack(self, word: i32, at: usize) -> f64 {
        let bits = word as u32 >> (at * 32 / self.per_word());
        match self {
            Element::F16 => f16::from_bits(bits as u16).to_f64(),
            Element::Bf16 => bf16::from_bits(bits as u16).to_f64(),
            Element::E4m3 => e4m3_value(bits as u8),
        }
    }
}

/// FP8 with 4 bits of exponent (bias 7) and 3 of mantissa, without infinities: the bits are those
/// of an f16 with another bias.
fn e4m3_value(bits: u8) -> f64 {
    let bits = u16::from(bits);
    256.0 * f16::from_bits((bits & 0x80) << 8 | (bits & 0x7F) << 7).to_f64()
}

/// The nearest value; never NaN, which 0x7F is.
fn e4m3_bits(value: f32) -> u32 {
    let distance = |bits: &u8| (e4m3_value(*bits) - f64::from(value.abs())).abs();
    let nearest = (0..0x7F).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0);
    u32::from(nearest) | if value < 0.0 { 0x80 } else { 0 }
}

/// A result and the sum of the magnitudes it is made of, which bounds its rounding error.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Expected {
    pub(super) value: f64,
    pub(super) magnitude: f64,
}

impl Expected {
    fn add(&mut self, a: f64, b: f64) {
        self.value += a * b;
        self.magnitude += (a * b).abs();
    }
}

/// Results of the lanes of a warp of `probe_sm80` after one iteration.
pub(super) fn mma(words: &[i32], element: Element) -> Vec<Expected> {
    const A_TILES: usize = 2;
    const B_TILES: usize = 8;
    let per_word = element.per_word();
    // Word `register` of the fragments at row (or column) g and depth k.
    let at = |register: usize, g: usize, k: usize| {
        element.unpack(words[register * 32 + g * 4 + k / per_word % 4], k % per_word)
    };
    let half = |k: usize| k / (4 * per_word);
    let a = |tile: usize, row: usize, k: usize| at(tile * 4 + row / 8 + 2 * half(k), row % 8, k);
    let b = |tile: usize, column: usize, k: usize| at(A_TILES * 4 + tile * 2 + half(k), column, k);
    let result = |lane: usize| {
        let (g, column) = (lane / 4, 2 * (lane % 4));
        let mut sum = Expected::default();
        for (tile_a, tile_b) in (0..A_TILES * B_TILES).map(|tile| (tile / B_TILES, tile % B_TILES))
        {
            for (row, column) in
                [(g, column), (g, column + 1), (g + 8, column), (g + 8, column + 1)]
            {
                (0..8 * per_word).for_each(|k| sum.add(a(tile_a, row, k), b(tile_b, column, k)));
            }
        }
        sum
    };
    (0..32).map(result).collect()
}

/// Results of the threads of a block of `probe_sm90a` after one iteration.
pub(super) fn wgmma(words: &[i32], element: Element) -> Vec<Expected> {
    const ROW_WORDS: usize = 32;
    const WARPGROUPS: usize = 2;
    let per_word = element.per_word();
    let at =
        |row: usize, k: usize| element.unpack(words[row * ROW_WORDS + k / per_word], k % per_word);
    let result = |thread: usize| {
        let (warpgroup, warp, g, t) = (thread / 128, thread / 32 % 4, thread / 4 % 8, thread % 4);
        let mut sum = Expected::default();
        for row in [16 * warp + g, 16 * warp + g + 8] {
            for column in (0..256).filter(|column| column / 2 % 4 == t) {
                for k in 0..ROW_WORDS * per_word {
                    sum.add(at(warpgroup * 64 + row, k), at(WARPGROUPS * 64 + column, k));
                }
            }
        }
        sum
    };
    (0..256).map(result).collect()
}

/// The sum of 16 values that all solve x = 2^-x.
pub(super) const EXP2_SUM: f64 = 16.0 * 0.641_185_744_504_986;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_values() {
        let values = [0x38, 0x7E, 0x01, 0x81].map(e4m3_value);
        assert_eq!(values, [1.0, 448.0, 2f64.powi(-9), -2f64.powi(-9)]);
        for bits in (0..0x7Fu8).chain(0x81..0xFF) {
            assert_eq!(e4m3_bits(e4m3_value(bits) as f32), u32::from(bits));
        }
        assert_eq!(Element::E4m3.pack(&[1.0, -1.0, 0.0, 448.0]) as u32, 0x7E00_B838);
        assert_eq!(Element::E4m3.unpack(0x7E00_B838, 3), 448.0);
        assert_eq!(Element::F16.unpack(Element::F16.pack(&[0.5, -3.0]), 1), -3.0);
    }

    #[test]
    fn products_of_ones_count_their_terms_and_the_fixed_point_is_one() {
        for element in [Element::F16, Element::Bf16, Element::E4m3] {
            let ones = vec![element.pack(&vec![1.0; element.per_word()]); 16384];
            let all = |terms: usize| {
                let sum = (terms * 8 * element.per_word()) as f64;
                Expected { value: sum, magnitude: sum }
            };
            assert_eq!(mma(&ones, element), vec![all(64); 32]);
            assert_eq!(wgmma(&ones, element), vec![all(32 * 16); 256]);
        }
        let x = EXP2_SUM / 16.0;
        assert!((2f64.powf(-x) - x).abs() < 1e-12);
    }
}
