//! The threads of the CPU backend.

use blockflash_safe::process_number;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::mem::forget;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// The process that has called [`parallel`] first; 0 before.
static FIRST: AtomicU32 = AtomicU32::new(0);

/// The threads of a process that was forked from that one, with its number.
static FORKED: Mutex<Option<(u32, Arc<ThreadPool>)>> = Mutex::new(None);

/// Does work that uses rayon. A forked process has none of the threads of its parent, for which
/// rayon would wait for ever: there the work gets threads of its own.
pub(crate) fn parallel<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    // A thread of a pool has that pool in its own process.
    if rayon::current_thread_index().is_some() {
        return work();
    }
    let own = process_number();
    match FIRST.compare_exchange(0, own, Relaxed, Relaxed) {
        Err(first) if first != own => in_fork(own, work),
        _ => work(),
    }
}

#[cold]
fn in_fork<R: Send>(own: u32, work: impl FnOnce() -> R + Send) -> R {
    // Never held for long, so that hardly any fork finds it held by a thread that it does not have.
    let slot = || FORKED.lock().unwrap_or_else(PoisonError::into_inner);
    let found = slot().as_ref().filter(|(of, _)| *of == own).map(|(_, pool)| Arc::clone(pool));
    if let Some(pool) = found {
        return pool.install(work);
    }
    if let Ok(made) = ThreadPoolBuilder::new().build() {
        let made = Arc::new(made);
        // A pool of the parent is forgotten, since there is nothing that could end it.
        forget(slot().replace((own, Arc::clone(&made))));
        return made.install(work);
    }
    // No thread can be added, so this one becomes a pool, for as long as it lives.
    forget(ThreadPoolBuilder::new().num_threads(1).use_current_thread().build());
    work()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The Python package tests forks themselves.
    #[test]
    fn a_fork_has_one_pool_of_its_own() {
        let index = || (rayon::current_thread_index(), rayon::current_num_threads());
        assert_eq!(parallel(rayon::current_thread_index), None);
        let (at, count) = in_fork(1, index);
        assert!(at.is_some_and(|at| at < count));
        let first = || FORKED.lock().unwrap().as_ref().map(|(of, pool)| (*of, Arc::as_ptr(pool)));
        let made = first();
        assert!(in_fork(1, || parallel(rayon::current_thread_index)).is_some());
        assert_eq!(first(), made);
        in_fork(2, index);
        assert!(first() != made && first().is_some_and(|(of, _)| of == 2));
    }
}
