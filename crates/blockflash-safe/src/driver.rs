//! The driver library: whether it is present and new enough, and the meaning of its error codes.

use crate::{Error, Result};
use cudarc::driver::sys::{
    self, CUresult, CUstreamCaptureMode as CaptureMode, CUstreamCaptureStatus as CaptureStatus,
};
use std::sync::OnceLock;

/// The CUDA version that the driver must support (`1000 * major + 10 * minor`): the version of the
/// compiler of the kernel images. Driver 580 is the first one. Every symbol that this crate calls
/// exists in such a driver, so cudarc's lazy lookup of symbols, which panics on a missing one,
/// always succeeds.
pub const NEEDED_DRIVER_VERSION: u32 = 13_000;

/// Names under which the driver is installed: a subset of the names that cudarc tries, because
/// cudarc panics when it finds none.
const LIBRARY_NAMES: &[&str] =
    if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };

/// Functions that are called before the driver's version is known.
const FIRST_SYMBOLS: [&[u8]; 4] =
    [b"cuInit\0", b"cuDriverGetVersion\0", b"cuGetErrorName\0", b"cuGetErrorString\0"];

/// Whether the driver library can be loaded. cudarc's own `is_culib_present` does not exist if
/// another crate of the program has cudarc linked at build time, so this function looks itself.
fn library_is_present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    *PRESENT.get_or_init(|| {
        LIBRARY_NAMES.iter().any(|name| {
            // SAFETY:
            // 1. Loading runs the library's initialisers: it is the driver, which cudarc loads in
            //    any case.
            // 2. The symbols are only looked for; they are never called through the types given
            //    here.
            unsafe {
                libloading::Library::new(*name).is_ok_and(|library| {
                    let complete = FIRST_SYMBOLS
                        .iter()
                        .all(|symbol| library.get::<*const ()>(*symbol).is_ok());
                    // Not unloaded: loading the library again would only cost time.
                    std::mem::forget(library);
                    complete
                })
            }
        })
    })
}

/// Makes the driver ready and returns its version. Must succeed before any other call of `sys`;
/// cheap when repeated.
///
/// # Errors
/// [`Error::NoDriver`], [`Error::DriverTooOld`], [`Error::NoSuchDevice`] with a count of 0 when the
/// driver sees no GPU.
pub(crate) fn initialise() -> Result<u32> {
    if !library_is_present() {
        return Err(Error::NoDriver);
    }
    let mut version = 0;
    // SAFETY: 1. The library is present. 2. The pointer is valid for writes during the call.
    let code = unsafe { sys::cuDriverGetVersion(&mut version) };
    if code == CUresult::CUDA_ERROR_STUB_LIBRARY {
        return Err(Error::NoDriver);
    }
    check("cuDriverGetVersion", code)?;
    let found = u32::try_from(version).unwrap_or(0);
    if found < NEEDED_DRIVER_VERSION {
        return Err(Error::DriverTooOld { found, needed: NEEDED_DRIVER_VERSION });
    }
    // SAFETY: the library is present; 0 is the only flag there is.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_ERROR_NO_DEVICE => Err(Error::NoSuchDevice { ordinal: 0, count: 0 }),
        CUresult::CUDA_ERROR_STUB_LIBRARY => Err(Error::NoDriver),
        code => check("cuInit", code).map(|()| found),
    }
}

/// Turns the result of the driver function `call` into ours.
#[inline]
pub(crate) fn check(call: &'static str, code: CUresult) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failure(call, code)) }
}

#[cold]
fn failure(call: &'static str, code: CUresult) -> Error {
    let error = cudarc::driver::DriverError(code);
    let text = |found: Result<&std::ffi::CStr, _>, otherwise: &str| {
        found.map_or_else(|_| otherwise.to_owned(), |text| text.to_string_lossy().into_owned())
    };
    Error::Cuda {
        call,
        code: code as i32,
        name: text(error.error_name(), "unknown error"),
        message: text(error.error_string(), "the driver has no description"),
    }
}

/// Whether a stream of the current context is being captured into a graph, by this crate or another
/// library.
pub(crate) fn is_captured(stream: sys::CUstream) -> Result<bool> {
    let mut status = CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: 1. The stream lives and its context is current. 2. The pointer is valid for writes
    // during the call.
    let code = unsafe { sys::cuStreamIsCapturing(stream, &mut status) };
    // While a blocking stream is captured, asking about the legacy default stream gives this error:
    // the stream itself is not captured, but cannot be used until the capture ends.
    if code == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
        return Ok(true);
    }
    check("cuStreamIsCapturing", code)?;
    Ok(status != CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// While it lives, calls of this thread do not disturb captures.
pub(crate) struct Relaxed(CaptureMode);

impl Relaxed {
    pub(crate) fn enter() -> Result<Relaxed> {
        let mut mode = CaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is valid for reads and writes during the call, which swaps the
        // thread's mode with it.
        let code = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        check("cuThreadExchangeStreamCaptureMode", code).map(|()| Relaxed(mode))
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as in `enter`. There is nobody to report an error to.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.0) };
    }
}
