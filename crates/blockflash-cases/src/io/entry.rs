//! One tensor of a file.

use super::convert::Stored;

/// A tensor as its header describes it, checked against the length of the file.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Name in a safetensors file, empty for `.npy`.
    pub name: String,
    /// Element type in the file; `Err` holds the name of a type that cannot be read here.
    pub stored: std::result::Result<Stored, String>,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// First byte in the file.
    pub(super) offset: u64,
    /// Column-major (NumPy's `fortran_order`).
    pub(super) column_major: bool,
}

/// Size of a tensor in bytes; `None` if it overflows.
pub(super) fn byte_length(shape: &[usize], element_bits: u64) -> Option<u64> {
    let bits =
        shape.iter().try_fold(element_bits, |product, &size| product.checked_mul(size as u64))?;
    (usize::try_from(bits).is_ok() && bits.is_multiple_of(8)).then_some(bits / 8)
}
