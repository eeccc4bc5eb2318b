//! The driver library: whether it is present and new enough, and the meaning of its error codes.

use crate::{Error, Result};
use cudarc::driver::sys::{
    self, CUresult, CUstreamCaptureMode as CaptureMode, CUstreamCaptureStatus as CaptureStatus,
};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// The CUDA version that the driver must support (`1000 * major + 10 * minor`): the version of the
/// compiler of the kernel images. Driver 580 is the first one.
pub const NEEDED_DRIVER_VERSION: u32 = 13_000;

/// Names under which the driver is installed: a subset of the names that cudarc tries, because
/// cudarc panics when it finds none.
const LIBRARY_NAMES: &[&str] =
    if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };

/// Functions that are called before the driver's version is known.
const FIRST_SYMBOLS: [&str; 4] =
    ["cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"];

/// All others that this crate calls.
const SYMBOLS: &[&str] = &[
    "cuCtxGetCurrent",
    "cuCtxGetStreamPriorityRange",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetDefaultMemPool",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventElapsedTime_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuFuncGetParamInfo",
    "cuFuncLoad",
    "cuFuncSetAttribute",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphRetainUserObject",
    "cuLaunchHostFunc",
    "cuLaunchKernelEx",
    "cuMemAllocAsync",
    "cuMemAlloc_v2",
    "cuMemFreeAsync",
    "cuMemPoolGetAttribute",
    "cuMemPoolSetAttribute",
    "cuMemcpy2DAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyPeerAsync",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamGetCaptureInfo_v3",
    "cuStreamGetId",
    "cuStreamIsCapturing",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuTensorMapEncodeTiled",
    "cuThreadExchangeStreamCaptureMode",
    "cuUserObjectCreate",
    "cuUserObjectRelease",
];

/// What a search for the driver has found.
#[derive(Clone, Copy)]
struct Library {
    /// The first function that it lacks. cudarc looks functions up when they are called, and
    /// panics.
    lacks: Option<&'static str>,
}

/// The driver library, if it can be loaded. cudarc's own `is_culib_present` does not exist if
/// another crate of the program has cudarc linked at build time, so this function looks itself.
fn library() -> Option<Library> {
    static FOUND: OnceLock<Option<Library>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        LIBRARY_NAMES.iter().find_map(|name| {
            // SAFETY: loading runs the library's initialisers: it is the driver, which cudarc loads
            // in any case.
            let library = unsafe { libloading::Library::new(*name) }.ok()?;
            let has = |symbol: &&&str| {
                // SAFETY: the symbol is only looked for, never called through the type given here.
                unsafe { library.get::<*const ()>(symbol.as_bytes()) }.is_ok()
            };
            let complete = FIRST_SYMBOLS.iter().all(|symbol| has(&symbol));
            let lacks = SYMBOLS.iter().find(|symbol| !has(symbol)).copied();
            // Not unloaded: loading the library again would only cost time.
            std::mem::forget(library);
            complete.then_some(Library { lacks })
        })
    })
}

/// The process in which the driver was made ready; 0 before.
static READY_IN: AtomicU32 = AtomicU32::new(0);

/// Whether this crate has made the driver ready in this process. From then on, processes that are
/// forked from it cannot use CUDA.
pub fn cuda_is_initialised() -> bool {
    READY_IN.load(Ordering::Relaxed) == std::process::id()
}

/// The newest CUDA version that the driver supports, as `1000 * major + 10 * minor`. Does not make
/// the driver ready, which would keep CUDA from processes that are forked later.
///
/// # Errors
/// [`Error::NoDriver`], [`Error::DriverTooOld`], [`Error::DriverIncomplete`].
pub fn cuda_driver_version() -> Result<u32> {
    let library = library().ok_or(Error::NoDriver)?;
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
    match library.lacks {
        Some(symbol) => Err(Error::DriverIncomplete { found, symbol }),
        None => Ok(found),
    }
}

/// Makes the driver ready and returns its version. Must succeed before any other call of `sys`;
/// cheap when repeated.
///
/// # Errors
/// Those of [`cuda_driver_version`]; [`Error::NoSuchDevice`] with a count of 0 when the driver sees
/// no GPU; [`Error::Forked`].
pub(crate) fn initialise() -> Result<u32> {
    let found = cuda_driver_version()?;
    // SAFETY: the library is present; 0 is the only flag there is.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_ERROR_NO_DEVICE => {
            return Err(Error::NoSuchDevice { ordinal: 0, count: 0 });
        }
        CUresult::CUDA_ERROR_STUB_LIBRARY => return Err(Error::NoDriver),
        code => check("cuInit", code)?,
    }
    READY_IN.store(std::process::id(), Ordering::Relaxed);
    Ok(found)
}

/// Turns the result of the driver function `call` into ours.
#[inline]
pub(crate) fn check(call: &'static str, code: CUresult) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failure(call, code)) }
}

#[cold]
fn failure(call: &'static str, code: CUresult) -> Error {
    // The driver is ready before anything else is called. So it was made ready by a parent of this
    // process, where it answers everything with this code.
    if code == CUresult::CUDA_ERROR_NOT_INITIALIZED {
        return Error::Forked { call };
    }
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

#[cfg(test)]
mod tests {
    use super::{FIRST_SYMBOLS, SYMBOLS};
    use std::collections::BTreeSet;
    use std::path::Path;

    fn calls_in(folder: &Path, calls: &mut BTreeSet<String>) {
        for entry in folder.read_dir().unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                calls_in(&path, calls);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            for (at, prefix) in text.match_indices("sys::cu") {
                let name: String = text[at + prefix.len() - 2..]
                    .chars()
                    .take_while(|&c| c.is_ascii_alphanumeric() || c == '_')
                    .collect();
                calls.extend(name[2..].starts_with(char::is_uppercase).then_some(name));
            }
        }
    }

    /// A function that is called is one that was looked for.
    #[test]
    fn the_list_of_symbols_is_complete() {
        let mut calls = BTreeSet::new();
        calls_in(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut calls);
        // Of cudarc, for its bindings of different versions.
        calls.extend(["cuEventElapsedTime", "cuEventElapsedTime_v2"].map(String::from));
        calls.extend(["cuGetErrorName", "cuGetErrorString"].map(String::from));
        let listed: BTreeSet<_> =
            FIRST_SYMBOLS.iter().chain(SYMBOLS).map(|&name| name.to_owned()).collect();
        assert_eq!(calls, listed);
    }
}
