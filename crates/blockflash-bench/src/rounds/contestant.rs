//! Contestants of a round.

use crate::record::Record;
use std::time::Instant;

/// An implementation that takes windows, with the results of its windows.
#[derive(Clone)]
pub(super) struct Contestant {
    pub(super) record: Record,
    pub(super) who: Who,
    pub(super) times: Vec<f64>,
    pub(super) windows: Vec<(Instant, Instant)>,
}

#[derive(Clone, Debug)]
pub(super) enum Who {
    Ours(usize),
    Peer(String),
}

impl Record {
    /// Records the verdict on the output. A wrong output becomes an error, so that it gets no time.
    pub(super) fn judge(&mut self, verified: bool, rel_err: Option<f64>) {
        self.verified = verified;
        // JSON has no infinity and no NaN.
        self.rel_err = rel_err.filter(|rel_err| rel_err.is_finite());
        if !verified {
            let size =
                self.rel_err.map_or("not finite".to_owned(), |rel_err| format!("{rel_err:.1e}"));
            self.error = Some(format!("wrong result: relative error {size}"));
        }
    }
}
