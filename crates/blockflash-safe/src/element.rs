use crate::float8::{E4M3, E5M2};
use blockflash_sys::DType;
use half::{bf16, f16};

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that is an element type of tensors: `f16`, `bf16` (of the crate `half`), `f32`,
/// `i32`, `u8`, [`E4M3`], [`E5M2`] and `i8`.
pub trait Element:
    bytemuck::Pod + Send + Sync + std::fmt::Debug + PartialEq + sealed::Sealed
{
    /// The element type as a value.
    const DTYPE: DType;
}

macro_rules! element {
    ($($type:ty => $dtype:ident),*) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
        const _: () = assert!(
            size_of::<$type>() == DType::$dtype.size(),
            "a dtype's size is its Rust type's"
        );
    )*};
}

element!(
    f16 => F16, bf16 => BF16, f32 => F32, i32 => I32, u8 => U8, E4M3 => E4M3, E5M2 => E5M2, i8 => I8
);
