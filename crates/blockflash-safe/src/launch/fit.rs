//! Building blocks of the checks of all families.

use crate::{DType, Tensor, View, ViewMut};
use std::ffi::c_void;
use std::fmt;
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
    Err(misfit(name, view, format_args!("{dtype} (size, stride) {dims:?}")))
}

/// The strides of a tensor of this type and of these sizes whose last dimension is contiguous.
/// Those of dimensions of size 1 do not matter, and no stride of an empty tensor does.
#[inline]
pub(super) fn strides<const N: usize>(
    name: &str,
    view: &View<'_>,
    dtype: DType,
    sizes: [i64; N],
) -> Fit<[i64; N]> {
    let strides = all_strides(name, view, dtype, sizes)?;
    if strides.last().is_none_or(|&step| step == 1)
        || sizes.last().is_some_and(|&size| size <= 1)
        || view.layout().is_empty()
    {
        return Ok(strides);
    }
    Err(misfit(name, view, format_args!("{dtype} {sizes:?} with contiguous rows")))
}

/// The strides of a tensor of this type and of these sizes.
#[inline]
pub(super) fn all_strides<const N: usize>(
    name: &str,
    view: &View<'_>,
    dtype: DType,
    sizes: [i64; N],
) -> Fit<[i64; N]> {
    let of = |entries: &[usize]| <[usize; N]>::try_from(entries).map(|all| all.map(|x| x as i64));
    match (of(view.shape()), of(view.strides())) {
        (Ok(shape), Ok(strides)) if view.dtype() == dtype && shape == sizes => Ok(strides),
        _ => Err(misfit(name, view, format_args!("{dtype} {sizes:?}"))),
    }
}

#[cold]
fn misfit(name: &str, view: &View<'_>, expected: fmt::Arguments<'_>) -> String {
    let (dtype, shape, strides) = (view.dtype(), view.shape(), view.strides());
    format!("{name} is {dtype} {shape:?} with strides {strides:?}, expected {expected}")
}

/// A size as kernels take it.
#[inline]
pub(super) fn narrow(name: &str, size: i64) -> Fit<i32> {
    #[cold]
    fn too_large(name: &str, size: i64) -> String {
        format!("{name} is {size}, the limit is {}", i32::MAX)
    }
    i32::try_from(size).map_err(|_| too_large(name, size))
}

/// Checks a condition; `what` names the field, its value and what it may be.
pub(super) fn require(condition: bool, what: fmt::Arguments<'_>) -> Fit {
    if condition { Ok(()) } else { Err(what.to_string()) }
}

/// Whether an operand is there, in words.
pub(super) fn given(is_there: bool) -> &'static str {
    if is_there { "given" } else { "not given" }
}

/// Checks that an operand is absent, and says what it is that does not go with it.
pub(super) fn absent(name: &str, is_there: bool, reason: &str) -> Fit {
    require(!is_there, format_args!("{name} is given, expected none: {reason}"))
}

/// A code of a parameter that is none of those that are known.
pub(super) fn unknown<T>(name: &str, code: i32, known: &[i32]) -> Fit<T> {
    Err(format!("{name} is {code}, expected one of {known:?}"))
}

/// Checks that a tensor starts at a multiple of this many bytes.
pub(super) fn starts_at(bytes: usize, name: &str, view: &View<'_>) -> Fit {
    require(
        view.is_aligned(bytes),
        format_args!(
            "{name} starts at {:#x}, expected a multiple of {bytes} bytes",
            view.address()
        ),
    )
}

/// Checks that rows can be accessed 16 bytes at a time: by the address of the first one, and by
/// strides, which are multiples of this many elements.
pub(super) fn rows_aligned(
    name: &str,
    view: &View<'_>,
    multiple: i64,
    strides: impl IntoIterator<Item = i64> + Clone,
) -> Fit {
    let address = pointer(view).addr();
    if address.is_multiple_of(16) && strides.clone().into_iter().all(|step| step % multiple == 0) {
        return Ok(());
    }
    let strides: Vec<i64> = strides.into_iter().collect();
    Err(format!(
        "{name} starts at {address:#x} and has strides {strides:?}, expected multiples of 16 bytes \
         and of {multiple} elements"
    ))
}

/// The strides of dimensions that have more than one entry; no others matter.
pub(super) fn steps(dims: &[(i64, i64)]) -> impl Iterator<Item = i64> + Clone {
    dims.iter().filter(|(size, _)| *size > 1).map(|&(_, stride)| stride)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn texts_name_field_value_and_limit() {
        let bytes = [0u8; 64];
        let address = bytes.as_ptr() as usize;
        let start = 1 + (16 - address % 16) % 16;
        let odd = View::from_slice(&bytes[start..][..8], &[8]).unwrap();
        let at = odd.address();
        let stream = Device::cpu().stream().unwrap();
        let tensor = Tensor::zeros(&stream, DType::F16, &[2, 3]).unwrap();
        let found: [(Fit, String); 5] = [
            (absent("pages", true, "the kernel visits all"), {
                "pages is given, expected none: the kernel visits all".into()
            }),
            (unknown("step", 3, &[0, 1]), "step is 3, expected one of [0, 1]".into()),
            (starts_at(16, "values", &odd), {
                format!("values starts at {at:#x}, expected a multiple of 16 bytes")
            }),
            // Addresses of the host count as 0.
            (rows_aligned("q", &odd, 8, steps(&[(1, 3), (2, 12), (2, 16)])), {
                "q starts at 0x0 and has strides [12, 16], expected multiples of 16 bytes and of 8 \
                 elements"
                    .into()
            }),
            (fits("o", &tensor.view(), DType::F16, [(2, 4), (3, 1)]), {
                "o is f16 [2, 3] with strides [3, 1], expected f16 (size, stride) [(2, 4), (3, 1)]"
                    .into()
            }),
        ];
        for (found, expected) in found {
            assert_eq!(found, Err(expected));
        }
        assert_eq!(rows_aligned("q", &odd, 8, steps(&[(1, 3), (2, 16)])), Ok(()));
    }
}
