//! Garbage of every kind, and the numbers around it.

use crate::number::{encode, normal};
use blockflash_ops::{Align, DType, Mask};
use rand::Rng;
use rand::rngs::StdRng;
use std::sync::OnceLock;

/// N(0,1) numbers in a floating-point type, as bytes: a piece of a supply, since most of a case's
/// time would go into new ones.
pub(super) fn numbers(dtype: DType, count: usize, random: &mut StdRng) -> Vec<u8> {
    const SUPPLY: usize = 1 << 17;
    static OF_TYPES: [OnceLock<Vec<u8>>; 4] = [const { OnceLock::new() }; 4];
    let of_type = match dtype {
        DType::F16 => 0,
        DType::BF16 => 1,
        DType::E4M3 => 2,
        _ => 3,
    };
    let supply = OF_TYPES[of_type].get_or_init(|| {
        let bytes = |x| encode(dtype, x).to_le_bytes().into_iter().take(dtype.size());
        normal(1, SUPPLY).into_iter().flat_map(bytes).collect()
    });
    let first = random.random_range(0..SUPPLY) * dtype.size();
    supply.iter().cycle().skip(first).take(count * dtype.size()).copied().collect()
}

/// An index that is wrong, or nearly right, where indices count up to `limit`.
fn hostile(limit: i32, random: &mut StdRng) -> i32 {
    match random.random_range(0..12) {
        0 => i32::MIN,
        1 => i32::MAX,
        2 => -1,
        3 => limit + 1,
        4 => -limit,
        5 => 1 << 30,
        6 => limit + random.random_range(0..100),
        7 => -random.random_range(0..100),
        8 => 1 << random.random_range(0..31),
        9 => random.random(),
        _ => random.random_range(0..=limit),
    }
}

/// Right entries as they are, or some or all of them wrong; `limit` is about the largest right one.
pub(super) fn damaged(right: &[i32], limit: usize, random: &mut StdRng) -> Vec<i32> {
    let (mut entries, limit) = (right.to_vec(), limit as i32);
    match random.random_range(0..10) {
        0 | 1 => {}
        2..=4 if !entries.is_empty() => {
            for _ in 0..random.random_range(1..=3) {
                let at = random.random_range(0..entries.len());
                entries[at] = hostile(limit, random);
            }
        }
        5 => entries.fill_with(|| hostile(limit, random)),
        6 => entries.fill_with(|| random.random()),
        7 => entries.reverse(),
        8 => entries.fill_with(|| random.random_range(0..=limit)),
        _ => {
            let shift = hostile(limit, random);
            entries.iter_mut().for_each(|entry| *entry = entry.wrapping_add(shift));
        }
    }
    entries
}

/// Scores with NaN, infinities, subnormals and zeros, or any bits at all.
pub(super) fn scores(count: usize, random: &mut StdRng) -> Vec<f32> {
    let kind = random.random_range(0..4);
    let score = || match (kind, random.random_range(0..40)) {
        (0, _) => f32::from_bits(random.random()),
        (1, 0) => f32::NAN,
        (1, 1) => -f32::NAN,
        (2, 0..30) => f32::NAN,
        (1 | 3, 2) => f32::INFINITY,
        (1 | 3, 3) => f32::NEG_INFINITY,
        (1 | 3, 4) => -0.0,
        (1 | 3, 5) => f32::from_bits(1),
        (_, _) => random.random_range(-3.0..3.0),
    };
    std::iter::repeat_with(score).take(count).collect()
}

/// A token mask of any kind, with windows about as wide as the sequences.
pub(super) fn token_mask(longest: usize, random: &mut StdRng) -> Mask {
    let align = if random.random() { Align::TopLeft } else { Align::BottomRight };
    let mut side = || match random.random_range(0..4) {
        0 => None,
        1 => Some(0),
        _ => Some(random.random_range(0..=longest)),
    };
    let (left, right) = (side(), side());
    match random.random_range(0..3) {
        0 => Mask::Full,
        1 => Mask::Causal { align },
        _ => Mask::Window { left, right, align },
    }
}

/// One of some values.
pub(super) fn one_of<T: Copy>(values: &[T], random: &mut StdRng) -> T {
    values[random.random_range(0..values.len())]
}

/// In a quarter of the cases that may have one, the byte that another stream writes over an array.
pub(super) fn overwritten(possible: bool, random: &mut StdRng) -> Option<u8> {
    // Drawn in any case: the rest of a case is the same wherever it runs.
    let (drawn, byte) = (random.random_bool(0.25), one_of(&[0, 0x7F, 0x80, 0xFF], random));
    (possible && drawn).then_some(byte)
}
