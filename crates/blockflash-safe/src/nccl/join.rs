//! How a rank joins its group, and leaves it.

use super::NcclId;
use super::communicator::NcclCommunicator;
use super::library::{Config, RawComm, UniqueId};
use super::watch::{State, Watched};
use crate::gpu::Handle;
use crate::{Device, Error, Result, lock::lock};
use std::ptr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The ids of the ranks of this process.
static IDS: Mutex<Vec<[u8; 128]>> = Mutex::new(Vec::new());

impl NcclCommunicator {
    /// Joins the group of `id` as `rank` of `world`. All ranks do so at the same time.
    ///
    /// # Errors
    /// [`Error::NotOnGpu`], [`Error::NoNccl`], [`Error::Nccl`]; [`Error::Lost`] if not all ranks
    /// have joined within the timeout.
    pub fn new(
        device: &Device,
        id: &NcclId,
        rank: usize,
        world: usize,
        timeout: Duration,
    ) -> Result<NcclCommunicator> {
        NcclCommunicator::join(device, id, (rank, world), timeout, false)
    }

    /// The same where NCCL (2.28 or newer) is asked for collective operations without SMs
    /// (`NCCL_CTA_POLICY_ZERO`), which [`reserve_gather`](Self::reserve_gather) needs. Exchanges
    /// stay as they are. All ranks do so, or none.
    ///
    /// Nothing aborts an [all-gather](Self::all_gather) that another rank does not take part in,
    /// and the driver may keep threads of this process waiting for it. So the process ends, by
    /// [`abort`](std::process::abort) and with a message on stderr, when an all-gather is not done
    /// twice the timeout after it was queued; before that, from the timeout on, calls that can
    /// return are [`Error::Lost`]. A thread sees to that until the communicator is dropped and no
    /// all-gather is under way.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn gathering(
        device: &Device,
        id: &NcclId,
        rank: usize,
        world: usize,
        timeout: Duration,
    ) -> Result<NcclCommunicator> {
        NcclCommunicator::join(device, id, (rank, world), timeout, true)
    }

    fn join(
        device: &Device,
        id: &NcclId,
        (rank, world): (usize, usize),
        timeout: Duration,
        gathers: bool,
    ) -> Result<NcclCommunicator> {
        let context = device.context().ok_or(Error::NotOnGpu { what: "NCCL" })?;
        let refused = |what: String| Error::Nccl { call: "ncclCommInitRankConfig", what };
        let count = i32::try_from(world).ok().filter(|_| rank < world);
        let count = count.ok_or_else(|| refused(format!("rank {rank} of {world}")))?;
        let name = format!("rank {rank} of {world} ({device})");
        let watched = Arc::new(Watched::new(context, name, timeout)?);
        let mut ids = lock(&IDS);
        let direct = std::env::var("NCCL_P2P_DIRECT_DISABLE").is_ok_and(|value| value == "1");
        if ids.contains(&id.to_bytes()) && !direct {
            let what = "two ranks in one process need NCCL_P2P_DIRECT_DISABLE=1 in the environment";
            return Err(refused(what.into()));
        }
        ids.push(id.to_bytes());
        drop(ids);
        // From here on, dropping cleans up.
        let (device, id) = (*device, id.to_bytes());
        let gathers = gathers && watched.nccl.gather.is_some();
        let windows = Arc::default();
        let this = NcclCommunicator { device, rank, world, id, watched, gathers, windows };
        let mut state = lock(&this.watched.state);
        if let Err(error) = this.init(&mut state, count) {
            this.watched.give_up(&mut state, error.to_string());
            return Err(error);
        }
        drop(state);
        let watched = this.watched.clone();
        if gathers {
            let guard = watched.guard.clone();
            std::thread::spawn(move || guard.run());
        }
        std::thread::spawn(move || watched.run());
        Ok(this)
    }

    fn init(&self, state: &mut State, world: i32) -> Result<()> {
        let Watched { nccl, context, .. } = &*self.watched;
        let _bound = context.bind()?;
        let (rank, mut config) = (self.rank as i32, Config::non_blocking(self.gathers));
        let mut raw: RawComm = ptr::null_mut();
        // SAFETY:
        // 1. The context of the GPU is current, and `rank` is one of `world`.
        // 2. The pointers are valid during the call, which copies the configuration and sets the
        //    communicator before it returns.
        let code = unsafe { (nccl.init)(&mut raw, world, UniqueId(self.id), rank, &mut config) };
        if !raw.is_null() {
            state.comm = Some(Handle(raw));
        }
        nccl.check("ncclCommInitRankConfig", code)?;
        self.watched.settle("ncclCommInitRankConfig", raw)
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        let watched = &*self.watched;
        let forgotten = self.forget_window();
        let mut state = lock(&watched.state);
        if let Err(error) = forgotten {
            watched.give_up(&mut state, error.to_string());
        }
        let _bound = watched.context.bind();
        // What was not finished by all ranks is aborted.
        if let Some(comm) = state.comm.take() {
            // SAFETY: the communicator lives, and is used no more after it is destroyed or aborted.
            // There is nobody to report an error to.
            unsafe {
                let code = (watched.nccl.finalize)(comm.0);
                let finished = watched.nccl.check("ncclCommFinalize", code).is_ok()
                    && watched.settle("ncclCommFinalize", comm.0).is_ok();
                let end = if finished { watched.nccl.destroy } else { watched.nccl.abort };
                let _ = end(comm.0);
            }
        }
        state.end();
        watched.end.notify_all();
        let mut ids = lock(&IDS);
        if let Some(at) = ids.iter().position(|id| *id == self.id) {
            ids.swap_remove(at);
        }
    }
}
