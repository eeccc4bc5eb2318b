//! Handlers of XLA's foreign function interface, by which JAX calls.
//!
//! XLA calls a handler with a frame of C structs. [`handlers`] makes the C functions of a
//! [`Target`], which gets the operands, results and attributes of a call as a [`Call`]. The structs
//! are generated (`cargo xtask bindgen --xla`); every one says its size, which is checked before
//! its fields are read. Handlers run in the stage `execute` only. They are not declared compatible
//! with command buffers: a workspace of [`Memory::scratch`] is free for others once a call is
//! queued, so that a replayed graph would write to it.

#[rustfmt::skip]
#[allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]
#[allow(missing_docs, dead_code, unreachable_pub)]
#[allow(clippy::all)]
mod api;
mod attribute;
mod buffer;
mod call;
mod context;
mod frame;

pub use attribute::Attribute;
pub use buffer::{Operand, Output};
pub use call::{Call, Memory};
pub use context::Scratch;

use crate::Error;
use api::{XLA_FFI_CallFrame, XLA_FFI_Error, XLA_FFI_Error_Code};
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What computes a call.
pub trait Target {
    /// Computes into the outputs of the call, or queues the work on its stream.
    ///
    /// # Errors
    /// Why the call is refused, which XLA reports.
    fn run(call: Call<'_>) -> Result<(), Refusal>;
}

/// Why a call is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Its kind.
    pub code: Code,
    /// Its text.
    pub text: String,
}

/// The kinds of refusal, as XLA names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// The caller passed something wrong.
    InvalidArgument,
    /// The interface of the runtime is not the one that this crate knows.
    FailedPrecondition,
    /// No kernel takes the call.
    Unimplemented,
    /// There is not enough memory.
    ResourceExhausted,
    /// The device or this library failed.
    Internal,
}

impl Code {
    fn in_xla(self) -> XLA_FFI_Error_Code {
        match self {
            Self::InvalidArgument => api::XLA_FFI_Error_Code_INVALID_ARGUMENT,
            Self::FailedPrecondition => api::XLA_FFI_Error_Code_FAILED_PRECONDITION,
            Self::Unimplemented => api::XLA_FFI_Error_Code_UNIMPLEMENTED,
            Self::ResourceExhausted => api::XLA_FFI_Error_Code_RESOURCE_EXHAUSTED,
            Self::Internal => api::XLA_FFI_Error_Code_INTERNAL,
        }
    }
}

impl Refusal {
    /// The caller passed something wrong.
    pub fn invalid(text: impl Display) -> Self {
        Self { code: Code::InvalidArgument, text: text.to_string() }
    }

    /// The frame of a call is not as the interface has it.
    fn frame(text: impl Display) -> Self {
        Self { code: Code::FailedPrecondition, text: format!("the call frame of XLA: {text}") }
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::invalid(error)
    }
}

/// The C functions of a target: the name of a platform, and the address of its `XLA_FFI_Handler`.
pub fn handlers<T: Target>() -> [(&'static str, usize); 2] {
    type Handler = unsafe extern "C" fn(*mut XLA_FFI_CallFrame) -> *mut XLA_FFI_Error;
    let on = |handler: Handler| (handler as *const ()).expose_provenance();
    [("cpu", on(handle::<T, false>)), ("CUDA", on(handle::<T, true>))]
}

/// # Safety
/// XLA calls it: the frame is one of its call frames, whose pointers are null or valid during the
/// call, and whose buffers fulfil [`call::read`].
unsafe extern "C" fn handle<T: Target, const GPU: bool>(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: this function's.
    match unsafe { answer::<T>(frame, GPU) } {
        Ok(()) => std::ptr::null_mut(),
        // SAFETY: this function's.
        Err(refusal) => unsafe { context::report(frame, &refusal) },
    }
}

/// # Safety
/// As [`handle`].
unsafe fn answer<T: Target>(frame: *mut XLA_FFI_CallFrame, gpu: bool) -> Result<(), Refusal> {
    let answer = AssertUnwindSafe(|| {
        // SAFETY: this function's.
        let frame = unsafe { frame::Frame::read(frame) }?;
        // SAFETY: this function's.
        if unsafe { frame::told_metadata(&frame) } {
            return Ok(());
        }
        // SAFETY: this function's.
        T::run(unsafe { call::read(&frame, gpu) }?)
    });
    catch_unwind(answer).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref().copied()).unwrap_or("without a text");
        Err(Refusal { code: Code::Internal, text: format!("blockflash panicked: {text}") })
    })
}

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;
