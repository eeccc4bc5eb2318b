//! Owned memory: aligned host memory, and device memory that lives exactly as long as queued work
//! needs it.

use crate::driver::{Relaxed, check};
use crate::stream::{Kept, Session};
use crate::turns::Turn;
use crate::user::User;
use crate::{Error, Event, Result, Stream, lock::lock};
use cudarc::driver::sys;
use std::sync::Mutex;

/// Alignment of host memory in bytes: a cache line, and as much as any vector instruction asks for.
pub(crate) const HOST_ALIGNMENT: usize = 64;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; HOST_ALIGNMENT]);

/// Host memory, aligned to [`HOST_ALIGNMENT`].
pub(crate) struct HostMemory {
    lines: Vec<Line>,
    bytes: usize,
}

impl HostMemory {
    pub(crate) fn filled(bytes: usize, value: u8) -> Result<HostMemory> {
        let count = bytes.div_ceil(HOST_ALIGNMENT);
        let mut lines = Vec::new();
        lines.try_reserve_exact(count).map_err(|_| Error::OutOfMemory { bytes })?;
        lines.resize(count, Line([value; HOST_ALIGNMENT]));
        Ok(HostMemory { lines, bytes })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.bytes]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.bytes]
    }
}

/// Device memory that was allocated in the order of a stream, its home, and is freed in that order
/// when the last owner is dropped. Owners are the tensor and the graphs that were captured from its
/// use.
///
/// The rule that makes every use valid: memory may be used in work on a stream after
/// [`prepare`](Self::prepare) for that stream. It orders the allocation before the use, and notes
/// the stream, so that freeing is ordered after the use.
pub(crate) struct DeviceMemory {
    ptr: u64,
    home: Stream,
    /// Streams other than the home that have used the memory.
    users: Mutex<Vec<User>>,
    /// For memory that only one piece of work may use at a time.
    turn: Option<Turn>,
}

impl DeviceMemory {
    /// Allocates on the device of `home`, which must be a GPU. `zeroed`: all bytes are 0 before
    /// anything else is queued.
    pub(crate) fn allocate(home: &Stream, bytes: usize, zeroed: bool) -> Result<DeviceMemory> {
        free_deferred();
        let what = "a stream-ordered allocation";
        let session = home.session()?.ok_or(Error::NotOnGpu { what })?;
        session.refuse_capture("allocating")?;
        let context = session.context();
        if !context.has_memory_pools {
            return Err(Error::Unsupported {
                device: *home.device(),
                what: "stream-ordered allocation",
            });
        }
        // The driver reports absurd sizes as invalid rather than as too large.
        if bytes as u64 > context.properties.memory_bytes {
            return Err(Error::OutOfMemory { bytes });
        }
        let mut ptr = 0;
        // SAFETY:
        // 1. The stream lives and its context is current.
        // 2. The pointer is valid for writes during the call. The driver refuses 0 bytes, so at
        //    least one is asked for.
        let code = unsafe { sys::cuMemAllocAsync(&mut ptr, bytes.max(1), session.raw()) };
        if code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(Error::OutOfMemory { bytes });
        }
        check("cuMemAllocAsync", code)?;
        let memory = DeviceMemory { ptr, home: home.clone(), users: Mutex::default(), turn: None };
        if zeroed && bytes > 0 {
            // SAFETY:
            // 1. The memory was just allocated in the order of this stream, with so many bytes, and
            //    is used by nobody else.
            // 2. The stream lives and its context is current.
            let code = unsafe { sys::cuMemsetD8Async(ptr, 0, bytes, session.raw()) };
            if let Err(error) = check("cuMemsetD8Async", code) {
                // Freeing opens a session of its own.
                drop(session);
                return Err(error);
            }
        }
        Ok(memory)
    }

    /// From now on, work uses the memory in turns, after the work that is queued on its home: see
    /// `turns.rs`.
    pub(crate) fn use_in_turns(&mut self) {
        self.turn = Some(Turn::new(self.home.clone()));
    }

    pub(crate) fn ptr(&self) -> u64 {
        self.ptr
    }

    pub(crate) fn home(&self) -> &Stream {
        &self.home
    }

    /// Makes the home stream wait for all work on other streams that may use the memory.
    pub(crate) fn gather(&self, what: &'static str) -> Result<()> {
        let users = lock(&self.users).clone();
        gather(&self.home, &users, what)
    }
}

impl Kept for DeviceMemory {
    fn prepare(&self, stream: &Stream) -> Result<()> {
        if stream.is_same_queue(&self.home) {
            return Ok(());
        }
        let mut users = lock(&self.users);
        if users.iter().any(|user| user.is(stream)) {
            return Ok(());
        }
        if self.home.is_capturing()? {
            // Work outside of a capture cannot wait for an event of the capture.
            return Err(Error::InCapture {
                what: "the first use of a tensor on another stream than the captured one",
            });
        }
        if stream.is_capturing()? {
            // A capture cannot wait for work outside of it, but this thread can, before the graph
            // is ever launched.
            let allocated = Event::new(self.home.device(), false)?;
            allocated.record(&self.home)?;
            allocated.synchronize()?;
        } else {
            stream.wait_for(&self.home)?;
        }
        // A program may use any number of streams one after another, so streams whose work is done
        // are removed. The query does not disturb captures of other threads.
        let _relaxed = Relaxed::enter()?;
        users.retain(|user| !user.is_over());
        users.push(stream.user());
        Ok(())
    }

    fn turn(&self) -> Option<&Turn> {
        self.turn.as_ref()
    }
}

/// Makes `home` wait for `users`, unless one of them is being captured: `what` would become part of
/// the graph.
fn gather(home: &Stream, users: &[User], what: &'static str) -> Result<()> {
    for stream in users.iter().filter_map(User::stream).chain([home.clone()]) {
        if stream.is_capturing()? {
            return Err(Error::InCapture { what });
        }
    }
    users.iter().try_for_each(|user| user.precede(home))
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let users = std::mem::take(&mut *lock(&self.users));
        Freed { ptr: self.ptr, home: self.home.clone(), users }.free();
    }
}

/// Memory without owners, on its way back to the driver.
pub(crate) struct Freed {
    ptr: u64,
    home: Stream,
    users: Vec<User>,
}

/// Memory that could not be freed yet, because one of its streams was being captured.
static DEFERRED: Mutex<Vec<Freed>> = Mutex::new(Vec::new());

impl Freed {
    /// Queues the release, or postpones it while one of the streams is being captured, because the
    /// release would become part of the graph.
    fn free(self) {
        if self.try_free().is_err() {
            lock(&DEFERRED).push(self);
        }
    }

    fn try_free(&self) -> Result<()> {
        gather(&self.home, &self.users, "freeing")?;
        let Some(session) = self.home.session()? else { return Ok(()) };
        session.refuse_capture("freeing")?;
        // SAFETY:
        // 1. `ptr` comes from `cuMemAllocAsync` and is freed once: `Freed` is made by the only drop
        //    of `DeviceMemory`, and a failed attempt has not freed it.
        // 2. All work that uses it precedes the release: on the home stream by its order; on other
        //    streams because `prepare` noted them and the home stream now waits for their queued
        //    work. No owner is left that could queue more.
        // 3. The stream lives and its context is current.
        check("cuMemFreeAsync", unsafe { sys::cuMemFreeAsync(self.ptr, session.raw()) })
    }
}

/// Tries again to free memory whose release a capture has postponed.
pub(crate) fn free_deferred() {
    let deferred = std::mem::take(&mut *lock(&DEFERRED));
    deferred.into_iter().for_each(Freed::free);
}

/// Copies host memory to the device and waits for it.
///
/// # Safety
/// `dst` is valid device memory of `src.len()` bytes that was prepared for the stream of the
/// session.
pub(crate) unsafe fn upload(session: &Session<'_>, dst: u64, src: &[u8]) -> Result<()> {
    if src.is_empty() {
        return Ok(());
    }
    session.refuse_capture("copying from host memory")?;
    // SAFETY:
    // 1. The stream lives and its context is current.
    // 2. `src` is valid for reads of its length, `dst` for writes (the caller's promise).
    // 3. The copy may run later, but not longer than the borrow of `src`: the stream is waited for
    //    below, still in the session, so that no capture can come between. (Should waiting fail,
    //    the context is lost and nothing runs any more.)
    check("cuMemcpyHtoDAsync", unsafe {
        sys::cuMemcpyHtoDAsync_v2(dst, src.as_ptr().cast(), src.len(), session.raw())
    })?;
    session.synchronize()
}

/// Copies device memory to the host and waits for it.
///
/// # Safety
/// `src` is valid device memory of `dst.len()` bytes that was prepared for the stream of the
/// session.
pub(crate) unsafe fn download(session: &Session<'_>, dst: &mut [u8], src: u64) -> Result<()> {
    if dst.is_empty() {
        return Ok(());
    }
    session.refuse_capture("copying to host memory")?;
    // SAFETY: as in `upload`, with the roles of the two exchanged; `dst` is borrowed exclusively
    // until the copy is done.
    check("cuMemcpyDtoHAsync", unsafe {
        sys::cuMemcpyDtoHAsync_v2(dst.as_mut_ptr().cast(), src, dst.len(), session.raw())
    })?;
    session.synchronize()
}
