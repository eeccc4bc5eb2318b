use crate::context::{Bound, Context};
use crate::driver::{Handle, check, is_captured};
use crate::tile_counter::{Slot, TileCounters};
use crate::{Device, Error, Event, Result, lock};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

mod user;

use user::End;
pub(crate) use user::User;

/// A queue of work on a device. Clones are the same queue.
#[derive(Clone)]
pub struct Stream(Arc<Inner>);

struct Inner {
    device: Device,
    /// `None` on the CPU.
    queue: Option<Queue>,
    /// While the stream is captured: the memory that the graph will use. The lock is held whenever
    /// something is queued, so that no work of another thread slips into a capture without its
    /// memory being noted.
    capture: Mutex<Option<Recording>>,
}

struct Queue {
    context: &'static Context,
    raw: Handle<sys::CUstream_st>,
    owned: bool,
    /// For launches that are not captured, from the first one on that counts tiles.
    counter: OnceLock<Slot>,
    end: Arc<End>,
}

impl Queue {
    fn new(context: &'static Context, raw: sys::CUstream, owned: bool) -> Queue {
        Queue { context, raw: Handle(raw), owned, counter: OnceLock::new(), end: Arc::default() }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        let mut end = None;
        if let Ok(_bound) = self.context.bind() {
            // What is queued on a captured stream becomes a part of the graph: then the counters
            // stay taken, and memory that was used on the stream is not freed.
            if is_captured(self.raw.0).is_ok_and(|captured| !captured) {
                if let Some(counter) = self.counter.get() {
                    counter.give_back_behind(self.raw.0);
                }
                if Arc::strong_count(&self.end) > 1 {
                    end = Event::behind(&Device::with_context(self.context), self.raw.0).ok();
                }
            }
            // SAFETY:
            // 1. We created the stream, and this is its only owner: it is destroyed once.
            // 2. Work that is still queued is finished by the driver before the stream's resources
            //    go. An error has no one to be reported to.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw.0) };
        }
        // Nobody else sets it.
        let _ = self.end.set(end);
    }
}

impl Stream {
    pub(crate) fn new(device: Device) -> Result<Stream> {
        let Some(context) = device.context() else { return Ok(Stream::with(device, None)) };
        let _bound = context.bind()?;
        let mut raw = ptr::null_mut();
        // Non-blocking: no hidden order with the legacy default stream of other libraries.
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: 1. The context is current. 2. The pointer is valid for writes during the call.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Stream::with(device, Some(Queue::new(context, raw, true))))
    }

    /// Wraps a stream of somebody else (`CUstream` or `cudaStream_t`: PyTorch, candle, CUDA
    /// itself), which stays theirs. Null is the legacy default stream.
    ///
    /// # Safety
    /// 1. `stream` is a stream of the primary context of `device`, or null; not the per-thread
    ///    default stream, which is another one in each thread.
    /// 2. It outlives the returned value, all its clones, and all tensors that were allocated on or
    ///    used with them.
    /// 3. When it is captured by other means than [`Stream::capture`] on this value or its clones,
    ///    or joins such a capture: the tensors that are used meanwhile outlive the graph and its
    ///    launches; launches of all that is made of the graph (executable graphs, child graphs) run
    ///    one after another; and no launch runs at the same time as other work, in this or another
    ///    graph, with memory that is used in turns ([`BsrPartsMemory`](crate::BsrPartsMemory)) if
    ///    the capture uses it.
    ///
    /// Kernels that count tiles take one of 8192 pairs of counters for each such stream. Nobody
    /// says when it is gone, so it keeps them for the rest of the process; those of captures return
    /// when the graph is gone.
    ///
    /// # Errors
    /// [`Error::NotOnGpu`] for the CPU.
    pub unsafe fn from_raw(device: &Device, stream: *mut c_void) -> Result<Stream> {
        let context = device.context().ok_or(Error::NotOnGpu { what: "a CUDA stream" })?;
        Ok(Stream::with(*device, Some(Queue::new(context, stream.cast(), false))))
    }

    fn with(device: Device, queue: Option<Queue>) -> Stream {
        Stream(Arc::new(Inner { device, queue, capture: Mutex::default() }))
    }

    /// Where the work runs.
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
        let _bound = queue.context.bind()?;
        // SAFETY: the stream lives as long as `self` (`Queue`, or point 2 of `from_raw`).
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(queue.raw.0) })
    }

    /// Lets later work on this stream wait for the event, which may be of another stream or device.
    /// On the CPU the calling thread waits.
    ///
    /// # Errors
    /// [`Error::InCapture`] when one of stream and event is part of a capture and the other is not,
    /// [`Error::Cuda`].
    pub fn wait(&self, event: &Event) -> Result<()> {
        event.hold(self)
    }

    /// Lets later work on this stream wait for everything that is queued on `other` now.
    ///
    /// # Errors
    /// As [`wait`](Stream::wait).
    pub fn wait_for(&self, other: &Stream) -> Result<()> {
        if other.device().is_cpu() || self.is_same_queue(other) {
            return Ok(());
        }
        let event = Event::new(other.device(), false)?;
        event.record(other)?;
        self.wait(&event)
    }

    /// Whether the stream is being captured into a graph, here or by another library.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn is_capturing(&self) -> Result<bool> {
        self.session()?.map_or(Ok(false), |session| session.is_capturing())
    }

    /// Whether work on the other stream runs after what is queued on this one, because they are
    /// clones of each other or wrap the same `CUstream`. All streams of the CPU are the same.
    pub fn is_same_queue(&self, other: &Stream) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
            || (self.device() == other.device() && self.raw() == other.raw())
    }

    /// Opens the stream for queueing; `None` on the CPU. Two sessions are never open in one thread:
    /// they hold locks.
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

/// What queued work uses.
pub(crate) trait Kept: Send + Sync {
    /// Must be called before work that uses it is queued on `stream`, and not while a session is
    /// open.
    fn prepare(&self, stream: &Stream) -> Result<()>;

    /// For what one piece of work uses at a time (`turns.rs`): the stream that used it last.
    fn turn(&self) -> Option<&Mutex<Stream>>;
}

/// A capture that was begun here.
pub(crate) struct Recording {
    /// That no other capture of the process has.
    number: u64,
    /// What the graph will use.
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

    /// The capture in progress, if there is one that was begun here.
    pub(crate) fn capture(&mut self) -> &mut Option<Recording> {
        &mut self.capture
    }

    /// The number of the capture in progress, if there is one that was begun here.
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

    /// The tile counters of a kernel that is queued next: those of the stream, or of the graph that
    /// it becomes a part of.
    pub(crate) fn tile_counter(&self) -> Result<*mut u32> {
        let slot = if self.is_capturing()? {
            TileCounters::of(self.context())?.of_capture(self.raw())?
        } else if let Some(&slot) = self.queue.counter.get() {
            slot
        } else {
            let counters = TileCounters::of(self.context())?;
            let slot = match self.queue.owned {
                true => counters.of_stream()?,
                false => counters.of_foreign_stream(self.raw())?,
            };
            // The session is the only one of this queue, so nobody else has set it.
            *self.queue.counter.get_or_init(|| slot)
        };
        Ok(slot.address())
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

    /// Waits for the stream while it is kept from other threads.
    pub(crate) fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream lives and its context is current.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw()) })
    }
}
