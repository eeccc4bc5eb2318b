//! Windows: memory that NCCL knows on all ranks, at the same place in each.

use super::communicator::NcclCommunicator;
use super::gather::refused;
use super::library::SYMMETRIC;
use super::watch::Watched;
use crate::driver::Relaxed;
use crate::gpu::Handle;
use crate::{Result, Stream, lock::lock};
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex};

impl NcclCommunicator {
    /// Whether nothing is known that speaks against windows.
    pub(super) fn windows_exist(&self) -> bool {
        self.watched.nccl.gather.is_some() && !lock(&self.windows.state).refused
    }

    /// Memory for a window, used in the order of `home` first.
    pub(super) fn allocate(&self, size: usize, home: &Stream) -> Result<Window> {
        let watched = self.watched.clone();
        let missing = || refused("the library has no windows".into());
        let gather = watched.nccl.gather.as_ref().ok_or_else(missing)?;
        let _bound = watched.context.bind()?;
        let _relaxed = Relaxed::enter()?;
        let mut ptr = ptr::null_mut();
        // SAFETY: 1. The context is current. 2. The pointer is valid for writes during the call.
        watched.nccl.check("ncclMemAlloc", unsafe { (gather.allocate)(&mut ptr, size) })?;
        let (ptr, home, windows) = (Handle(ptr), home.clone(), self.windows.clone());
        Ok(Window { ptr, home, windows, watched })
    }

    /// Registers a window, with all ranks at the same time. There is none after it if NCCL has none
    /// for these GPUs.
    pub(super) fn register(&self, window: &Window, size: usize) -> Result<()> {
        let Watched { nccl, context, .. } = &*self.watched;
        let Some(gather) = &nccl.gather else { return Ok(()) };
        let mut state = self.state()?;
        let register = || {
            let comm = state.raw()?;
            let _bound = context.bind()?;
            let _relaxed = Relaxed::enter()?;
            // If it fails, NCCL's threads may write the handle later, so it is freed in no other
            // case than that of success, and the window may be mapped, so it is registered.
            let handle = Box::into_raw(Box::new(ptr::null_mut::<c_void>()));
            let current = Registration { address: window.ptr.0.addr() as u64, size, handle: None };
            lock(&self.windows.state).current = Some(current);
            // SAFETY:
            // 1. The communicator lives while the lock is held, and its context is current.
            // 2. The memory has this many bytes; it is freed only after NCCL has forgotten it.
            // 3. The pointer stays valid for writes.
            let code = unsafe { (gather.register)(comm, window.ptr.0, size, handle, SYMMETRIC) };
            nccl.check("ncclCommWindowRegister", code)?;
            self.watched.settle("ncclCommWindowRegister", comm)?;
            // SAFETY: made of a box above, and NCCL has done the call that it was for.
            let handle = *unsafe { Box::from_raw(handle) };
            let mut windows = lock(&self.windows.state);
            match handle.is_null() {
                true => windows.current = None,
                false => {
                    let current = windows.current.as_mut();
                    current.into_iter().for_each(|it| it.handle = Some(Handle(handle)));
                }
            }
            Ok(())
        };
        let registered = register();
        registered.map_err(|error| self.out_of_step(&mut state, &error))
    }

    /// Has NCCL forget the window, if there is one, on all ranks. No all-gather is under way on
    /// any.
    pub(super) fn deregister(&self) -> Result<()> {
        let Watched { nccl, context, .. } = &*self.watched;
        let Some(gather) = &nccl.gather else { return Ok(()) };
        let mut state = self.state()?;
        let deregister = || {
            let comm = state.raw()?;
            let handle = lock(&self.windows.state)
                .current
                .as_ref()
                .and_then(|it| Some(it.handle.as_ref()?.0));
            let Some(handle) = handle else { return Ok(()) };
            let _bound = context.bind()?;
            let _relaxed = Relaxed::enter()?;
            // SAFETY: 1. The communicator lives while the lock is held, and its context is current.
            // 2. The handle is that of a window, which is forgotten once.
            let code = unsafe { (gather.deregister)(comm, handle) };
            nccl.check("ncclCommWindowDeregister", code)?;
            self.watched.settle("ncclCommWindowDeregister", comm)?;
            lock(&self.windows.state).current = None;
            Ok(())
        };
        let deregistered = deregister();
        deregistered.map_err(|error| self.out_of_step(&mut state, &error))
    }
}

/// The window of a communicator.
///
/// Nothing tells a sender how large the window of a receiver is. So the windows of all ranks have
/// the size that these have agreed on, and what a rank gathers is in its own.
#[derive(Default)]
pub(super) struct Windows {
    state: Mutex<WindowsState>,
}

#[derive(Default)]
struct WindowsState {
    /// What NCCL knows.
    current: Option<Registration>,
    /// Its memory, if no tensor has it.
    idle: Option<Window>,
    /// Whether NCCL has no windows for these GPUs.
    refused: bool,
}

struct Registration {
    address: u64,
    size: usize,
    /// `None` while it is made, and where that has failed.
    handle: Option<Handle<c_void>>,
}

impl Windows {
    /// Bytes of the window; 0 where there is none.
    pub(super) fn size(&self) -> usize {
        lock(&self.state).current.as_ref().map_or(0, |it| it.size)
    }

    /// Whether the window is there.
    pub(super) fn is_at(&self, address: u64) -> bool {
        lock(&self.state).current.as_ref().is_some_and(|it| it.address == address)
    }

    /// From now on there are no windows.
    pub(super) fn refuse(&self) {
        lock(&self.state).refused = true;
    }

    /// The memory of the window, if no tensor has it.
    pub(super) fn take(&self) -> Option<Window> {
        lock(&self.state).idle.take()
    }

    /// Takes the memory of the window, which is registered, back.
    pub(super) fn put(&self, window: Window) {
        lock(&self.state).idle = Some(window);
    }

    /// Frees memory that is no window any more. If a tensor has it, it goes with that.
    pub(super) fn free(&self) {
        // Dropping it takes the lock.
        let idle = self.take();
        drop(idle);
    }
}

/// Memory of a window. Dropping it takes the lock of `windows`.
pub(super) struct Window {
    pub(super) ptr: Handle<c_void>,
    /// In whose order it was last used.
    pub(super) home: Stream,
    windows: Arc<Windows>,
    watched: Arc<Watched>,
}

impl Drop for Window {
    fn drop(&mut self) {
        let Watched { nccl, context, .. } = &*self.watched;
        let (Ok(_bound), Some(gather)) = (context.bind(), &nccl.gather) else { return };
        // It is forgotten on all ranks at the same time. If that was not done, for example after
        // an abort, NCCL and other ranks may go on naming the memory, so that is kept.
        if self.windows.is_at(self.ptr.0.addr() as u64) {
            return;
        }
        // What was queued when a tensor gave it back.
        if self.home.synchronize().is_err() {
            return;
        }
        // SAFETY: the memory is that of `ncclMemAlloc`. No tensor has it, NCCL does not name it any
        // more, and the device does nothing more with it.
        let _ = unsafe { (gather.free)(self.ptr.0) };
    }
}

/// Gives the window back when the memory is free in the order of its home.
pub(super) struct Lease(pub(super) Option<Window>);

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(window) = self.0.take() else { return };
        let windows = window.windows.clone();
        if windows.is_at(window.ptr.0.addr() as u64) {
            windows.put(window);
        }
    }
}
