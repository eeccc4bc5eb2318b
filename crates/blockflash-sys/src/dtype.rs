use serde::{Deserialize, Serialize};
use std::fmt;

/// Element type of a tensor. The discriminant is the value that crosses the kernel ABI
/// (`BLOCKFLASH_DTYPE_…` in `params.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(i32)]
#[non_exhaustive]
pub enum DType {
    /// IEEE binary16.
    F16 = 0,
    /// bfloat16.
    BF16 = 1,
    /// IEEE binary32.
    F32 = 2,
    /// Signed 32-bit integer (indices, sequence offsets).
    I32 = 3,
    /// Unsigned 8-bit integer (booleans: 0 is false).
    U8 = 4,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::F16 | DType::BF16 => 2,
            DType::F32 | DType::I32 => 4,
        }
    }

    /// Short lower-case name: `f16`, `bf16`, `f32`, `i32`, `u8`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::I32 => "i32",
            DType::U8 => "u8",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
