//! A progress bar on stderr for work over a second; nothing if stderr is no terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, stderr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Work that takes less is not worth a bar.
const PATIENCE: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(100);
/// Positions that a fraction is told in.
const STEPS: u64 = 1000;

/// Shows itself after a second and goes away when dropped.
pub struct Progress {
    done: Arc<AtomicU64>,
    painter: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    /// Work of an unknown length.
    pub fn spinner(label: &str) -> Self {
        Self::start(label, None)
    }

    /// Work of a known length, in any unit.
    pub fn bar(label: &str, total: u64) -> Self {
        Self::start(label, Some(total))
    }

    /// Work whose [fraction](Self::fraction) is known.
    pub fn fractions(label: &str) -> Self {
        Self::start(label, Some(STEPS))
    }

    /// More of the total is done. Threads may call it at once.
    pub fn add(&self, amount: u64) {
        self.done.fetch_add(amount, Ordering::Relaxed);
    }

    /// So much is done, of 1.0.
    pub fn fraction(&self, done: f64) {
        self.done.fetch_max((done * STEPS as f64) as u64, Ordering::Relaxed);
    }

    fn start(label: &str, total: Option<u64>) -> Self {
        let done = Arc::new(AtomicU64::new(0));
        let painter = stderr().is_terminal().then(|| {
            let (stop, stopped) = channel();
            let (label, done) = (label.to_owned(), done.clone());
            let paint = move || {
                if stopped.recv_timeout(PATIENCE) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                let bar = style(label, total);
                while stopped.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                    bar.set_position(done.load(Ordering::Relaxed));
                    bar.tick();
                }
                bar.finish_and_clear();
            };
            (stop, std::thread::spawn(paint))
        });
        Self { done, painter }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.painter.take() {
            drop(stop);
            // The line is gone before anything else is printed.
            let _ = thread.join();
        }
    }
}

fn style(label: String, total: Option<u64>) -> ProgressBar {
    let template = match total {
        Some(_) => "{spinner} {msg} {bar:32} {percent:>3}%  {elapsed} of about {duration}",
        None => "{spinner} {msg} {elapsed}",
    };
    let style =
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr());
    bar.with_elapsed(PATIENCE).with_style(style.progress_chars("━╸ ")).with_message(label)
}
