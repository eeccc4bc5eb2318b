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
    /// 8-bit floating point with 4 bits of exponent and 3 of fraction, up to 448, without
    /// infinities (OCP E4M3, `float8_e4m3fn`).
    E4M3 = 5,
    /// 8-bit floating point with 5 bits of exponent and 2 of fraction, up to 57344 (OCP E5M2).
    E5M2 = 6,
    /// Signed 8-bit integer.
    I8 = 7,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::U8 | DType::E4M3 | DType::E5M2 | DType::I8 => 1,
            DType::F16 | DType::BF16 => 2,
            DType::F32 | DType::I32 => 4,
        }
    }

    /// Whether this is a type of codes of caches, which have scales: `e4m3`, `e5m2`, `i8`.
    pub const fn is_code(self) -> bool {
        matches!(self, DType::E4M3 | DType::E5M2 | DType::I8)
    }

    /// Short lower-case name: `f16`, `bf16`, `f32`, `i32`, `u8`, `e4m3`, `e5m2`, `i8`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::I32 => "i32",
            DType::U8 => "u8",
            DType::E4M3 => "e4m3",
            DType::E5M2 => "e5m2",
            DType::I8 => "i8",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Element types of the tensors of attention. Sums, softmax and log-sum-exp are f32 whatever they
/// are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ElementTypes {
    /// Of the queries and their gradient.
    pub q: DType,
    /// Of keys and values and their gradients.
    pub kv: DType,
    /// Of the output and its gradient.
    pub o: DType,
}

impl ElementTypes {
    /// The same type for all tensors.
    pub const fn all(dtype: DType) -> Self {
        Self { q: dtype, kv: dtype, o: dtype }
    }

    /// The one type of all tensors, or `None` if they have several.
    pub const fn single(self) -> Option<DType> {
        let Self { q, kv, o } = self;
        if q as i32 == kv as i32 && q as i32 == o as i32 { Some(q) } else { None }
    }
}

/// `f16` for one type, `f16_u8_bf16` (q, kv, o) for several: a part of names of images and cases.
impl fmt::Display for ElementTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.single() {
            Some(dtype) => dtype.fmt(f),
            None => write!(f, "{}_{}_{}", self.q, self.kv, self.o),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::{BLOCKFLASH_DTYPE_E4M3, BLOCKFLASH_DTYPE_E5M2, BLOCKFLASH_DTYPE_I8};

    #[test]
    fn codes_have_numbers_of_the_abi() {
        for (dtype, number, name) in [
            (DType::E4M3, BLOCKFLASH_DTYPE_E4M3, "e4m3"),
            (DType::E5M2, BLOCKFLASH_DTYPE_E5M2, "e5m2"),
            (DType::I8, BLOCKFLASH_DTYPE_I8, "i8"),
        ] {
            assert_eq!((dtype as i32, dtype.name(), dtype.size()), (number, name, 1));
            assert!(dtype.is_code());
        }
        assert!(!DType::U8.is_code());
    }

    #[test]
    fn element_types_are_one_or_three() {
        let all = ElementTypes::all(DType::BF16);
        assert_eq!((all.single(), all.to_string()), (Some(DType::BF16), "bf16".to_string()));
        for types in [
            ElementTypes { q: DType::F16, ..all },
            ElementTypes { kv: DType::F16, ..all },
            ElementTypes { o: DType::F16, ..all },
        ] {
            assert_eq!(types.single(), None, "{types}");
        }
        let several = ElementTypes { q: DType::F16, kv: DType::U8, o: DType::BF16 };
        assert_eq!(several.to_string(), "f16_u8_bf16");
        let codes = ElementTypes { kv: DType::E4M3, ..all };
        assert_eq!(codes.to_string(), "bf16_e4m3_bf16");
    }
}
