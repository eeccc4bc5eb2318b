//! Owned memory: aligned host memory, and device memory that lives exactly as long as queued work
//! needs it.

use crate::driver::{Relaxed, check};
use crate::freed::{Freed, Owner, free_deferred, gather};
use crate::stream::{Kept, Session};
use crate::turns::Turn;
use crate::user::User;
use crate::{Error, Event, Result, Stream, lock::lock};
use cudarc::driver::sys;
use std::slice;
use std::sync::Mutex;

/// Alignment of host memory in bytes: a cache line, and as much as any vector instruction asks for.
pub(crate) const HOST_ALIGNMENT: usize = 64;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Line([u8; HOST_ALIGNMENT]);

/// Host memory: its own, aligned to [`HOST_ALIGNMENT`], or another library's.
pub(crate) enum HostMemory {
    Own { lines: Vec<Line>, bytes: usize },
    Foreign(ForeignHostMemory),
}

/// Work on the CPU is done when its call returns, so the owner is dropped with the memory.
pub(crate) struct ForeignHostMemory {
    ptr: *mut u8,
    bytes: usize,
    _owner: Owner,
}

// SAFETY: the memory is valid in every thread until the owner is dropped (promise 1 of
// `Tensor::from_raw`), and the owner is `Send`.
unsafe impl Send for ForeignHostMemory {}
// SAFETY: as above; the memory is written through an exclusive reference only.
unsafe impl Sync for ForeignHostMemory {}

impl HostMemory {
    pub(crate) fn filled(bytes: usize, value: u8) -> Result<HostMemory> {
        let count = bytes.div_ceil(HOST_ALIGNMENT);
        let mut lines = Vec::new();
        lines.try_reserve_exact(count).map_err(|_| Error::OutOfMemory { bytes })?;
        lines.resize(count, Line([value; HOST_ALIGNMENT]));
        Ok(HostMemory::Own { lines, bytes })
    }

    /// Memory of another library.
    ///
    /// # Safety
    /// Until the owner is dropped, `ptr` is valid for reads and writes of `bytes`, which fit into
    /// `isize`, in every thread. Others write to it only while the value is not borrowed, and read
    /// it only while it is not borrowed exclusively.
    pub(crate) unsafe fn foreign(ptr: *mut u8, bytes: usize, owner: Owner) -> HostMemory {
        HostMemory::Foreign(ForeignHostMemory { ptr, bytes, _owner: owner })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            HostMemory::Own { lines, bytes } => &bytemuck::cast_slice(lines)[..*bytes],
            // SAFETY: the promise of `foreign`; the owner lives, and the borrow of `self` keeps
            // others from writing.
            HostMemory::Foreign(memory) => unsafe {
                slice::from_raw_parts(memory.ptr, memory.bytes)
            },
        }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            HostMemory::Own { lines, bytes } => &mut bytemuck::cast_slice_mut(lines)[..*bytes],
            // SAFETY: as in `bytes`; the borrow is exclusive.
            HostMemory::Foreign(memory) => unsafe {
                slice::from_raw_parts_mut(memory.ptr, memory.bytes)
            },
        }
    }
}

/// Device memory that became valid in the order of a stream, its home. It was allocated in that
/// order and is freed in it, or it belongs to another library and is given back when no work uses
/// it any more: see `freed.rs`. That begins when neither the tensor nor a graph that was captured
/// from its use is left.
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
    /// For memory of another library.
    owner: Option<Owner>,
    /// Whether the owner takes the memory back in the order of the home.
    is_lent: bool,
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
            let what = "stream-ordered allocation";
            return Err(Error::Unsupported { device: *home.device(), what });
        }
        let device = *home.device();
        // The driver reports absurd sizes as invalid rather than as too large.
        if bytes as u64 > context.properties.memory_bytes {
            return Err(Error::DeviceOutOfMemory { device, bytes });
        }
        let mut ptr = 0;
        // SAFETY:
        // 1. The stream lives and its context is current.
        // 2. The pointer is valid for writes during the call. The driver refuses 0 bytes, so at
        //    least one is asked for.
        let code = unsafe { sys::cuMemAllocAsync(&mut ptr, bytes.max(1), session.raw()) };
        if code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(Error::DeviceOutOfMemory { device, bytes });
        }
        check("cuMemAllocAsync", code)?;
        let memory = DeviceMemory::new(ptr, home, None);
        if zeroed && bytes > 0 {
            // SAFETY:
            // 1. The memory was just allocated in the order of this stream, with `bytes` bytes, and
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

    /// Memory of another library, valid in the order of `home` until the owner is dropped.
    pub(crate) fn foreign(ptr: u64, home: &Stream, owner: Owner) -> DeviceMemory {
        free_deferred();
        DeviceMemory::new(ptr, home, Some(owner))
    }

    /// Memory that is valid in the order of `home`. The owner is dropped when no more work can be
    /// queued with it, and all that was precedes what is queued on `home` from then on.
    pub(crate) fn lent(ptr: u64, home: &Stream, owner: Owner) -> DeviceMemory {
        let mut memory = DeviceMemory::foreign(ptr, home, owner);
        memory.is_lent = true;
        memory
    }

    fn new(ptr: u64, home: &Stream, owner: Option<Owner>) -> DeviceMemory {
        let (home, users) = (home.clone(), Mutex::default());
        DeviceMemory { ptr, home, users, turn: None, owner, is_lent: false }
    }

    /// From now on, work uses the memory in turns, after the work that is queued on its home: see
    /// `turns.rs`.
    pub(crate) fn use_in_turns(&mut self) {
        self.turn = Some(Turn::new(self.home.clone()));
    }

    pub(crate) fn ptr(&self) -> u64 {
        self.ptr
    }

    /// Whether the memory is [lent](Self::lent).
    pub(crate) fn is_lent(&self) -> bool {
        self.is_lent
    }

    pub(crate) fn home(&self) -> &Stream {
        &self.home
    }

    /// Whether the memory was used on its home alone, which another library is capturing.
    pub(crate) fn is_captured_elsewhere(&self) -> Result<bool> {
        let alone = lock(&self.users).is_empty();
        let Some(session) = self.home.session()? else { return Ok(false) };
        Ok(alone && session.capture_number().is_none() && session.is_capturing()?)
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
        // What follows must not disturb a capture, of this thread or another one.
        let _relaxed = Relaxed::enter()?;
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
        // are removed.
        users.retain(|user| !user.is_over());
        users.push(stream.user());
        Ok(())
    }

    fn turn(&self) -> Option<&Turn> {
        self.turn.as_ref()
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let users = std::mem::take(&mut *lock(&self.users));
        let (home, owner) = (self.home.clone(), self.owner.take());
        let (ptr, is_lent) = (self.ptr, self.is_lent);
        Freed { ptr, home, users, owner, is_lent, last_use: None }.free();
    }
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
