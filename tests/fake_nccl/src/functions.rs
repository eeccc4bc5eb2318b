//! The functions of NCCL that blockflash calls.

use crate::collective::{all_gather, register_window};
use crate::state::{Id, receive, state};
use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};
use std::slice;

const SUCCESS: c_int = 0;
const CUDA_ERROR: c_int = 1;
const REMOTE_ERROR: c_int = 6;

/// `ncclUniqueId`.
#[repr(C)]
pub(crate) struct UniqueId(Id);

/// A half of a message.
#[derive(Clone, Copy)]
struct Half {
    address: usize,
    bytes: usize,
    peer: c_int,
    comm: usize,
    is_sent: bool,
}

thread_local! {
    /// What the group of this thread holds.
    static GROUP: RefCell<Vec<Half>> = const { RefCell::new(Vec::new()) };
}

/// What the program has done that it must not do.
#[unsafe(no_mangle)]
fn blockflash_fake_nccl_faults() -> Vec<String> {
    state().faults.clone()
}

/// Where memory is.
#[unsafe(no_mangle)]
fn blockflash_fake_nccl_addresses() -> Vec<u64> {
    state().addresses()
}

macro_rules! nccl {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name($($arg: $type),*) -> c_int {
            $body
        }
    )*};
}

nccl! {
    fn ncclGetVersion(version: &mut c_int) {
        *version = 22_809;
        SUCCESS
    }
    fn ncclGetUniqueId(id: &mut UniqueId) {
        id.0 = [0; 128];
        id.0[..8].copy_from_slice(&state().number().to_le_bytes());
        SUCCESS
    }
    fn ncclCommInitRankConfig(
        comm: &mut usize,
        ranks: c_int,
        id: UniqueId,
        rank: c_int,
        _config: *mut c_void,
    ) {
        *comm = state().join(id.0, rank, ranks);
        SUCCESS
    }
    fn ncclCommGetAsyncError(_comm: usize, code: &mut c_int) {
        *code = SUCCESS;
        SUCCESS
    }
    fn ncclCommFinalize(comm: usize) {
        state().expect_nothing_registered(comm);
        SUCCESS
    }
    fn ncclCommDestroy(comm: usize) {
        state().expect_nothing_registered(comm);
        state().leave(comm);
        SUCCESS
    }
    fn ncclCommAbort(comm: usize) {
        state().leave(comm);
        SUCCESS
    }
    fn ncclGroupStart() {
        SUCCESS
    }
    fn ncclGroupEnd() {
        exchange(GROUP.take())
    }
    fn ncclSend(
        address: usize,
        bytes: usize,
        _type: c_int,
        peer: c_int,
        comm: usize,
        _stream: usize,
    ) {
        let half = Half { address, bytes, peer, comm, is_sent: true };
        GROUP.with_borrow_mut(|group| group.push(half));
        SUCCESS
    }
    fn ncclRecv(
        address: usize,
        bytes: usize,
        _type: c_int,
        peer: c_int,
        comm: usize,
        _stream: usize,
    ) {
        let half = Half { address, bytes, peer, comm, is_sent: false };
        GROUP.with_borrow_mut(|group| group.push(half));
        SUCCESS
    }
    fn ncclMemAlloc(address: &mut u64, bytes: usize) {
        match state().allocate(bytes) {
            Some(found) => *address = found,
            None => return CUDA_ERROR,
        }
        SUCCESS
    }
    fn ncclMemFree(address: u64) {
        state().free(address);
        SUCCESS
    }
    fn ncclCommWindowRegister(
        comm: usize,
        address: u64,
        bytes: usize,
        window: &mut usize,
        flags: c_int,
    ) {
        match register_window(comm, address, bytes, flags) {
            Some(number) => *window = number,
            None => return REMOTE_ERROR,
        }
        SUCCESS
    }
    fn ncclCommWindowDeregister(comm: usize, window: usize) {
        state().deregister(comm, window);
        SUCCESS
    }
    fn ncclAllGather(
        own: u64,
        all: u64,
        count: usize,
        _type: c_int,
        comm: usize,
        _stream: usize,
    ) {
        match all_gather(comm, [own, all], count) {
            Some(()) => SUCCESS,
            None => REMOTE_ERROR,
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(_code: c_int) -> *const c_char {
    c"an error of the fake".as_ptr()
}

/// Sends, and then waits for what is to come.
fn exchange(group: Vec<Half>) -> c_int {
    let (sent, received): (Vec<Half>, Vec<Half>) = group.into_iter().partition(|half| half.is_sent);
    let mut ends = Vec::new();
    for half in sent.iter().chain(&received) {
        let mut state = state();
        let Some(comm) = state.comm(half.comm) else { return REMOTE_ERROR };
        let (id, rank) = (comm.id, comm.rank);
        if half.is_sent {
            // SAFETY: the caller vouches for the memory as it does to NCCL; the fake driver's
            // device memory is host memory.
            let message = unsafe { slice::from_raw_parts(half.address as *const u8, half.bytes) };
            state.send(id, [rank, half.peer], message.to_vec());
        } else {
            ends.push((*half, id, [half.peer, rank]));
        }
    }
    for (half, id, way) in ends {
        let Some(message) = receive(id, way) else { return REMOTE_ERROR };
        let (found, expected) = (message.len(), half.bytes);
        if found != expected {
            state().fault(format!("{found} bytes come from {} and not {expected}", half.peer));
        }
        let bytes = found.min(expected);
        // SAFETY: as above, for writes.
        unsafe { (half.address as *mut u8).copy_from(message.as_ptr(), bytes) };
    }
    SUCCESS
}
