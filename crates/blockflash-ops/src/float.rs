//! The floating-point element types of the CPU backends: everything is computed in f32 panels.

use blockflash_safe::Element;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// An element type that converts to and from f32.
pub(crate) trait Float: Element {
    /// Converts a slice; both have the same length.
    fn widen(source: &[Self], target: &mut [f32]);

    /// Rounds a slice to nearest, ties to even; both have the same length.
    fn narrow(source: &[f32], target: &mut [Self]);

    /// Whether this is 0 or −0.
    fn is_zero(&self) -> bool;
}

impl Float for f16 {
    fn widen(source: &[Self], target: &mut [f32]) {
        source.convert_to_f32_slice(target);
    }

    fn narrow(source: &[f32], target: &mut [Self]) {
        target.convert_from_f32_slice(source);
    }

    fn is_zero(&self) -> bool {
        self.to_bits() << 1 == 0
    }
}

impl Float for bf16 {
    fn widen(source: &[Self], target: &mut [f32]) {
        assert_eq!(source.len(), target.len(), "conversions keep the length");
        // bf16 is the upper half of f32; this plain loop vectorises.
        for (target, source) in target.iter_mut().zip(source) {
            *target = f32::from_bits(u32::from(source.to_bits()) << 16);
        }
    }

    fn narrow(source: &[f32], target: &mut [Self]) {
        target.convert_from_f32_slice(source);
    }

    fn is_zero(&self) -> bool {
        self.to_bits() << 1 == 0
    }
}

impl Float for f32 {
    fn widen(source: &[Self], target: &mut [f32]) {
        target.copy_from_slice(source);
    }

    fn narrow(source: &[f32], target: &mut [Self]) {
        target.copy_from_slice(source);
    }

    fn is_zero(&self) -> bool {
        *self == 0.0
    }
}
