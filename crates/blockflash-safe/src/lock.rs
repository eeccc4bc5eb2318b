use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks; a panic of another thread while it held the lock leaves the lists behind our locks in a
/// valid state.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
