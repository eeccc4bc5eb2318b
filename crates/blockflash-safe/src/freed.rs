//! How device memory goes back to where it came from, when no tensor and no graph owns it any more.
//!
//! Memory of the driver's pool is freed in the order of its home stream. Memory of another library
//! has an owner instead, a value that is dropped once the device has finished all work that may use
//! the memory. Nobody waits for that: the work is marked by an event, and later calls look whether
//! it has been reached. Where the owner lends the memory again in the order of the home stream, it
//! is dropped at once.
//!
//! An owner's drop is foreign code, which may take locks (Python's GIL, for example) and may call
//! this crate. So it runs in a thread that called this crate, never in a thread of the driver, and
//! never while this crate holds a lock.

use crate::driver::{Relaxed, check};
use crate::mark::Mark;
use crate::user::User;
use crate::{Error, Result, Stream, lock::lock};
use cudarc::driver::sys;
use std::sync::Mutex;

/// A value that keeps memory of another library valid until it is dropped. It is never looked at;
/// the mutex only makes it shareable between threads.
pub(crate) type Owner = Mutex<Box<dyn Send>>;

/// Device memory on its way back.
pub(crate) struct Freed {
    pub(crate) ptr: u64,
    pub(crate) home: Stream,
    /// Streams other than the home that have used the memory.
    pub(crate) users: Vec<User>,
    /// `None`: the memory comes from the driver's pool.
    pub(crate) owner: Option<Owner>,
    /// The owner may have the memory in the order of the home stream.
    pub(crate) is_lent: bool,
    /// Behind all work that may use the memory of another library; recorded once.
    pub(crate) last_use: Option<Mark>,
}

/// Memory that could not go back yet: one of its streams was being captured, or its owner waits for
/// the device.
static DEFERRED: Mutex<Vec<Freed>> = Mutex::new(Vec::new());

impl Freed {
    /// Gives the memory back, now or in a later call of [`free_deferred`]. No session is open, and
    /// the calling thread holds no lock of this crate.
    pub(crate) fn free(mut self) {
        if !self.is_back() {
            lock(&DEFERRED).push(self);
        }
    }

    /// Whether the memory has been given to the driver, or its owner may be dropped. If it cannot
    /// be found out, for example because the context is lost, the memory is kept.
    fn is_back(&mut self) -> bool {
        self.order_release().is_ok_and(|queued| queued || self.is_unused().unwrap_or(false))
    }

    /// Puts the release, or the mark, behind all work that may use the memory, and says whether
    /// nothing is left to do. An error while one of the streams is being captured, because this
    /// would become part of the graph.
    fn order_release(&mut self) -> Result<bool> {
        if self.last_use.is_some() {
            return Ok(false);
        }
        gather(&self.home, &self.users, "freeing")?;
        let Some(session) = self.home.session()? else { return Ok(true) };
        session.refuse_capture("freeing")?;
        if self.owner.is_some() {
            if self.is_lent || session.is_idle()? {
                return Ok(true);
            }
            self.last_use = Some(Mark::behind(session.context(), session.raw())?);
            return Ok(false);
        }
        // SAFETY:
        // 1. `ptr` comes from `cuMemAllocAsync` and is freed once: `Freed` is made by the only drop
        //    of `DeviceMemory`, and a failed attempt has not freed it.
        // 2. All work that uses it precedes the release: on the home stream by its order; on other
        //    streams because `prepare` noted them and the home stream now waits for their queued
        //    work. No owner is left that could queue more.
        // 3. The stream lives and its context is current.
        check("cuMemFreeAsync", unsafe { sys::cuMemFreeAsync(self.ptr, session.raw()) })?;
        Ok(true)
    }

    /// Whether the device has finished all work that may use the memory of another library.
    fn is_unused(&self) -> Result<bool> {
        // The query must not disturb captures of other threads.
        let _relaxed = Relaxed::enter()?;
        self.last_use.as_ref().map_or(Ok(false), Mark::is_done)
    }
}

/// Makes `home` wait for `users`, unless one of them is being captured: `what` would become part of
/// the graph.
pub(crate) fn gather(home: &Stream, users: &[User], what: &'static str) -> Result<()> {
    for stream in users.iter().filter_map(User::stream).chain([home.clone()]) {
        if stream.is_capturing()? {
            return Err(Error::InCapture { what });
        }
    }
    users.iter().try_for_each(|user| user.precede(home))
}

/// Tries again to give memory back. No session is open, and the calling thread holds no lock of
/// this crate.
pub(crate) fn free_deferred() {
    let mut deferred = std::mem::take(&mut *lock(&DEFERRED));
    let back: Vec<Freed> = deferred.extract_if(.., Freed::is_back).collect();
    lock(&DEFERRED).append(&mut deferred);
    // Last, because an owner's drop may panic or call this crate.
    drop(back);
}
