use crate::context::Context;
use crate::driver::{Handle, check};
use crate::stream::Session;
use crate::{Device, Error, Result, Stream, lock};
use cudarc::driver::sys;
use std::ptr;
use std::sync::Mutex;
use std::time::Instant;

/// A mark in a stream: to wait for, to ask whether it has been reached, and to measure time between
/// two of them.
#[derive(Debug)]
pub struct Event {
    device: Device,
    timing: bool,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// Work on the CPU is done when its call returns, so a mark is a point in time.
    Cpu(Mutex<Option<Instant>>),
    Cuda(CudaEvent),
}

struct CudaEvent {
    context: &'static Context,
    raw: Handle<sys::CUevent_st>,
    /// The number of the capture that the mark was last recorded in. The lock is held while the
    /// event is recorded or waited for, so that this is true of the mark that is meant; it is taken
    /// before that of a stream.
    captured: Mutex<Option<u64>>,
}

impl CudaEvent {
    /// The stream lives, and its context is current.
    fn record(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: 1. The context of both is current. 2. Both live: the event is borrowed, the
        // stream is the caller's word.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw.0, stream) })
    }

    fn hold(&self, session: &Session<'_>) -> Result<()> {
        // SAFETY: 1. The stream's context is current. 2. Stream and event live: both are borrowed.
        // 3. 0: no flags.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(session.raw(), self.raw.0, 0) })
    }
}

impl std::fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.raw.0)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: 1. We created the event and this is its only owner. 2. The driver lets
            // pending records and waits finish before the event's resources go. An error has no one
            // to be reported to.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw.0) };
        }
    }
}

impl Event {
    /// An event that has not been recorded. With `timing` two of them measure time; without, they
    /// are cheaper.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn new(device: &Device, timing: bool) -> Result<Event> {
        let kind = match device.context() {
            None => Kind::Cpu(Mutex::new(None)),
            Some(context) => {
                let flags = if timing {
                    sys::CUevent_flags::CU_EVENT_DEFAULT
                } else {
                    sys::CUevent_flags::CU_EVENT_DISABLE_TIMING
                };
                let _bound = context.bind()?;
                let mut raw = ptr::null_mut();
                // SAFETY: 1. The context is current. 2. The pointer is valid for writes during the
                // call.
                check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags as u32) })?;
                Kind::Cuda(CudaEvent { context, raw: Handle(raw), captured: Mutex::default() })
            }
        };
        Ok(Event { device: *device, timing, kind })
    }

    /// Puts the mark behind everything queued on `stream` so far. Recording again moves the mark.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`], [`Error::Cuda`].
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.device.expect(stream.device())?;
        match &self.kind {
            Kind::Cpu(instant) => *lock(instant) = Some(Instant::now()),
            Kind::Cuda(event) => {
                let mut captured = lock(&event.captured);
                let Some(session) = stream.session()? else { return Ok(()) };
                event.record(session.raw())?;
                *captured = session.capture_number();
            }
        }
        Ok(())
    }

    /// Waits until the mark is reached; at once when it was never recorded.
    ///
    /// # Errors
    /// [`Error::Cuda`] with the first failure of the work before the mark.
    pub fn synchronize(&self) -> Result<()> {
        let Kind::Cuda(event) = &self.kind else { return Ok(()) };
        let _bound = event.context.bind()?;
        // SAFETY: the event lives and its context is current.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(event.raw.0) })
    }

    /// Whether the mark is reached; true when it was never recorded. Does not wait, so that a
    /// caller can give up on work that takes too long.
    ///
    /// # Errors
    /// [`Error::Cuda`] with the first failure of the work before the mark.
    pub fn is_done(&self) -> Result<bool> {
        let Kind::Cuda(event) = &self.kind else { return Ok(true) };
        let _bound = event.context.bind()?;
        // SAFETY: the event lives and its context is current.
        match unsafe { sys::cuEventQuery(event.raw.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Microseconds of device time from this mark to `end`. Waits for both. The resolution is about
    /// half a microsecond.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`], [`Error::Event`] for an event that was not recorded or has no
    /// timing, [`Error::Cuda`].
    pub fn elapsed_us(&self, end: &Event) -> Result<f64> {
        self.device.expect(&end.device)?;
        if !self.timing || !end.timing {
            return Err(Error::Event { what: "was created without timing" });
        }
        match (&self.kind, &end.kind) {
            (Kind::Cuda(first), Kind::Cuda(last)) => {
                self.synchronize()?;
                end.synchronize()?;
                let _bound = first.context.bind()?;
                // SAFETY: both events were created with timing, live, and belong to the current
                // context. cudarc's wrapper picks the name that the function has in the version of
                // its bindings.
                let elapsed =
                    unsafe { cudarc::driver::result::event::elapsed(first.raw.0, last.raw.0) };
                let code = elapsed.map_or_else(|error| error.0, |_| sys::CUresult::CUDA_SUCCESS);
                if code == sys::CUresult::CUDA_ERROR_INVALID_HANDLE {
                    return Err(Error::Event { what: "has not been recorded" });
                }
                check("cuEventElapsedTime", code)?;
                Ok(f64::from(elapsed.unwrap_or(0.0)) * 1e3)
            }
            (Kind::Cpu(first), Kind::Cpu(last)) => {
                // One after the other: they may be the same event.
                let first = *lock(first);
                let last = *lock(last);
                let (Some(first), Some(last)) = (first, last) else {
                    return Err(Error::Event { what: "has not been recorded" });
                };
                // The order may be reversed, as on the GPU.
                let forward = last.saturating_duration_since(first).as_secs_f64();
                Ok((forward - first.saturating_duration_since(last).as_secs_f64()) * 1e6)
            }
            _ => Err(Error::DeviceMismatch { expected: self.device, found: end.device }),
        }
    }

    /// Makes a CUDA stream wait; see [`Stream::wait`].
    pub(crate) fn hold(&self, stream: &Stream) -> Result<()> {
        let Kind::Cuda(event) = &self.kind else { return Ok(()) };
        let captured = lock(&event.captured);
        let Some(session) = stream.session()? else { return self.synchronize() };
        match (*captured, session.capture_number()) {
            // The stream would join the capture, and its work the graph, without this crate keeping
            // the memory alive.
            (Some(_), None) => return Err(Error::InCapture { what: "waiting on another stream" }),
            (mark, Some(own)) if mark != Some(own) => {
                return Err(Error::InCapture { what: "waiting for work outside of the capture" });
            }
            _ => {}
        }
        event.hold(&session)
    }

    /// A mark behind everything that is queued on `stream` now; `None` while it is being captured,
    /// here or elsewhere.
    pub(crate) fn mark(stream: &Stream) -> Result<Option<Event>> {
        match stream.session()? {
            Some(session) if session.is_capturing()? => Ok(None),
            Some(session) => Event::behind(stream.device(), session.raw()).map(Some),
            None => Event::new(stream.device(), false).map(Some),
        }
    }

    /// A mark behind everything that is queued on a stream of the device now, which lives, is not
    /// being captured, and whose context is current.
    pub(crate) fn behind(device: &Device, stream: sys::CUstream) -> Result<Event> {
        let mark = Event::new(device, false)?;
        if let Kind::Cuda(event) = &mark.kind {
            event.record(stream)?;
        }
        Ok(mark)
    }

    /// Lets a stream that is not being captured wait for what [`mark`](Self::mark) has returned.
    pub(crate) fn hold_marked(&self, session: &Session<'_>) -> Result<()> {
        match &self.kind {
            Kind::Cpu(_) => Ok(()),
            Kind::Cuda(event) => event.hold(session),
        }
    }
}
