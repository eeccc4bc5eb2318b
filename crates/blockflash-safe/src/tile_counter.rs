//! Where the blocks of a persistent kernel count which tile is next.
//!
//! A kernel leaves its counters as it found them, zero. So launches that run one after another may share a slot: those of one
//! stream, and those that one capture makes of one stream. Other launches may run at the same time and get slots of their own.

use crate::driver::check;
use crate::stream::Session;
use crate::{Result, lock};
use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode as Mode, CUstreamCaptureStatus as Status};
use std::collections::HashMap;
use std::ptr;
use std::sync::Mutex;

/// Slots of a context: one per stream, and one per captured stream of each capture, for as long as the process runs.
const SLOTS: usize = 8192;
/// Bytes of a slot: the next tile and the number of blocks that are done, u32 each.
const SLOT_BYTES: usize = 8;

/// The slots of a context.
#[derive(Default)]
pub(crate) struct TileCounters(Mutex<Slots>);

#[derive(Default)]
struct Slots {
    /// Device address of all slots; 0 until the first kernel that counts is loaded. Never freed.
    address: u64,
    taken: HashMap<Key, usize>,
}

/// Whose launches run one after another. No number is used twice in a process.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    /// What is queued on a stream: its number.
    Stream(u64),
    /// What a capture of this crate, which is of one stream, makes part of a graph: the number of the capture.
    Capture(u64),
    /// What a capture by another library makes of a stream, which lives as long as the capture: its handle, and the number that
    /// the driver gave the capture.
    Foreign { stream: usize, capture: u64 },
}

impl TileCounters {
    /// Allocates the slots unless they are there. The context is current.
    pub(crate) fn allocate(&self) -> Result<()> {
        let mut slots = lock(&self.0);
        if slots.address == 0 {
            slots.address = zeroed(SLOTS * SLOT_BYTES)?;
        }
        Ok(())
    }

    /// Address of the slot of a stream; null when there is none left.
    fn slot(&self, key: Key) -> *mut u32 {
        let mut slots = lock(&self.0);
        let (address, next) = (slots.address, slots.taken.len());
        if address == 0 {
            return ptr::null_mut();
        }
        let slot = match slots.taken.get(&key) {
            Some(&slot) => slot,
            None if next < SLOTS => *slots.taken.entry(key).or_insert(next),
            None => return ptr::null_mut(),
        };
        ptr::without_provenance_mut(address as usize + slot * SLOT_BYTES)
    }
}

/// The counters for a kernel that is queued next. Null, without which the kernel takes tiles in fixed turns, when all are taken
/// or the driver does not say what the stream is (the legacy default stream while another one is captured).
pub(crate) fn of(session: &Session<'_>) -> *mut u32 {
    key(session).map_or(ptr::null_mut(), |key| session.context().tile_counters.slot(key))
}

fn key(session: &Session<'_>) -> Option<Key> {
    if let Some(number) = session.capture_number() {
        return Some(Key::Capture(number));
    }
    if session.is_capturing().ok()? {
        return foreign(session);
    }
    let mut number = 0;
    // SAFETY: 1. The stream lives, its context is current, and it is not captured. 2. The pointer is valid for writes.
    let code = unsafe { sys::cuStreamGetId(session.raw(), &mut number) };
    (code == CUresult::CUDA_SUCCESS).then_some(Key::Stream(number))
}

fn foreign(session: &Session<'_>) -> Option<Key> {
    let (mut status, mut capture) = (Status::CU_STREAM_CAPTURE_STATUS_NONE, 0);
    // SAFETY:
    // 1. The stream lives and its context is current.
    // 2. The pointers that are not null are valid for writes during the call; the others say that nothing is asked for.
    let code = unsafe {
        sys::cuStreamGetCaptureInfo_v3(
            session.raw(),
            &mut status,
            &mut capture,
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
        )
    };
    let active = status == Status::CU_STREAM_CAPTURE_STATUS_ACTIVE;
    let stream = session.raw() as usize;
    (code == CUresult::CUDA_SUCCESS && active).then_some(Key::Foreign { stream, capture })
}

/// Device memory of zeros, also while streams are being captured, here or by another library.
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
        // A stream of its own: the default stream may not be used while a blocking stream is captured.
        // SAFETY: 1. The stream was just created. 2. The memory has so many bytes and is used by nobody else yet.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(address, 0, bytes, stream) })?;
        // SAFETY: the stream was just created.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) })?;
        Ok(address)
    };
    let filled = fill();
    // SAFETY: we created the stream, and this is its only owner. An error has no one to be reported to.
    let _ = unsafe { sys::cuStreamDestroy_v2(stream) };
    filled
}

/// While it lives, calls of this thread do not disturb captures.
struct Relaxed(Mode);

impl Relaxed {
    fn enter() -> Result<Relaxed> {
        let mut mode = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is valid for reads and writes during the call, which swaps the thread's mode with it.
        let code = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        check("cuThreadExchangeStreamCaptureMode", code).map(|()| Relaxed(mode))
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as in `enter`. An error has no one to be reported to.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_and_captures_have_slots_of_their_own_until_all_are_taken() {
        let counters = TileCounters::default();
        let foreign = Key::Foreign { stream: 1, capture: 1 };
        assert!(counters.slot(Key::Stream(1)).is_null(), "nothing is allocated yet");
        lock(&counters.0).address = 4096;
        let at = |key| counters.slot(key) as usize;
        assert_eq!([at(Key::Stream(1)), at(Key::Capture(1)), at(foreign)], [4096, 4104, 4112]);
        assert_eq!([at(Key::Stream(1)), at(foreign)], [4096, 4112], "a slot is kept");
        for number in 10..10 + SLOTS as u64 - 3 {
            assert_ne!(at(Key::Stream(number)), 0);
        }
        assert_eq!(at(Key::Stream(9)), 0);
        assert_eq!(at(Key::Capture(1)), 4104);
    }
}
