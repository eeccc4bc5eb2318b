//! Attributes of a call.

use super::Refusal;
use super::api::*;
use std::slice;

/// A static argument of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Attribute<'a> {
    /// Of 32 or 64 bits.
    Int(i64),
    /// Of 32 or 64 bits.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A string.
    Text(&'a str),
}

/// # Safety
/// As many types, names and values can be read during `'a` as there are attributes, and each value
/// is null or a struct of its type.
pub(super) unsafe fn read<'a>(
    attrs: &XLA_FFI_Attrs,
) -> Result<Vec<(&'a str, Attribute<'a>)>, Refusal> {
    let &XLA_FFI_Attrs { size, types, names, attrs, .. } = attrs;
    let count = super::call::count("attributes", size, types, attrs)?;
    if count > 0 && names.is_null() {
        return Err(Refusal::frame("attributes have no names"));
    }
    let each = |at: usize| {
        // SAFETY: there are as many.
        let (kind, name, value) =
            unsafe { (*types.add(at), (*names.add(at)).as_ref(), *attrs.add(at)) };
        let name = name.ok_or_else(|| Refusal::frame(format!("attribute {at} has no name")))?;
        // SAFETY: the name of an attribute.
        let name = unsafe { text(name) }?;
        // SAFETY: null, or a struct of this type.
        let value = unsafe { value_of(kind, value) };
        let wrong = || Refusal::invalid(format!("{name} is an attribute of an unknown type"));
        Ok((name, value.ok_or_else(wrong)?))
    };
    (0..count).map(each).collect()
}

/// # Safety
/// The value is null, or a struct of this type, which lives during `'a`.
#[allow(non_upper_case_globals)]
unsafe fn value_of<'a>(
    kind: XLA_FFI_AttrType,
    value: *const std::ffi::c_void,
) -> Option<Attribute<'a>> {
    if value.is_null() {
        return None;
    }
    match kind {
        XLA_FFI_AttrType_STRING => {
            // SAFETY: a string.
            unsafe { text(&*value.cast()) }.ok().map(Attribute::Text)
        }
        XLA_FFI_AttrType_SCALAR => {
            // SAFETY: a scalar.
            let &XLA_FFI_Scalar { dtype, value } = unsafe { &*value.cast() };
            if value.is_null() {
                return None;
            }
            // SAFETY: it points to a number of its type.
            Some(unsafe {
                match dtype {
                    XLA_FFI_DataType_S64 => Attribute::Int(value.cast::<i64>().read_unaligned()),
                    XLA_FFI_DataType_S32 => {
                        Attribute::Int(value.cast::<i32>().read_unaligned().into())
                    }
                    XLA_FFI_DataType_F64 => Attribute::Float(value.cast::<f64>().read_unaligned()),
                    XLA_FFI_DataType_F32 => {
                        Attribute::Float(value.cast::<f32>().read_unaligned().into())
                    }
                    XLA_FFI_DataType_PRED => Attribute::Bool(value.cast::<u8>().read() != 0),
                    _ => return None,
                }
            })
        }
        _ => None,
    }
}

/// # Safety
/// Its bytes can be read during `'a`.
unsafe fn text<'a>(span: &XLA_FFI_ByteSpan) -> Result<&'a str, Refusal> {
    let bytes = match (span.ptr.is_null(), span.len) {
        (_, 0) => &[],
        (true, _) => return Err(Refusal::frame("a string has no memory")),
        // SAFETY: this function's.
        (false, len) => unsafe { slice::from_raw_parts(span.ptr.cast::<u8>(), len) },
    };
    std::str::from_utf8(bytes).map_err(|_| Refusal::invalid("a string is not UTF-8"))
}
