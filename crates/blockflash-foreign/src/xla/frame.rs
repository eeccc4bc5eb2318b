//! The frame of a call, and the metadata that XLA asks for with one.

use super::Refusal;
use super::api::*;
use std::mem::offset_of;
use std::ptr::null_mut;

/// Whether a struct that says that it has this size has a field.
macro_rules! has {
    ($size:expr, $struct:ty, $field:ident, $type:ty) => {
        $size >= offset_of!($struct, $field) + size_of::<$type>()
    };
}
pub(super) use has;

/// What a frame holds.
pub(super) struct Frame {
    extension_start: *mut XLA_FFI_Extension_Base,
    api: *const XLA_FFI_Api,
    pub(super) context: *mut XLA_FFI_ExecutionContext,
    pub(super) stage: XLA_FFI_ExecutionStage,
    pub(super) args: XLA_FFI_Args,
    pub(super) rets: XLA_FFI_Rets,
    pub(super) attrs: XLA_FFI_Attrs,
}

impl Frame {
    /// The frame behind a pointer.
    ///
    /// # Safety
    /// The pointer is null, or that of a frame.
    pub(super) unsafe fn read(frame: *mut XLA_FFI_CallFrame) -> Result<Frame, Refusal> {
        if frame.is_null() {
            return Err(Refusal::frame("there is none"));
        }
        // SAFETY: of any version, it begins with its size.
        let size = unsafe { (&raw const (*frame).struct_size).read() };
        // The size that XLA says does not count the last field, which is its own.
        let least = offset_of!(XLA_FFI_CallFrame, future);
        if size < least {
            return Err(Refusal::frame(format!("it has {size} bytes, expected {least}")));
        }
        // SAFETY: it has these fields.
        Ok(unsafe {
            Frame {
                extension_start: (*frame).extension_start,
                api: (*frame).api,
                context: (*frame).ctx,
                stage: (*frame).stage,
                args: (*frame).args,
                rets: (*frame).rets,
                attrs: (*frame).attrs,
            }
        })
    }
}

/// Tells XLA the version of the interface, if it asks for that. What is too small to hold it stays
/// as it is: XLA refuses the registration then, since it finds version 0.0.
///
/// # Safety
/// Extensions of the frame are valid, or null.
pub(super) unsafe fn told_metadata(frame: &Frame) -> bool {
    let extension = frame.extension_start;
    // SAFETY: null, or valid.
    let asked =
        unsafe { extension.as_ref() }.is_some_and(|it| it.type_ == XLA_FFI_Extension_Metadata);
    if !asked {
        return false;
    }
    // SAFETY: checked above not to be null.
    if unsafe { (*extension).struct_size } < size_of::<XLA_FFI_Metadata_Extension>() {
        return true;
    }
    // SAFETY: an extension of this type and size.
    let metadata = unsafe { (*extension.cast::<XLA_FFI_Metadata_Extension>()).metadata };
    // SAFETY: null, or a struct that begins with its size.
    let size = if metadata.is_null() { 0 } else { unsafe { (*metadata).struct_size } };
    if has!(size, XLA_FFI_Metadata, traits, u32) {
        // SAFETY: it has these fields, and is XLA's to be written during the call.
        unsafe {
            (*metadata).api_version = XLA_FFI_Api_Version {
                struct_size: size_of::<XLA_FFI_Api_Version>(),
                extension_start: null_mut(),
                major_version: XLA_FFI_API_MAJOR,
                minor_version: XLA_FFI_API_MINOR,
            };
            (*metadata).traits = 0;
        }
    }
    true
}

/// The functions of the runtime, of a version that this crate knows.
///
/// # Safety
/// The frame's pointer to them is null or valid.
pub(super) unsafe fn api(frame: &Frame) -> Result<*const XLA_FFI_Api, Refusal> {
    let api = frame.api;
    // SAFETY: null, or a struct that begins with its size.
    let size = if api.is_null() { 0 } else { unsafe { (&raw const (*api).struct_size).read() } };
    if !has!(size, XLA_FFI_Api, internal_api, usize) {
        return Err(Refusal::frame(format!("the runtime's functions have {size} bytes")));
    }
    // SAFETY: it has this field.
    let version = unsafe { &raw const (*api).api_version };
    // SAFETY: as above.
    let (major, minor) = unsafe { ((*version).major_version, (*version).minor_version) };
    if major != XLA_FFI_API_MAJOR {
        return Err(Refusal::frame(format!(
            "the runtime has version {major}.{minor} of the interface, expected \
             {XLA_FFI_API_MAJOR}.x"
        )));
    }
    Ok(api)
}
