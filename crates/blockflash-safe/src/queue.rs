use crate::Result;
use crate::driver::{check, is_captured};
use crate::gpu::{Context, Handle};
use crate::mark::Mark;
use crate::tile_counter::{Slot, TileCounters};
use cudarc::driver::sys;
use std::ptr;
use std::sync::{Arc, OnceLock};

/// Of a stream of ours that is gone: a mark behind its last work, unless none could be made.
pub(crate) type End = OnceLock<Option<Mark>>;

/// A CUDA stream.
pub(crate) struct Queue {
    pub(crate) context: &'static Context,
    pub(crate) raw: Handle<sys::CUstream_st>,
    /// Whether it is ours, and destroyed with this.
    pub(crate) owned: bool,
    /// For launches that are not captured, from the first one on that counts tiles.
    counter: OnceLock<Slot>,
    pub(crate) end: Arc<End>,
}

impl Queue {
    /// A stream of our own. Non-blocking: no hidden order with the legacy default stream of other
    /// libraries.
    pub(crate) fn new(context: &'static Context) -> Result<Queue> {
        let _bound = context.bind()?;
        let mut raw = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: 1. The context is current. 2. The pointer is valid for writes during the call.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        let mut queue = Queue::foreign(context, raw);
        queue.owned = true;
        Ok(queue)
    }

    /// A stream of somebody else.
    pub(crate) fn foreign(context: &'static Context, raw: sys::CUstream) -> Queue {
        let (counter, end) = (OnceLock::new(), Arc::default());
        Queue { context, raw: Handle(raw), owned: false, counter, end }
    }

    /// The tile counters of a kernel that is queued next: those of the stream, or of the graph that
    /// it becomes a part of. The context is current, and nobody else queues.
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
            // What is queued on a captured stream becomes a part of the graph: then the counters
            // stay taken, and memory that was used on the stream is not freed.
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
            //    go. An error has no one to be reported to.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw.0) };
        }
        // Nobody else sets it.
        let _ = self.end.set(end);
    }
}
