//! Views of a call, with what holds candle's memory for it.

use super::candle_core::{self, Result, bail};
use blockflash_ops::{View, ViewMut};

/// Tells candle's bookkeeping, when it is dropped, that the memory has been used.
#[cfg(feature = "cuda")]
pub(crate) type InUse<'a> = candle_core::cuda_backend::cudarc::driver::SyncOnDrop<'a>;

/// A view of a tensor that a call reads.
pub(crate) struct Reading<'a> {
    pub(crate) view: View<'a>,
    #[cfg(feature = "cuda")]
    pub(crate) _in_use: Option<InUse<'a>>,
}

/// A view of a result that a call writes.
pub(crate) struct Writing<'a> {
    pub(crate) view: ViewMut<'a>,
    #[cfg(feature = "cuda")]
    pub(crate) _in_use: Option<InUse<'a>>,
}

/// A workspace that is in candle's memory.
pub(crate) struct Scratch<'a> {
    pub(crate) tensor: blockflash_ops::Tensor,
    #[cfg(feature = "cuda")]
    pub(crate) _in_use: InUse<'a>,
    #[cfg(not(feature = "cuda"))]
    pub(crate) _in_use: std::marker::PhantomData<&'a ()>,
}

/// The error of an element type that no operand has.
pub(crate) fn unsupported<T>(what: &str, dtype: candle_core::DType) -> Result<T> {
    let dtype = dtype.as_str();
    bail!(
        "{what} is {dtype}: f16, bf16 and f32 are possible, f8e4m3 for keys and values of a cache, \
         u32 or i32 for indices and lengths"
    )
}
