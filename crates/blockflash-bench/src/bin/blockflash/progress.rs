//! A progress bar on stderr for work that lasts; nothing if stderr is no terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::time::Duration;

/// Nothing is drawn before the first tick, so work that ends at once shows no bar.
const TICK: Duration = Duration::from_millis(250);
/// Positions that a fraction is told in.
const STEPS: u64 = 1000;

/// Goes away when dropped.
pub struct Progress(ProgressBar);

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
        self.0.inc(amount);
    }

    /// So much is done, of 1.0.
    pub fn fraction(&self, done: f64) {
        self.0.set_position((done * STEPS as f64) as u64);
    }

    fn start(label: &str, total: Option<u64>) -> Self {
        let template = match total {
            Some(_) => "{spinner} {msg} {bar:32} {percent:>3}%  {elapsed} of about {duration}",
            None => "{spinner} {msg} {elapsed}",
        };
        let style =
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr_with_hz(4));
        let bar = bar.with_style(style.progress_chars("━╸ ")).with_message(label.to_owned());
        bar.enable_steady_tick(TICK);
        Self(bar)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        // The line is gone before anything else is printed.
        self.0.finish_and_clear();
    }
}
