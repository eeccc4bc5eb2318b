use super::library::BYTES;
use super::watch::{State, Watched, Work};
use super::window::Windows;
use crate::stream::Kept;
use crate::{DType, Device, Error, Event, Layout, Result, Stream, View, ViewMut, lock::lock};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

/// A rank of a group of GPUs that exchange tensors by NCCL (2.18 or newer, loaded at run time).
///
/// No call waits without end for another rank. An exchange that is not done after the timeout is
/// aborted, and the communicator is lost: every later call is [`Error::Lost`]. A thread of its own
/// watches for that. (What cannot be aborted may end the process: see
/// [`gathering`](Self::gathering).) Dropping waits for the other ranks to drop theirs, no longer
/// than the timeout.
///
/// A process may have several ranks, one for each thread and GPU, if `NCCL_P2P_DIRECT_DISABLE=1` is
/// in the environment. NCCL would otherwise read and write tensors of the other GPU of the process
/// directly, which it cannot where they come from a memory pool.
pub struct NcclCommunicator {
    pub(super) device: Device,
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) id: [u8; 128],
    pub(super) watched: Arc<Watched>,
    /// Whether NCCL was asked for all-gathers without SMs, which it has.
    pub(super) gathers: bool,
    pub(super) windows: Arc<Windows>,
}

impl NcclCommunicator {
    /// Number of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// The GPU of this rank.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Sends and receives contiguous tensors, each to or from the given rank, in the order of
    /// `stream`. Messages between two ranks arrive in the order in which they are named. The first
    /// exchange with a rank waits for it to do the same; no call waits for the tensors. If a sender
    /// and a receiver name different sizes, what is received is unspecified, or the exchange ends
    /// by the timeout.
    ///
    /// # Errors
    /// [`Error::Nccl`] for a tensor that is not contiguous, for a rank that does not exist or is
    /// this one, and where something is received in a [`window`](Self::window);
    /// [`Error::DeviceMismatch`], [`Error::InCapture`], [`Error::Lost`].
    pub fn exchange(
        &self,
        sends: &[(usize, View<'_>)],
        receives: &mut [(usize, ViewMut<'_>)],
        stream: &Stream,
    ) -> Result<()> {
        let refused = |what: String| Err(Error::Nccl { call: "exchange", what });
        self.device.expect(stream.device())?;
        for (_, view) in receives.iter() {
            // A sender could write into it directly, and beyond the view.
            if view.as_view().owner().is_some_and(|memory| memory.is_lent()) {
                return refused("a window takes no messages".into());
            }
        }
        let incoming = receives.iter().map(|(from, view)| (*from, view.as_view()));
        for (peer, view) in sends.iter().copied().chain(incoming) {
            if peer >= self.world || peer == self.rank {
                return refused(format!("{peer} is not another rank of {}", self.world));
            }
            if !view.layout().is_contiguous() {
                let (shape, strides) = (view.shape(), view.strides());
                return refused(format!(
                    "a tensor of shape {shape:?} has strides {strides:?}, expected contiguous ones"
                ));
            }
            self.device.expect(view.device())?;
            view.owner().map_or(Ok(()), |memory| memory.prepare(stream))?;
        }
        if let Some(session) = stream.session()? {
            session.refuse_capture("exchanging tensors")?;
        }
        let mut state = self.state()?;
        let queued = self.queue(&mut state, sends, receives, stream);
        queued.map_err(|error| self.out_of_step(&mut state, &error))
    }

    /// Gives the communicator up after an error on this rank that the others do not have.
    pub(super) fn out_of_step(&self, state: &mut State, error: &Error) -> Error {
        let what = error.to_string();
        self.watched.give_up(state, what.clone());
        Error::Lost { what }
    }

    /// Waits until everything queued on a stream is done, and no longer than exchanges may take.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Cuda`].
    pub fn wait(&self, stream: &Stream) -> Result<()> {
        let event = Event::new(stream.device(), false)?;
        event.record(stream)?;
        let start = Instant::now();
        while !event.is_done()? {
            drop(self.state()?);
            if start.elapsed() > Duration::from_millis(1) {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        self.state().map(drop)
    }

    /// Gives the communicator up: exchanges under way end, with unspecified results, and the other
    /// ranks lose theirs after the timeout at the latest. An [all-gather](Self::all_gather) under
    /// way does not end if another rank does not take part in it, and then nothing behind it does:
    /// the process ends after twice the timeout, as [`gathering`](Self::gathering) says.
    pub fn abort(&self, why: &str) {
        self.watched.give_up(&mut lock(&self.watched.state), why.to_owned());
    }

    /// The state of a communicator that is not lost.
    pub(super) fn state(&self) -> Result<MutexGuard<'_, State>> {
        let mut state = lock(&self.watched.state);
        self.watched.look(&mut state);
        state.alive()?;
        Ok(state)
    }

    /// Queues messages that were checked, whose memory is prepared for the stream, and has them
    /// watched.
    fn queue(
        &self,
        state: &mut State,
        sends: &[(usize, View<'_>)],
        receives: &mut [(usize, ViewMut<'_>)],
        stream: &Stream,
    ) -> Result<()> {
        let (nccl, comm) = (self.watched.nccl, state.raw()?);
        let Some(session) = stream.session()? else { return Ok(()) };
        let raw = session.raw().cast();
        // SAFETY: no conditions. Everything until the end of the group runs in this thread.
        nccl.check("ncclGroupStart", unsafe { (nccl.group_start)() })?;
        let mut result = Ok(());
        for (to, view) in sends {
            let (from, to) = (view.device_ptr().unwrap_or(0) as *const _, *to as i32);
            // SAFETY:
            // 1. Communicator and stream live and belong to the current context; `to` is a rank.
            // 2. The memory is contiguous, of this many bytes, and prepared for the stream.
            let code = unsafe { (nccl.send)(from, bytes(view), BYTES, to, comm, raw) };
            result = result.and(nccl.check("ncclSend", code));
        }
        for (from, view) in receives {
            let (to, size) = (view.device_ptr().unwrap_or(0) as *mut _, bytes(&view.as_view()));
            // SAFETY: as above. The memory is borrowed exclusively, and no more than `size` bytes
            // of it are written, whatever the sender sends: they are copied out of NCCL's own
            // memory, since no tensor but a window is registered, and ranks of one process have no
            // direct access (`new`).
            let code = unsafe { (nccl.receive)(to, size, BYTES, *from as i32, comm, raw) };
            result = result.and(nccl.check("ncclRecv", code));
        }
        // SAFETY: ends the group of this thread.
        let code = unsafe { (nccl.group_end)() };
        result.and(nccl.check("ncclGroupEnd", code))?;
        self.watched.settle("ncclGroupEnd", comm)?;
        drop(session);
        let event = Event::new(&self.device, false)?;
        event.record(stream)?;
        state.watch(event, Work::Exchange, self.watched.timeout);
        Ok(())
    }
}

impl std::fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NcclCommunicator({} of {}, {})", self.rank, self.world, self.device)
    }
}

/// Bytes of a contiguous tensor.
fn bytes(view: &View<'_>) -> usize {
    bytes_of(view.layout(), view.dtype())
}

pub(super) fn bytes_of(layout: &Layout, dtype: DType) -> usize {
    layout.elements() * dtype.size()
}
