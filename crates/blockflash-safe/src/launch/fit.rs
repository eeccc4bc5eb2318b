//! Building blocks of the checks of all families.

use crate::{DType, Tensor, View, ViewMut};
use std::ffi::c_void;
use std::fmt::Display;
use std::ptr;

/// A result, or a description of the misfit, which becomes [`Error::Launch`](crate::Error::Launch).
/// It is formatted only on failure.
pub(super) type Fit<T = ()> = Result<T, String>;

/// Checks element type, shape and strides. Strides of dimensions of size 1 do not matter, and no
/// stride of an empty tensor does.
pub(super) fn fits<const N: usize>(
    name: &str,
    view: &View<'_>,
    dtype: DType,
    dims: [(i64, i64); N],
) -> Fit {
    let same = view.dtype() == dtype
        && view.shape().len() == N
        && dims.iter().zip(view.shape().iter().zip(view.strides())).all(
            |(&(size, stride), (&own, &step))| {
                own as i64 == size
                    && (own <= 1 || step as i64 == stride || view.layout().is_empty())
            },
        );
    if same {
        return Ok(());
    }
    let (found, shape, strides) = (view.dtype(), view.shape(), view.strides());
    Err(format!(
        "{name} is {found} {shape:?} with strides {strides:?}, \
         expected {dtype} (size, stride) {dims:?}"
    ))
}

/// Checks a condition; `what` names the value and what it may be, by `format_args!`.
pub(super) fn require(condition: bool, what: impl Display) -> Fit {
    if condition { Ok(()) } else { Err(what.to_string()) }
}

/// Whether an operand is there, in words.
pub(super) fn given(is_there: bool) -> &'static str {
    if is_there { "given" } else { "not given" }
}

pub(super) fn ceil_div(size: i64, tile: u32) -> i128 {
    (i128::from(size) + i128::from(tile) - 1) / i128::from(tile)
}

pub(super) fn pointer(view: &View<'_>) -> *const c_void {
    // Device addresses are 64-bit on every platform that CUDA 13 supports.
    ptr::without_provenance(view.device_ptr().unwrap_or(0) as usize)
}

pub(super) fn pointer_mut(view: &ViewMut<'_>) -> *mut c_void {
    pointer(&view.as_view()).cast_mut()
}

pub(super) fn array(array: Option<&Tensor>) -> *const c_void {
    array.map_or(ptr::null(), |array| pointer(&array.view()))
}

pub(super) fn optional(view: Option<&View<'_>>) -> *const c_void {
    view.map_or(ptr::null(), pointer)
}
