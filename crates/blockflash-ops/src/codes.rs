//! Numbers as codes of 8 bits: what appends to caches and [`Quantize`](crate::Quantize) share.

use crate::float::Float;
use blockflash_safe::{E4M3, E5M2};

/// An element type of 8 bits that stands for a number times a scale.
pub(crate) trait Code: Float {
    /// The greatest code that numbers become.
    const GREATEST: f32;
}

impl Code for E4M3 {
    const GREATEST: f32 = Self::MAX;
}

impl Code for E5M2 {
    const GREATEST: f32 = Self::MAX;
}

impl Code for i8 {
    const GREATEST: f32 = 127.0;
}

/// The codes of numbers divided by their scale, which are left in their place.
pub(crate) fn encode<C: Code>(numbers: &mut [f32], scale: f32, codes: &mut [C]) {
    numbers.iter_mut().for_each(|x| *x /= scale);
    C::narrow(numbers, codes);
}

/// The greatest magnitude. NaN does not count.
pub(crate) fn magnitude(numbers: &[f32]) -> f32 {
    numbers.iter().fold(0f32, |most, x| most.max(x.abs()))
}

/// The scale with which this magnitude is the greatest code; 1 for 0, so that it divides.
pub(crate) fn chosen<C: Code>(magnitude: f32) -> f32 {
    let scale = magnitude / C::GREATEST;
    if scale == 0.0 { 1.0 } else { scale }
}
