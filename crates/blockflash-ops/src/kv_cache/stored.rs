//! The elements of keys and values, on the CPU.

use super::latent_codes::{ROW_BYTES, decode_row};
use crate::float::Float;
use blockflash_safe::Element;

/// What keys and values are stored as.
pub(crate) trait Stored: Element {
    /// Whether rows are to be [decoded](Self::decode).
    const IS_CODED: bool;

    /// Elements of a row that stands for this many columns.
    fn stored(columns: usize) -> usize {
        columns
    }

    /// What a row stands for, without scales that are apart from it.
    fn decode(row: &[Self], columns: &mut [f32]);
}

impl<C: Float> Stored for C {
    const IS_CODED: bool = C::DTYPE.is_code();

    fn decode(row: &[Self], columns: &mut [f32]) {
        C::widen(row, columns);
    }
}

/// Rows of codes with their scales.
impl Stored for u8 {
    const IS_CODED: bool = true;

    fn stored(_: usize) -> usize {
        ROW_BYTES
    }

    fn decode(row: &[Self], columns: &mut [f32]) {
        decode_row(row, columns);
    }
}
