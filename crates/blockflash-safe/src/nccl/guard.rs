//! The thread that ends the process when an all-gather never ends.
//!
//! Nothing aborts an all-gather by copy engines, and the driver may keep any thread that calls it
//! waiting behind one, also the watching thread, which then holds the lock. So this thread takes no
//! lock and calls nothing of the driver: it looks at two atomics.

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How often the thread looks.
const PERIOD: Duration = Duration::from_millis(100);

/// What the thread looks at. It is written with the lock of the communicator held, and always from
/// all that is under way: so no all-gather that ends hides one that was queued meanwhile.
pub(super) struct Guard {
    /// Who it is, for the message.
    name: String,
    timeout: Duration,
    /// Times are milliseconds since then.
    start: Instant,
    /// When the oldest all-gather under way has to be done; 0 if there is none.
    due: AtomicU64,
    /// Whether the communicator was dropped.
    dropped: AtomicBool,
}

impl Guard {
    pub(super) fn new(name: String, timeout: Duration) -> Guard {
        let (due, dropped) = Default::default();
        Guard { name, timeout, start: Instant::now(), due, dropped }
    }

    /// When the oldest all-gather under way has to be done, if there is any.
    pub(super) fn expect(&self, due: Option<Instant>) {
        let since = |due: Instant| millis(due.saturating_duration_since(self.start)).max(1);
        self.due.store(due.map_or(0, since), Ordering::Release);
    }

    /// An all-gather is about to be queued, of which nothing else tells yet.
    pub(super) fn expect_another(&self, due: Instant) {
        if self.due.load(Ordering::Acquire) == 0 {
            self.expect(Some(due));
        }
    }

    /// No all-gather follows. The thread ends when none is under way.
    pub(super) fn end(&self) {
        self.dropped.store(true, Ordering::Release);
    }

    /// Looks until the communicator is dropped and no all-gather is under way.
    pub(super) fn run(&self) {
        let mut was_late = false;
        loop {
            // In this order: whatever is queued is queued before the end.
            let dropped = self.dropped.load(Ordering::Acquire);
            let due = self.due.load(Ordering::Acquire);
            if dropped && due == 0 {
                return;
            }
            let limit = due.saturating_add(millis(self.timeout));
            let is_late = due > 0 && millis(self.start.elapsed()) > limit;
            // Twice, since the process may have been stopped, and the watching thread with it.
            if is_late && was_late {
                self.end_process();
            }
            was_late = is_late;
            thread::sleep(PERIOD);
        }
    }

    fn end_process(&self) -> ! {
        let text = format!(
            "blockflash: {}: an all-gather was not done after {:?}, twice the timeout: another \
             rank is lost. An all-gather by copy engines cannot be aborted, so this process ends.",
            self.name,
            2 * self.timeout
        );
        // Another thread may keep the lock of stderr, and nobody may read what is written there.
        let write = move || writeln!(std::io::stderr(), "{text}");
        if let Ok(writing) = thread::Builder::new().spawn(write) {
            let start = Instant::now();
            while !writing.is_finished() && start.elapsed() < 5 * PERIOD {
                thread::sleep(PERIOD / 10);
            }
        }
        std::process::abort()
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// It ends with the communicator, but not before the last all-gather.
#[test]
fn the_guard_ends_behind_the_last_gather() {
    let guard = Guard::new("a test".into(), Duration::from_secs(60));
    let now = Instant::now();
    thread::scope(|threads| {
        let thread = threads.spawn(|| guard.run());
        guard.expect_another(now + Duration::from_secs(1));
        guard.expect_another(now + Duration::from_secs(2));
        assert!((1000..1100).contains(&guard.due.load(Ordering::Acquire)), "the oldest one counts");
        guard.end();
        thread::sleep(3 * PERIOD);
        assert!(!thread.is_finished());
        guard.expect(None);
        thread.join().unwrap();
    });
    guard.expect(Some(guard.start));
    assert_eq!(guard.due.load(Ordering::Acquire), 1);
}
