use crate::Result;
use crate::driver::{Relaxed, check, is_captured};
use crate::gpu::{Context, Handle};
use crate::mark::Mark;
use crate::tile_counter::{Slot, TileCounters};
use cudarc::driver::sys;
use std::ptr;
use std::sync::{Arc, OnceLock};

/// Set when a stream of ours is gone: a mark behind its last work, or `None` if recording one
/// failed.
pub(crate) type End = OnceLock<Option<Mark>>;

/// A CUDA stream.
pub(crate) struct Queue {
    pub(crate) context: &'static Context,
    pub(crate) raw: Handle<sys::CUstream_st>,
    /// Whether this crate created the stream, which is then destroyed with this value.
    pub(crate) owned: bool,
    /// For launches that are not captured; taken at the first launch of a persistent kernel.
    counter: OnceLock<Slot>,
    pub(crate) end: Arc<End>,
}

impl Queue {
    /// A new stream. It is non-blocking, so it has no implicit order with the legacy default stream
    /// of other libraries. `urgent`: of the highest priority that the GPU has, not of the lowest.
    pub(crate) fn new(context: &'static Context, urgent: bool) -> Result<Queue> {
        let _bound = context.bind()?;
        // A thread may make its stream while it captures another one.
        let _relaxed = Relaxed::enter()?;
        let [mut lowest, mut highest] = [0; 2];
        // SAFETY: 1. The context is current. 2. The pointers are valid for writes.
        let code = unsafe { sys::cuCtxGetStreamPriorityRange(&mut lowest, &mut highest) };
        check("cuCtxGetStreamPriorityRange", code)?;
        let mut raw = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let priority = if urgent { highest } else { lowest };
        // SAFETY: 1. The context is current. 2. The pointer is valid for writes during the call.
        let code = unsafe { sys::cuStreamCreateWithPriority(&mut raw, flags, priority) };
        check("cuStreamCreateWithPriority", code)?;
        let mut queue = Queue::foreign(context, raw);
        queue.owned = true;
        Ok(queue)
    }

    /// A foreign stream.
    pub(crate) fn foreign(context: &'static Context, raw: sys::CUstream) -> Queue {
        let (counter, end) = (OnceLock::new(), Arc::default());
        Queue { context, raw: Handle(raw), owned: false, counter, end }
    }

    /// The tile counters for the kernel that is queued next: the counters of the stream, or of the
    /// graph that captures the launch. The context is current, and no other thread queues.
    pub(crate) fn tile_counter(&self, capturing: bool) -> Result<*mut u32> {
        let counters = || TileCounters::of(self.context);
        if capturing {
            return Ok(counters()?.of_capture(self.raw.0)?.address());
        }
        if let Some(slot) = self.counter.get() {
            return Ok(slot.address());
        }
        let slot = match self.owned {
            true => counters()?.of_stream()?,
            false => counters()?.of_foreign_stream(self.raw.0)?,
        };
        Ok(self.counter.get_or_init(|| slot).address())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        let mut end = None;
        if let Ok(_bound) = self.context.bind() {
            // Work that is queued on a captured stream becomes a part of the graph. In that case
            // the counters stay taken, and memory that was used on the stream is not freed.
            if is_captured(self.raw.0).is_ok_and(|captured| !captured) {
                if let Some(counter) = self.counter.get() {
                    counter.give_back_behind(self.raw.0);
                }
                if Arc::strong_count(&self.end) > 1 {
                    end = Mark::behind(self.context, self.raw.0).ok();
                }
            }
            // SAFETY:
            // 1. We created the stream, and this is its only owner: it is destroyed once.
            // 2. Work that is still queued is finished by the driver before the stream's resources
            //    go. There is nobody to report an error to.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw.0) };
        }
        // Nothing else sets it.
        let _ = self.end.set(end);
    }
}
