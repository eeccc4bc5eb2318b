//! The counters from which the CTAs of a persistent kernel take their next tile.
//!
//! A kernel leaves its counters at zero, as it found them. Launches that run one after another may
//! therefore share a slot: the launches of one stream, and the launches that one capture records
//! from one stream. Other launches may run at the same time and get slots of their own.
//!
//! A slot is handed on, at zero again, when nothing can use it any more. For a stream, that is when
//! the stream is gone and its work is done; for a capture, when the graph, all executable graphs
//! made of it and their launches are gone.

use crate::driver::{Relaxed, check};
use crate::gpu::Context;
use crate::{Error, Result, lock::lock};
use cudarc::driver::sys::{self, CUgraph, CUresult, CUstream, CUstreamCaptureStatus as Status};
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::Mutex;

/// Number of slots of a context.
const SLOTS: usize = 8192;
/// Bytes of a slot: the next tile and the number of CTAs that are done, u32 each.
const SLOT_BYTES: usize = 8;

/// The slots of a context.
pub(crate) struct TileCounters {
    /// Device address of all slots, which are never freed.
    address: u64,
    /// Never locked during a call into the driver, because driver threads lock it in [`give_back`].
    slots: Mutex<Slots>,
}

/// A slot in use.
#[derive(Clone, Copy)]
pub(crate) struct Slot {
    counters: &'static TileCounters,
    index: usize,
}

/// What a capture records from a stream, which lives as long as the capture.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Capture {
    stream: usize,
    /// The driver's id of the capture; no id is used twice in a process.
    number: u64,
}

struct Slots {
    limit: usize,
    /// Free slots; the last one is taken next.
    free: Vec<usize>,
    captures: HashMap<Capture, usize>,
    /// Slots of foreign streams, by the driver's id, which is not used twice in a process. Nothing
    /// tells when such a stream is gone, so it keeps its slot.
    foreign: HashMap<u64, usize>,
}

impl Slots {
    fn new(limit: usize) -> Slots {
        let free = (0..limit).rev().collect();
        Slots { limit, free, captures: HashMap::new(), foreign: HashMap::new() }
    }

    fn take(&mut self) -> Result<usize> {
        self.free.pop().ok_or(Error::TileCounters { limit: self.limit })
    }

    fn take_for_stream(&mut self, number: u64) -> Result<usize> {
        if let Some(&index) = self.foreign.get(&number) {
            return Ok(index);
        }
        let index = self.take()?;
        self.foreign.insert(number, index);
        Ok(index)
    }

    fn take_for_capture(&mut self, capture: Capture) -> Result<usize> {
        let index = self.take()?;
        self.captures.insert(capture, index);
        Ok(index)
    }

    fn give_back(&mut self, index: usize, capture: Option<Capture>) {
        capture.map(|capture| self.captures.remove(&capture));
        self.free.push(index);
    }
}

impl TileCounters {
    /// The slots of a context, which is current. They are allocated at the first call.
    pub(crate) fn of(context: &Context) -> Result<&'static TileCounters> {
        static ALL: Mutex<Vec<(usize, &TileCounters)>> = Mutex::new(Vec::new());
        let mut all = lock(&ALL);
        if let Some((_, counters)) = all.iter().find(|(ordinal, _)| *ordinal == context.ordinal) {
            return Ok(counters);
        }
        let slots = Mutex::new(Slots::new(SLOTS));
        let counters = TileCounters { address: zeroed(SLOTS * SLOT_BYTES)?, slots };
        let counters: &'static TileCounters = Box::leak(Box::new(counters));
        all.push((context.ordinal, counters));
        Ok(counters)
    }

    /// A slot for a stream that this crate created, which gives it back when it is destroyed.
    pub(crate) fn of_stream(&'static self) -> Result<Slot> {
        let index = lock(&self.slots).take()?;
        Ok(Slot { counters: self, index })
    }

    /// The slot of a foreign stream, whose context is current.
    pub(crate) fn of_foreign_stream(&'static self, stream: CUstream) -> Result<Slot> {
        let mut number = 0;
        // SAFETY: 1. The stream lives and its context is current. 2. The pointer is valid for
        // writes.
        check("cuStreamGetId", unsafe { sys::cuStreamGetId(stream, &mut number) })?;
        let index = lock(&self.slots).take_for_stream(number)?;
        Ok(Slot { counters: self, index })
    }

    /// The slot for the work that a capture, by this crate or another library, records from a
    /// stream whose context is current. The graph owns the slot.
    pub(crate) fn of_capture(&'static self, stream: CUstream) -> Result<Slot> {
        let (number, graph) = capture_of(stream)?;
        let capture = Capture { stream: stream as usize, number };
        // A session keeps other threads from capturing with this value of the stream; another one
        // that wraps the same `CUstream` would at worst take a second slot.
        if let Some(&index) = lock(&self.slots).captures.get(&capture) {
            return Ok(Slot { counters: self, index });
        }
        let index = lock(&self.slots).take_for_capture(capture)?;
        let slot = Slot { counters: self, index };
        own(graph, Lease { slot, capture: Some(capture) })?;
        Ok(slot)
    }
}

impl Slot {
    pub(crate) fn address(self) -> *mut u32 {
        ptr::without_provenance_mut(self.counters.address as usize + self.index * SLOT_BYTES)
    }

    /// Gives the slot back once everything that is queued on the stream is done. The stream is not
    /// being captured, its context is current, and nothing that uses the slot is queued afterwards.
    pub(crate) fn give_back_behind(self, stream: CUstream) {
        let lease = Box::into_raw(Box::new(Lease { slot: self, capture: None }));
        // SAFETY:
        // 1. The stream lives and its context is current.
        // 2. `give_back` is called at most once, with the pointer that it expects.
        // After a failure the context is lost, and the slot with it.
        let _ = unsafe { sys::cuLaunchHostFunc(stream, Some(give_back), lease.cast()) };
    }
}

/// The driver's ownership of a slot.
struct Lease {
    slot: Slot,
    capture: Option<Capture>,
}

/// Called by the driver. It must neither call the driver nor wait for a thread that does.
///
/// # Safety
/// `lease` comes from `Box::<Lease>::into_raw` and is not used again.
unsafe extern "C" fn give_back(lease: *mut c_void) {
    // SAFETY: the caller's promise.
    let Lease { slot, capture } = *unsafe { Box::from_raw(lease.cast::<Lease>()) };
    lock(&slot.counters.slots).give_back(slot.index, capture);
}

/// Makes a graph that is being captured the owner of a slot. Source: the CUDA programming guide on
/// user objects. Executable graphs take over a copy of every reference, and after their destruction
/// they keep it until their launches have finished.
fn own(graph: CUgraph, lease: Lease) -> Result<()> {
    let lease: *mut c_void = Box::into_raw(Box::new(lease)).cast();
    let mut object = ptr::null_mut();
    let flags = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
    // SAFETY:
    // 1. The pointer is valid for writes during the call.
    // 2. The driver calls `give_back` once, with the pointer that it expects, when the last
    //    reference is gone.
    let code = unsafe { sys::cuUserObjectCreate(&mut object, lease, Some(give_back), 1, flags) };
    if let Err(error) = check("cuUserObjectCreate", code) {
        // SAFETY: there is no object, so nobody else uses the lease.
        unsafe { give_back(lease) };
        return Err(error);
    }
    let flags = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32;
    // SAFETY:
    // 1. The graph is being captured, by a capture that this thread is about to add a kernel to: it
    //    lives, and the driver allows everything with it but to destroy it and to remove nodes.
    // 2. The object was just created, with one reference, which is ours and is moved.
    let code = unsafe { sys::cuGraphRetainUserObject(graph, object, 1, flags) };
    check("cuGraphRetainUserObject", code).inspect_err(|_| {
        // SAFETY: the reference was not moved, so it is still ours. Releasing it gives the slot
        // back.
        let _ = unsafe { sys::cuUserObjectRelease(object, 1) };
    })
}

/// The driver's id of the capture that the stream is in, and the graph.
fn capture_of(stream: CUstream) -> Result<(u64, CUgraph)> {
    let (mut status, mut number, mut graph) =
        (Status::CU_STREAM_CAPTURE_STATUS_NONE, 0, ptr::null_mut());
    // SAFETY:
    // 1. The stream lives and its context is current.
    // 2. The pointers that are not null are valid for writes during the call; null means that the
    //    value is not asked for.
    let code = unsafe {
        sys::cuStreamGetCaptureInfo_v3(
            stream,
            &mut status,
            &mut number,
            &mut graph,
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
        )
    };
    check("cuStreamGetCaptureInfo", code)?;
    if status != Status::CU_STREAM_CAPTURE_STATUS_ACTIVE {
        check("cuStreamGetCaptureInfo", CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)?;
    }
    Ok((number, graph))
}

/// Zeroed device memory; may be called while streams are being captured, here or by another
/// library.
fn zeroed(bytes: usize) -> Result<u64> {
    let _relaxed = Relaxed::enter()?;
    let mut stream = ptr::null_mut();
    let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: 1. The context is current. 2. The pointer is valid for writes during the call.
    check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
    let fill = || {
        let mut address = 0;
        // SAFETY: 1. The context is current. 2. The pointer is valid for writes during the call.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut address, bytes) })?;
        // A stream of its own: the default stream may not be used while a blocking stream is
        // captured. SAFETY: 1. The stream was just created. 2. The memory has these bytes and is
        // used by nobody else yet.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(address, 0, bytes, stream) })?;
        // SAFETY: the stream was just created.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) })?;
        Ok(address)
    };
    let filled = fill();
    // SAFETY: we created the stream, and this is its only owner. There is nobody to report an error
    // to.
    let _ = unsafe { sys::cuStreamDestroy_v2(stream) };
    filled
}

#[cfg(test)]
#[path = "tile_counter_tests.rs"]
mod tests;
