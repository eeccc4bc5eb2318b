//! The state of a communicator, and the thread that gives it up when an exchange takes too long.

use super::guard::Guard;
use super::library::{Code, IN_PROGRESS, Nccl, RawComm};
use crate::gpu::{Context, Handle};
use crate::{Error, Event, Result, lock::lock};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// How often the thread looks.
const PERIOD: Duration = Duration::from_millis(20);

/// What the user's threads and the watching thread share.
pub(super) struct Watched {
    pub(super) nccl: &'static Nccl,
    pub(super) context: &'static Context,
    pub(super) timeout: Duration,
    /// The lock is held during every call of NCCL: an abort frees the communicator.
    pub(super) state: Mutex<State>,
    /// Signalled when the communicator is dropped.
    pub(super) end: Condvar,
    pub(super) guard: Arc<Guard>,
}

pub(super) struct State {
    /// `None` before it is made and after an abort.
    pub(super) comm: Option<Handle<c_void>>,
    /// Why the communicator was given up.
    lost: Option<String>,
    /// What is under way; of a communicator that was given up, all-gathers alone.
    pending: VecDeque<Pending>,
    /// Marks that were reached. Destroying one may wait for a lock of the driver, which it keeps
    /// while it waits for the GPU (to load a kernel, say), and so for the exchange that the
    /// watching thread has to abort. So threads of the user destroy them.
    reached: Vec<Event>,
    guard: Arc<Guard>,
    dropped: bool,
}

/// An exchange or an all-gather under way.
struct Pending {
    /// A mark behind it, and when that has to be reached.
    event: Event,
    deadline: Instant,
    work: Work,
}

/// What is watched.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    Exchange,
    Gather,
}

impl Watched {
    pub(super) fn new(
        context: &'static Context,
        name: String,
        timeout: Duration,
    ) -> Result<Watched> {
        let guard = Arc::new(Guard::new(name, timeout));
        let (comm, lost, dropped) = (None, None, false);
        let (pending, reached) = Default::default();
        let state = State { comm, lost, pending, reached, guard: guard.clone(), dropped };
        let (nccl, state) = (Nccl::get()?, Mutex::new(state));
        Ok(Watched { nccl, context, timeout, state, end: Condvar::new(), guard })
    }

    /// Waits until a call on a communicator that does not block is done. The lock is held.
    pub(super) fn settle(&self, call: &'static str, comm: RawComm) -> Result<()> {
        let start = Instant::now();
        loop {
            let mut code: Code = 0;
            // SAFETY: 1. The communicator lives while the lock is held. 2. The pointer is valid
            // for writes during the call.
            self.nccl.check(call, unsafe { (self.nccl.async_error)(comm, &mut code) })?;
            if code != IN_PROGRESS {
                return self.nccl.check(call, code);
            }
            if start.elapsed() > self.timeout {
                return Err(Error::Lost { what: late(call, self.timeout) });
            }
            // Most calls are done within microseconds.
            match start.elapsed() > Duration::from_millis(1) {
                true => std::thread::sleep(Duration::from_micros(100)),
                false => std::thread::yield_now(),
            }
        }
    }

    /// Gives the communicator up: the exchanges that it has queued end, with unspecified results.
    ///
    /// An all-gather by copy engines has the stream wait for a value that another rank writes, and
    /// an abort does not write that. It would rather wait itself, for the device, and the lock
    /// would be held. So while there is such an all-gather, NCCL's communicator is left alone, and
    /// its stream waits. If it is not done after one more timeout, the guard ends the process.
    pub(super) fn give_up(&self, state: &mut State, what: String) {
        let _bound = self.context.bind();
        let stuck = state.gathers();
        if let Some(comm) = state.comm.take().filter(|_| !stuck) {
            // SAFETY: the communicator lives, and is not used after this: it was taken out of the
            // state. There is nobody to report an error to.
            let _ = unsafe { (self.nccl.abort)(comm.0) };
        }
        state.keep_gathers();
        state.lost.get_or_insert(what);
    }

    /// Finds out what is done, and gives the communicator up if something should be.
    pub(super) fn look(&self, state: &mut State) {
        if state.lost.is_some() || state.dropped {
            state.keep_gathers();
        } else if let Some(what) = state.overdue(self.timeout) {
            self.give_up(state, what);
        }
    }

    /// Watches until the communicator is dropped and no all-gather is under way.
    pub(super) fn run(&self) {
        let mut state = lock(&self.state);
        loop {
            self.look(&mut state);
            if state.dropped && state.pending.is_empty() {
                return;
            }
            let waited = self.end.wait_timeout(state, PERIOD);
            state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }
}

impl State {
    /// # Errors
    /// [`Error::Lost`] if the communicator was given up.
    pub(super) fn alive(&self) -> Result<()> {
        self.lost.as_ref().map_or(Ok(()), |what| Err(Error::Lost { what: what.clone() }))
    }

    /// The communicator of NCCL.
    pub(super) fn raw(&self) -> Result<RawComm> {
        let closed = || Error::Lost { what: "it is closed".into() };
        Ok(self.comm.as_ref().ok_or_else(closed)?.0)
    }

    /// Has the work before the event watched.
    pub(super) fn watch(&mut self, event: Event, work: Work, timeout: Duration) {
        self.reached.clear();
        self.pending.push_back(Pending { event, deadline: Instant::now() + timeout, work });
        self.tell_guard();
    }

    /// Ends the watch for anything but all-gathers: there is nothing to give up any more.
    pub(super) fn end(&mut self) {
        self.dropped = true;
        self.keep_gathers();
        self.guard.end();
    }

    /// Leaves all-gathers alone that are not done. Of a device that has failed none is under way.
    fn keep_gathers(&mut self) {
        for pending in std::mem::take(&mut self.pending) {
            match pending.work == Work::Gather && pending.event.is_done().is_ok_and(|done| !done) {
                true => self.pending.push_back(pending),
                false => self.reached.push(pending.event),
            }
        }
        self.tell_guard();
    }

    /// Called after each change of what is under way.
    fn tell_guard(&self) {
        let mut gathers = self.pending.iter().filter(|pending| pending.work == Work::Gather);
        self.guard.expect(gathers.next().map(|oldest| oldest.deadline));
    }

    /// Whether an all-gather is under way.
    pub(super) fn gathers(&self) -> bool {
        let gathers = |pending: &Pending| pending.work == Work::Gather;
        let is_left = |pending: &Pending| !pending.event.is_done().unwrap_or(false);
        self.pending.iter().any(|pending| gathers(pending) && is_left(pending))
    }

    /// What is wrong with the oldest exchange that is not done, if anything is.
    fn overdue(&mut self, timeout: Duration) -> Option<String> {
        while let Some(Pending { event, deadline, work }) = self.pending.front() {
            match event.is_done() {
                Ok(true) => {
                    let reached = self.pending.pop_front().map(|pending| pending.event);
                    self.reached.extend(reached);
                    self.tell_guard();
                }
                Ok(false) => {
                    let what = match work {
                        Work::Exchange => "an exchange",
                        Work::Gather => "an all-gather",
                    };
                    return (Instant::now() > *deadline).then(|| late(what, timeout));
                }
                Err(error) => return Some(error.to_string()),
            }
        }
        None
    }
}

fn late(call: &str, timeout: Duration) -> String {
    format!("{call} was not done after {timeout:?}")
}
