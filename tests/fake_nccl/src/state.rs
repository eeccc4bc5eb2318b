//! What the fake knows: memory, communicators, and messages under way.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a receiver waits for its sender.
pub(crate) const PATIENCE: Duration = Duration::from_millis(500);
/// More bytes than any GPU has.
const TOO_MUCH: usize = 1 << 40;

/// `ncclUniqueId`, of which the first bytes are a number.
pub(crate) type Id = [u8; 128];

#[derive(Default)]
pub(crate) struct State {
    pub(crate) faults: Vec<String>,
    count: usize,
    memory: BTreeMap<u64, Layout>,
    comms: HashMap<usize, Comm>,
    messages: HashMap<(Id, [i32; 2]), VecDeque<Vec<u8>>>,
    /// What ranks have brought to collective calls, by the number of the call.
    pub(crate) brought: HashMap<(Id, usize), Vec<Option<Brought>>>,
}

/// What a rank brings to a collective call.
#[derive(Clone, PartialEq)]
pub(crate) enum Brought {
    /// Bytes.
    Window(usize),
    /// Where it is in the window, and what is there.
    Slot(usize, Vec<u8>),
}

pub(crate) struct Comm {
    pub(crate) id: Id,
    pub(crate) rank: i32,
    pub(crate) ranks: i32,
    /// How many collective calls it has made.
    pub(crate) calls: usize,
    /// The memory of registrations.
    registered: HashMap<usize, u64>,
    /// Windows: where they are, and their bytes.
    pub(crate) windows: HashMap<usize, (u64, usize)>,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);
pub(crate) static ARRIVED: Condvar = Condvar::new();

pub(crate) fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// A number that is not 0.
    pub(crate) fn number(&mut self) -> usize {
        self.count += 1;
        self.count
    }

    pub(crate) fn fault(&mut self, what: impl Into<String>) {
        self.faults.push(what.into());
    }

    pub(crate) fn addresses(&self) -> Vec<u64> {
        self.memory.keys().copied().collect()
    }

    pub(crate) fn allocate(&mut self, bytes: usize) -> Option<u64> {
        let layout = Layout::from_size_align(bytes.max(1), 1 << 21).ok()?;
        if bytes > TOO_MUCH {
            return None;
        }
        // SAFETY: the size is not 0.
        let address = unsafe { alloc_zeroed(layout) } as u64;
        self.memory.insert(address, layout);
        Some(address)
    }

    pub(crate) fn free(&mut self, address: u64) {
        if self.comms.values().any(|comm| comm.registered.values().any(|at| *at == address)) {
            self.fault("memory is freed that is registered");
        }
        match self.memory.remove(&address) {
            // SAFETY: allocated with this layout, and taken out, so freed once.
            Some(layout) => unsafe { dealloc(address as *mut u8, layout) },
            None => self.fault("memory is freed that NCCL has not given"),
        }
    }

    pub(crate) fn join(&mut self, id: Id, rank: i32, ranks: i32) -> usize {
        let number = self.number();
        let (registered, windows) = Default::default();
        self.comms.insert(number, Comm { id, rank, ranks, calls: 0, registered, windows });
        number
    }

    pub(crate) fn comm(&mut self, comm: usize) -> Option<&mut Comm> {
        if !self.comms.contains_key(&comm) {
            self.fault("a communicator that is not there");
        }
        self.comms.get_mut(&comm)
    }

    /// Before a communicator ends in the regular way.
    pub(crate) fn expect_nothing_registered(&mut self, comm: usize) {
        if self.comm(comm).is_some_and(|comm| !comm.registered.is_empty()) {
            self.fault("a communicator ends with memory that is registered");
        }
    }

    pub(crate) fn leave(&mut self, comm: usize) {
        if self.comms.remove(&comm).is_none() {
            self.fault("a communicator ends twice");
        }
    }

    pub(crate) fn register(&mut self, comm: usize, address: u64, bytes: usize) -> usize {
        if self.memory.get(&address).is_none_or(|layout| layout.size() < bytes) {
            self.fault("memory is registered that is not there");
        }
        let number = self.number();
        if let Some(comm) = self.comm(comm) {
            comm.registered.insert(number, address);
        }
        number
    }

    pub(crate) fn deregister(&mut self, comm: usize, handle: usize) {
        let Some(comm) = self.comm(comm) else { return };
        comm.windows.remove(&handle);
        if comm.registered.remove(&handle).is_none() {
            self.fault("a registration ends twice");
        }
    }

    pub(crate) fn send(&mut self, id: Id, way: [i32; 2], message: Vec<u8>) {
        self.messages.entry((id, way)).or_default().push_back(message);
        ARRIVED.notify_all();
    }
}

/// The next message, or none if none comes.
pub(crate) fn receive(id: Id, way: [i32; 2]) -> Option<Vec<u8>> {
    let deadline = Instant::now() + PATIENCE;
    let mut state = state();
    loop {
        if let Some(message) = state.messages.get_mut(&(id, way)).and_then(VecDeque::pop_front) {
            return Some(message);
        }
        let left = deadline.checked_duration_since(Instant::now())?;
        state = ARRIVED.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
    }
}
