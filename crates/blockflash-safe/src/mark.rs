use crate::driver::check;
use crate::gpu::{Context, Handle};
use crate::{Error, Result};
use cudarc::driver::sys;
use std::ptr;

/// A CUDA event without the rules about captures, which [`Event`](crate::Event) adds.
pub(crate) struct Mark {
    context: &'static Context,
    raw: Handle<sys::CUevent_st>,
}

impl Mark {
    pub(crate) fn new(context: &'static Context, timing: bool) -> Result<Mark> {
        let flags = if timing {
            sys::CUevent_flags::CU_EVENT_DEFAULT
        } else {
            sys::CUevent_flags::CU_EVENT_DISABLE_TIMING
        };
        let _bound = context.bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: 1. The context is current. 2. The pointer is valid for writes during the call.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags as u32) })?;
        Ok(Mark { context, raw: Handle(raw) })
    }

    /// A mark behind everything that is queued so far on a stream of the context. The stream lives
    /// and is not being captured, and its context is current.
    pub(crate) fn behind(context: &'static Context, stream: sys::CUstream) -> Result<Mark> {
        let mark = Mark::new(context, false)?;
        mark.record(stream)?;
        Ok(mark)
    }

    /// The stream lives, and its context is current.
    pub(crate) fn record(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: 1. The context of both is current. 2. Both live: the event is borrowed, the
        // stream is the caller's word.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw.0, stream) })
    }

    /// Makes the stream wait for the mark. The stream lives, and its context is current.
    pub(crate) fn hold(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: 1. The stream's context is current. 2. Both live: the event is borrowed, the
        // stream is the caller's word. 3. 0: no flags.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, self.raw.0, 0) })
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        let _bound = self.context.bind()?;
        // SAFETY: the event lives and its context is current.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw.0) })
    }

    pub(crate) fn is_done(&self) -> Result<bool> {
        let _bound = self.context.bind()?;
        // SAFETY: the event lives and its context is current.
        match unsafe { sys::cuEventQuery(self.raw.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Milliseconds between two marks of one context that have timing and have been reached.
    pub(crate) fn elapsed_ms(&self, end: &Mark) -> Result<f32> {
        let _bound = self.context.bind()?;
        // SAFETY: both events were created with timing, live, and belong to the current context.
        // cudarc's wrapper picks the name that the function has in the version of its bindings.
        let elapsed = unsafe { cudarc::driver::result::event::elapsed(self.raw.0, end.raw.0) };
        let code = elapsed.map_or_else(|error| error.0, |_| sys::CUresult::CUDA_SUCCESS);
        if code == sys::CUresult::CUDA_ERROR_INVALID_HANDLE {
            return Err(Error::Event { what: "has not been recorded" });
        }
        check("cuEventElapsedTime", code)?;
        Ok(elapsed.unwrap_or(0.0))
    }
}

impl std::fmt::Debug for Mark {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.raw.0)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: 1. We created the event, and this is its only owner. 2. The driver lets
            // pending records and waits finish before the event's resources go. There is nobody to
            // report an error to.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw.0) };
        }
    }
}
