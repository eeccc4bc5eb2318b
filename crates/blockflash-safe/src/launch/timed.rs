//! The driver's share of the host time of a call.

use std::cell::Cell;
use std::time::{Duration, Instant};

thread_local! {
    /// What launches have taken so far, while it is measured in this thread.
    static TAKEN: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// Does some work and returns how long the driver was busy in it with launches of kernels, by this
/// thread: the part of a call's host time that no code of ours can shorten.
#[doc(hidden)]
pub fn driver_time<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let outer = TAKEN.replace(Some(Duration::ZERO));
    let result = work();
    (result, TAKEN.replace(outer).unwrap_or_default())
}

/// A launch, timed if somebody asks.
pub(super) fn timed<T>(launch: impl FnOnce() -> T) -> T {
    let Some(before) = TAKEN.get() else { return launch() };
    let start = Instant::now();
    let result = launch();
    TAKEN.set(Some(before + start.elapsed()));
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_launches_count_and_only_where_they_are_timed() {
        let pause = Duration::from_millis(2);
        let launch = || timed(|| std::thread::sleep(pause));
        launch();
        let ((), none) = driver_time(|| std::thread::sleep(pause));
        assert_eq!(none, Duration::ZERO);
        let (inner, taken) = driver_time(|| {
            launch();
            driver_time(launch).1
        });
        assert!(inner >= pause && taken >= pause, "{inner:?} {taken:?}");
        assert_eq!(TAKEN.get(), None);
    }
}
