//! Tells a forked process from the one that it was forked from.

use std::process;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// One more in each process than in the one that it was forked from.
static NUMBER: AtomicU32 = AtomicU32::new(1);

/// A number that this process has in common with none that it was forked from since the first call;
/// never 0. It costs no system call, which the process id does.
#[inline]
pub fn process_number() -> u32 {
    static COUNTED: LazyLock<bool> = LazyLock::new(count_forks);
    if *COUNTED { NUMBER.load(Ordering::Relaxed) } else { process::id() }
}

/// Lets the C library count forks, and returns whether it does.
#[cfg(unix)]
fn count_forks() -> bool {
    use std::ffi::c_int;

    type Handler = unsafe extern "C" fn();
    unsafe extern "C" {
        fn pthread_atfork(_: Option<Handler>, _: Option<Handler>, child: Option<Handler>) -> c_int;
    }
    extern "C" fn in_child() {
        NUMBER.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: the function has this type in POSIX. The handler does nothing but an atomic addition,
    // which is allowed after a fork, and lives as long as the library is loaded: the C library
    // forgets the handlers of one that is unloaded.
    unsafe { pthread_atfork(None, None, Some(in_child)) == 0 }
}

#[cfg(not(unix))]
fn count_forks() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::process_number;

    /// The Python package tests forks themselves.
    #[test]
    fn a_process_keeps_its_number() {
        assert_eq!(process_number(), 1);
        assert_eq!(std::thread::spawn(process_number).join().unwrap(), 1);
    }
}
