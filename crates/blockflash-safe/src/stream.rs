use crate::context::Bound;
use crate::driver::{Relaxed, check, is_captured};
use crate::freed::free_deferred;
use crate::gpu::Context;
use crate::mark::Mark;
use crate::queue::Queue;
use crate::{Device, Error, Result, lock::lock};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// A queue of work on a device. Clones are the same queue.
#[derive(Clone)]
pub struct Stream(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    device: Device,
    /// `None` on the CPU.
    pub(crate) queue: Option<Queue>,
    /// The memory that the graph will use, while the stream is being captured. The lock is held
    /// whenever work is queued; otherwise work of another thread could enter a capture without its
    /// memory being noted.
    capture: Mutex<Option<Recording>>,
}

impl Device {
    /// A new stream: work on it runs in order and independently of other streams, CUDA's default
    /// stream included. On the CPU, work runs before its call returns.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn stream(&self) -> Result<Stream> {
        let queue = |context| Queue::new(context, false);
        Ok(Stream::with(*self, self.context().map(queue).transpose()?))
    }

    /// Like [`stream`](Self::stream), of the highest priority: its CTAs take free SMs before CTAs
    /// of other streams that wait for one. Exchanges with other GPUs run beside kernels in this
    /// way.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn urgent_stream(&self) -> Result<Stream> {
        let queue = |context| Queue::new(context, true);
        Ok(Stream::with(*self, self.context().map(queue).transpose()?))
    }
}

impl Stream {
    /// Wraps a foreign stream (a `CUstream` or `cudaStream_t` of PyTorch, candle or CUDA itself),
    /// which its owner keeps and destroys. Null is the legacy default stream.
    ///
    /// # Safety
    /// 1. `stream` is a stream of the primary context of `device`, or null; not the per-thread
    ///    default stream, which is another one in each thread.
    /// 2. It outlives the returned value, all its clones, and all tensors that were allocated on or
    ///    used with them. A tensor that is dropped while one of its streams is being captured is
    ///    released by a later call, such as [`synchronize`](Self::synchronize) after the capture.
    /// 3. If the stream is captured by other means than [`Stream::capture`] on this value or its
    ///    clones, or joins such a capture: the tensors that are used meanwhile outlive the graph
    ///    and its launches; launches of everything made of the graph (executable graphs, child
    ///    graphs) run one after another; and if the capture uses memory that is used in turns, or
    ///    will be (`BsrPartsMemory`), no launch runs at the same time as
    ///    other work with that memory, in this or another graph.
    ///
    /// Persistent kernels take one of 8192 pairs of tile counters for each such stream. Nothing
    /// tells when the stream is gone, so it keeps its pair for the rest of the process; pairs taken
    /// by captures return when the graph is gone.
    ///
    /// # Errors
    /// [`Error::NotOnGpu`] for the CPU.
    pub unsafe fn from_raw(device: &Device, stream: *mut c_void) -> Result<Stream> {
        let context = device.context().ok_or(Error::NotOnGpu { what: "a CUDA stream" })?;
        Ok(Stream::with(*device, Some(Queue::foreign(context, stream.cast()))))
    }

    fn with(device: Device, queue: Option<Queue>) -> Stream {
        Stream(Arc::new(Inner { device, queue, capture: Mutex::default() }))
    }

    /// The device that runs the work.
    #[inline]
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The `CUstream`, valid as long as this value or a clone lives; null for the CPU (and for the
    /// legacy default stream).
    pub fn raw(&self) -> *mut c_void {
        self.0.queue.as_ref().map_or(ptr::null_mut(), |queue| queue.raw.0.cast())
    }

    /// Waits until everything queued so far is done.
    ///
    /// # Errors
    /// [`Error::InCapture`], and [`Error::Cuda`] with the first failure of the work (a fault in a
    /// kernel, for example).
    pub fn synchronize(&self) -> Result<()> {
        let Some(queue) = &self.0.queue else { return Ok(()) };
        if lock(&self.0.capture).is_some() {
            return Err(Error::InCapture { what: "synchronising" });
        }
        let bound = queue.context.bind()?;
        // SAFETY: the stream lives as long as `self` (`Queue`, or point 2 of `from_raw`).
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(queue.raw.0) })?;
        drop(bound);
        free_deferred();
        Ok(())
    }

    /// Whether the stream is being captured into a graph, here or by another library.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn is_capturing(&self) -> Result<bool> {
        self.session()?.map_or(Ok(false), |session| session.is_capturing())
    }

    /// Whether work on the other stream runs after everything queued on this one, because the two
    /// are clones of each other or wrap the same `CUstream`. All streams of the CPU are the same.
    pub fn is_same_queue(&self, other: &Stream) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
            || (self.device() == other.device() && self.raw() == other.raw())
    }

    /// Opens the stream for queueing; `None` on the CPU. A thread must never have two open
    /// sessions, because they hold locks.
    pub(crate) fn session(&self) -> Result<Option<Session<'_>>> {
        let Some(queue) = &self.0.queue else { return Ok(None) };
        let capture = lock(&self.0.capture);
        Ok(Some(Session { queue, capture, _bound: queue.context.bind()? }))
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({}, {:?})", self.device(), self.raw())
    }
}

/// Something that queued work uses.
pub(crate) trait Kept: Send + Sync {
    /// Must be called before work that uses it is queued on `stream`, and while no session is open.
    fn prepare(&self, stream: &Stream) -> Result<()>;

    /// The stream that used it last, for memory that only one piece of work uses at a time
    /// (`turns.rs`).
    fn turn(&self) -> Option<&Mutex<Stream>>;
}

/// A capture that this crate began.
pub(crate) struct Recording {
    /// A number that no other capture of the process has.
    number: u64,
    /// Everything that the graph will use.
    pub(crate) kept: Vec<Arc<dyn Kept>>,
}

impl Recording {
    pub(crate) fn begin() -> Recording {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Recording { number: NEXT.fetch_add(1, Ordering::Relaxed), kept: Vec::new() }
    }
}

/// The right to queue work on a CUDA stream: its context is current in this thread, and no other
/// thread queues.
pub(crate) struct Session<'s> {
    queue: &'s Queue,
    capture: MutexGuard<'s, Option<Recording>>,
    _bound: Bound,
}

impl Session<'_> {
    pub(crate) fn raw(&self) -> sys::CUstream {
        self.queue.raw.0
    }

    pub(crate) fn context(&self) -> &'static Context {
        self.queue.context
    }

    /// The capture in progress, if this crate began it.
    pub(crate) fn capture(&mut self) -> &mut Option<Recording> {
        &mut self.capture
    }

    /// The number of the capture in progress, if this crate began it.
    pub(crate) fn capture_number(&self) -> Option<u64> {
        self.capture.as_ref().map(|recording| recording.number)
    }

    /// Notes that the work queued next uses `what`: a captured graph keeps it alive.
    pub(crate) fn keep<K: Kept + 'static>(&mut self, what: &Arc<K>) {
        if let Some(Recording { kept, .. }) = self.capture.as_mut()
            && !kept.iter().any(|other| ptr::addr_eq(Arc::as_ptr(other), Arc::as_ptr(what)))
        {
            kept.push(Arc::<K>::clone(what));
        }
    }

    /// Two words for the kernel that is queued next: see [`Queue::tile_counter`].
    pub(crate) fn tile_counter(&self) -> Result<*mut u32> {
        self.queue.tile_counter(self.is_capturing()?)
    }

    /// Makes the work that is queued next wait for a mark. `captured` is the number of the capture
    /// in which the mark was recorded.
    pub(crate) fn wait(&self, mark: &Mark, captured: Option<u64>) -> Result<()> {
        match (captured, self.capture_number()) {
            // Otherwise the stream would join the capture, and its work the graph, without this
            // crate keeping the memory alive.
            (Some(_), None) => Err(Error::InCapture { what: "waiting on another stream" }),
            (captured, Some(own)) if captured != Some(own) => {
                Err(Error::InCapture { what: "waiting for work outside of the capture" })
            }
            _ => mark.hold(self.raw()),
        }
    }

    pub(crate) fn is_capturing(&self) -> Result<bool> {
        if self.capture.is_some() {
            return Ok(true);
        }
        is_captured(self.raw())
    }

    /// Refuses what a graph cannot replay.
    pub(crate) fn refuse_capture(&self, what: &'static str) -> Result<()> {
        if self.is_capturing()? { Err(Error::InCapture { what }) } else { Ok(()) }
    }

    /// Whether everything queued so far is done. The stream is not being captured.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        // The query must not disturb captures of other threads.
        let _relaxed = Relaxed::enter()?;
        // SAFETY: the stream lives and its context is current.
        match unsafe { sys::cuStreamQuery(self.raw()) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuStreamQuery", code).map(|()| true),
        }
    }

    /// Waits for the stream while no other thread can queue on it.
    pub(crate) fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream lives and its context is current.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw()) })
    }
}
