//! What a call asks of the runtime: its stream, memory, and errors.

use super::api::{
    XLA_FFI_Api, XLA_FFI_CallFrame, XLA_FFI_DeviceMemory_Allocate_Args,
    XLA_FFI_DeviceMemory_Free_Args, XLA_FFI_DeviceOrdinal_Get_Args, XLA_FFI_Error,
    XLA_FFI_Error_Create_Args, XLA_FFI_Error_Destroy_Args, XLA_FFI_ExecutionContext,
    XLA_FFI_Stream_Get_Args,
};
use super::frame::{self, Frame, has};
use super::{Code, Refusal};
use crate::{Described, Foreign, layout};
use blockflash_safe::{DType, Device};
use std::ffi::CString;
use std::marker::PhantomData;
use std::mem::offset_of;
use std::ptr::null_mut;

/// The runtime during a call.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    api: *const XLA_FFI_Api,
    context: *mut XLA_FFI_ExecutionContext,
    call: PhantomData<&'a ()>,
}

/// Calls a function of the runtime with a struct, whose first fields it fills.
macro_rules! ask {
    ($context:expr, $function:ident, $args:ident { $($field:ident: $value:expr),* $(,)? }) => {{
        let Context { api, context, .. } = $context;
        // SAFETY: `Context::new` has seen that this much can be read.
        let size = unsafe { (*api).struct_size };
        let function = if has!(size, XLA_FFI_Api, $function, usize) {
            // SAFETY: it has this field.
            unsafe { (*api).$function }
        } else {
            None
        };
        let Some(function) = function else {
            return Err(Refusal::frame(concat!("the runtime lacks ", stringify!($function))));
        };
        let mut args = $args {
            struct_size: size_of::<$args>(),
            extension_start: null_mut(),
            ctx: context,
            $($field: $value,)*
        };
        // SAFETY: a function of the runtime gets its arguments, during the call.
        $context.done(unsafe { function(&mut args) }, stringify!($function))?;
        args
    }};
}

impl<'a> Context<'a> {
    /// # Safety
    /// The frame's pointers are null or valid during `'a`.
    pub(super) unsafe fn new(frame: &'a Frame) -> Result<Self, Refusal> {
        // SAFETY: this function's.
        let api = unsafe { frame::api(frame) }?;
        Ok(Self { api, context: frame.context, call: PhantomData })
    }

    /// The GPU, and the address of its `CUstream`.
    pub(super) fn gpu(self) -> Result<(Device, usize), Refusal> {
        let place = ask!(
            self,
            XLA_FFI_DeviceOrdinal_Get,
            XLA_FFI_DeviceOrdinal_Get_Args { device_ordinal: -1 }
        );
        let work = ask!(self, XLA_FFI_Stream_Get, XLA_FFI_Stream_Get_Args { stream: null_mut() });
        let ordinal = usize::try_from(place.device_ordinal)
            .map_err(|_| Refusal::frame(format!("the device is {}", place.device_ordinal)))?;
        let device = Device::cuda(ordinal)
            .map_err(|error| Refusal { code: Code::Internal, text: error.to_string() })?;
        Ok((device, work.stream.expose_provenance()))
    }

    /// Memory of the device for this call.
    pub(super) fn scratch(
        self,
        bytes: usize,
        device: Device,
        stream: usize,
    ) -> Result<Scratch<'a>, Refusal> {
        let made = ask!(
            self,
            XLA_FFI_DeviceMemory_Allocate,
            XLA_FFI_DeviceMemory_Allocate_Args { size: bytes, alignment: 16, data: null_mut() }
        );
        let address = made.data.expose_provenance();
        if address == 0 && bytes > 0 {
            let text = format!("XLA has no {bytes} bytes for a workspace");
            return Err(Refusal { code: Code::ResourceExhausted, text });
        }
        Ok(Scratch { context: self, device, stream, bytes, address })
    }

    fn free(self, bytes: usize, address: usize) -> Result<(), Refusal> {
        ask!(
            self,
            XLA_FFI_DeviceMemory_Free,
            XLA_FFI_DeviceMemory_Free_Args {
                size: bytes,
                data: std::ptr::with_exposed_provenance_mut(address),
            }
        );
        Ok(())
    }

    /// Destroys an error of the runtime.
    fn done(self, error: *mut XLA_FFI_Error, what: &str) -> Result<(), Refusal> {
        if error.is_null() {
            return Ok(());
        }
        let mut args = XLA_FFI_Error_Destroy_Args {
            struct_size: size_of::<XLA_FFI_Error_Destroy_Args>(),
            extension_start: null_mut(),
            error,
        };
        // SAFETY: `new` has seen that this much can be read.
        let size = unsafe { (*self.api).struct_size };
        if has!(size, XLA_FFI_Api, XLA_FFI_Error_Destroy, usize) {
            // SAFETY: it has this field, and destroys its own error.
            unsafe { (*self.api).XLA_FFI_Error_Destroy.map(|destroy| destroy(&mut args)) };
        }
        let code =
            if what.contains("Memory_Allocate") { Code::ResourceExhausted } else { Code::Internal };
        Err(Refusal { code, text: format!("{what} of XLA failed") })
    }
}

/// Memory of the device that is the call's while this exists. XLA gives it to work that is queued
/// later on the same stream.
pub struct Scratch<'a> {
    context: Context<'a>,
    device: Device,
    stream: usize,
    bytes: usize,
    address: usize,
}

impl Scratch<'_> {
    /// The memory, u8 `[bytes]`.
    ///
    /// # Errors
    /// More bytes than a tensor has.
    pub fn foreign(&mut self, what: &'static str) -> Result<Foreign<'_>, Refusal> {
        let bytes = i64::try_from(self.bytes).map_err(Refusal::invalid)?;
        let described = Described {
            address: self.address,
            stream: self.stream,
            ..Described::new(what, self.device, DType::U8, layout(what, &[bytes], &[1])?)
        };
        // SAFETY: 1. and 3. XLA has allocated it for this call alone, and gives it to others in the
        // order of the stream only; this value is borrowed meanwhile. 2. As in `buffer`.
        Ok(unsafe { Foreign::new(described) })
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        // XLA's allocator knows the memory, so there is nothing that a caller could do.
        let _ = self.context.free(self.bytes, self.address);
    }
}

/// The refusal as an error of XLA. A frame that has no way to say it ends the process: success
/// would be a wrong answer.
///
/// # Safety
/// The frame is null, or its pointers are null or valid.
pub(super) unsafe fn report(
    frame: *mut XLA_FFI_CallFrame,
    refusal: &Refusal,
) -> *mut XLA_FFI_Error {
    let text = CString::new(refusal.text.replace('\0', " ")).unwrap_or_default();
    // SAFETY: this function's.
    let Some(create) = (unsafe { error_create(frame) }) else {
        eprintln!("blockflash cannot report to XLA: {}", refusal.text);
        std::process::abort();
    };
    let mut args = XLA_FFI_Error_Create_Args {
        struct_size: size_of::<XLA_FFI_Error_Create_Args>(),
        extension_start: null_mut(),
        message: text.as_ptr(),
        errc: refusal.code.in_xla(),
    };
    // SAFETY: the function gets its arguments; it copies the text.
    unsafe { create(&mut args) }
}

type ErrorCreate = unsafe extern "C" fn(*mut XLA_FFI_Error_Create_Args) -> *mut XLA_FFI_Error;

/// The first function of the runtime, which all versions have.
///
/// # Safety
/// As [`report`].
unsafe fn error_create(frame: *mut XLA_FFI_CallFrame) -> Option<ErrorCreate> {
    if frame.is_null() {
        return None;
    }
    // SAFETY: of any version, a frame begins with its size.
    let size = unsafe { (&raw const (*frame).struct_size).read() };
    if !has!(size, XLA_FFI_CallFrame, api, usize) {
        return None;
    }
    // SAFETY: it has this field.
    let api = unsafe { (&raw const (*frame).api).read() };
    if api.is_null() {
        return None;
    }
    // SAFETY: as for the frame.
    let size = unsafe { (&raw const (*api).struct_size).read() };
    if !has!(size, XLA_FFI_Api, XLA_FFI_Error_Create, usize) {
        return None;
    }
    // SAFETY: it has this field.
    unsafe { (&raw const (*api).XLA_FFI_Error_Create).read() }
}
