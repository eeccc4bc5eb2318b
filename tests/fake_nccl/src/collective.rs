//! Calls that all ranks make at the same time.

use crate::state::{ARRIVED, Brought, Id, PATIENCE, State, state};
use std::slice;
use std::sync::PoisonError;
use std::time::Instant;

/// `NCCL_WIN_COLL_SYMMETRIC`
const SYMMETRIC: i32 = 1;

/// The number of a window, or none if not all ranks have one.
pub(crate) fn register_window(
    comm: usize,
    address: u64,
    bytes: usize,
    flags: i32,
) -> Option<usize> {
    let all = meet(comm, Brought::Window(bytes))?;
    let mut state = state();
    if flags != SYMMETRIC {
        state.fault("a window is not symmetric");
    }
    if all.iter().any(|other| *other != Brought::Window(bytes)) {
        state.fault("the windows of the ranks are not alike");
    }
    let number = state.register(comm, address, bytes);
    state.comm(comm)?.windows.insert(number, (address, bytes));
    Some(number)
}

/// In place. None if not all ranks take part.
pub(crate) fn all_gather(comm: usize, [own, all]: [u64; 2], count: usize) -> Option<()> {
    let (rank, ranks, place) = {
        let mut state = state();
        let found = state.comm(comm)?;
        let (rank, ranks) = (found.rank as usize, found.ranks as usize);
        let (windows, end) = (found.windows.values(), all + (ranks * count) as u64);
        let inside = |(at, bytes): &&(u64, usize)| *at <= all && end <= *at + *bytes as u64;
        let Some(&(at, _)) = { windows }.find(inside) else {
            state.fault("an all-gather is not in a window");
            return None;
        };
        if own != all + (rank * count) as u64 {
            state.fault("an all-gather is not in place");
        }
        (rank, ranks, (all - at) as usize)
    };
    // SAFETY: the caller vouches for the memory as it does to NCCL; the fake driver's device memory
    // is host memory.
    let slot = unsafe { slice::from_raw_parts(own as *const u8, count) };
    let brought = meet(comm, Brought::Slot(place, slot.to_vec()))?;
    for (other, brought) in (0..ranks).zip(brought).filter(|(other, _)| *other != rank) {
        match brought {
            Brought::Slot(at, slot) if at == place && slot.len() == count => {
                let to = (all as usize + other * count) as *mut u8;
                // SAFETY: as above, for writes; it is in a window that is registered.
                unsafe { to.copy_from(slot.as_ptr(), count) };
            }
            _ => state().fault("the slots of an all-gather are not alike"),
        }
    }
    Some(())
}

/// What all ranks bring to the same call, when all are there.
fn meet(comm: usize, own: Brought) -> Option<Vec<Brought>> {
    let deadline = Instant::now() + PATIENCE;
    let mut state = state();
    let comm = state.comm(comm)?;
    let (rank, ranks, key) = (comm.rank as usize, comm.ranks as usize, (comm.id, comm.calls));
    comm.calls += 1;
    state.brought.entry(key).or_insert_with(|| vec![None; ranks])[rank] = Some(own);
    ARRIVED.notify_all();
    loop {
        if let Some(all) = all(&state, key) {
            return Some(all);
        }
        let left = deadline.checked_duration_since(Instant::now())?;
        state = ARRIVED.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
    }
}

fn all(state: &State, key: (Id, usize)) -> Option<Vec<Brought>> {
    state.brought.get(&key)?.iter().cloned().collect()
}
