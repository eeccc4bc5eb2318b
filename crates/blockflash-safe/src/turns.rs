//! Memory that only one piece of queued work uses at a time, on whatever streams the work is
//! queued.
//!
//! Such work takes a turn with the memory before it is queued: its stream waits for everything
//! queued on the stream that used the memory last, and nobody else can take a turn until the work
//! is queued. Captured work does not run, so it takes no turn; each launch of the graph does.

use crate::mark::Mark;
use crate::stream::Session;
use crate::{Error, Result, Stream, lock::lock};
use std::ptr;
use std::sync::{Mutex, MutexGuard};

/// The stream that used the memory last.
pub(crate) type Turn = Mutex<Stream>;

/// The turns of work that is about to be queued on a stream. Must be held until it is queued.
#[derive(Default)]
pub(crate) struct Turns<'m> {
    /// Most launches take one turn, and allocate nothing for it.
    first: Option<Taken<'m>>,
    more: Vec<Taken<'m>>,
}

struct Taken<'m> {
    last: MutexGuard<'m, Stream>,
    before: Before,
}

/// What the work has to wait for.
enum Before {
    /// Nothing: the same stream used the memory last.
    Own,
    /// Work that another stream has queued.
    Mark(Mark),
    /// Work of another stream that is being captured: nothing outside of the capture can wait for
    /// that stream.
    Captured,
}

/// The work to wait for: everything that `last` has queued so far.
fn before(last: &Stream) -> Result<Before> {
    let Some(session) = last.session()? else { return Ok(Before::Own) };
    if session.is_capturing()? {
        return Ok(Before::Captured);
    }
    Mark::behind(session.context(), session.raw()).map(Before::Mark)
}

impl<'m> Turns<'m> {
    /// Must not be called while a session is open.
    pub(crate) fn take(
        turns: impl Iterator<Item = &'m Turn>,
        stream: &Stream,
    ) -> Result<Turns<'m>> {
        let take = |turn: &'m Turn| -> Result<Taken<'m>> {
            let last = lock(turn);
            let before = if last.is_same_queue(stream) { Before::Own } else { before(&last)? };
            Ok(Taken { last, before })
        };
        let mut turns = turns.peekable();
        let Some(first) = turns.next() else { return Ok(Turns::default()) };
        if turns.peek().is_none() {
            return Ok(Turns { first: Some(take(first)?), more: Vec::new() });
        }
        let all = in_order(turns.chain([first]));
        Ok(Turns { first: None, more: all.into_iter().map(take).collect::<Result<_>>()? })
    }

    /// Makes the stream of the session wait for its turns. Work that is queued next in the session
    /// may use the memory.
    pub(crate) fn begin(&mut self, session: &Session<'_>, stream: &Stream) -> Result<()> {
        let turns = self.first.iter_mut().chain(&mut self.more);
        if turns.size_hint().0 == 0 || session.is_capturing()? {
            return Ok(());
        }
        for Taken { last, before } in turns {
            match before {
                Before::Own => continue,
                Before::Mark(mark) => session.wait(mark, None)?,
                Before::Captured => {
                    return Err(Error::InCapture {
                        what: "using memory that the captured stream was the last one to use",
                    });
                }
            }
            **last = stream.clone();
        }
        Ok(())
    }
}

/// Each turn once, in one order for all threads, so that two threads that take the same turns
/// cannot deadlock.
fn in_order<'m>(turns: impl Iterator<Item = &'m Turn>) -> Vec<&'m Turn> {
    let mut turns: Vec<&Turn> = turns.collect();
    turns.sort_by_key(|turn| ptr::from_ref(*turn).addr());
    turns.dedup_by(|a, b| ptr::eq(*a, *b));
    turns
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn turns() -> [Turn; 3] {
        std::array::from_fn(|_| Mutex::new(Device::cpu().stream().unwrap()))
    }

    #[test]
    fn turns_are_taken_once_and_in_one_order() {
        let turns = turns();
        let [a, b, c] = [&turns[0], &turns[1], &turns[2]];
        let addresses = |turns: &[&Turn]| {
            in_order(turns.iter().copied()).iter().map(|turn| ptr::from_ref(*turn)).collect()
        };
        let all: Vec<*const Turn> = addresses(&[a, b, c]);
        assert_eq!(all.len(), 3);
        for order in [[c, b, a], [b, a, c], [c, a, b]] {
            let found: Vec<*const Turn> = addresses(&order);
            assert_eq!(found, all);
        }
        let twice: Vec<*const Turn> = addresses(&[b, a, b, b, a]);
        assert_eq!(twice, all[..2]);
        assert!(in_order(std::iter::empty()).is_empty());
    }

    #[test]
    fn one_at_a_time_and_nobody_waits_for_ever() {
        let turns = turns();
        let stream = Device::cpu().stream().unwrap();
        let users = [const { AtomicUsize::new(0) }; 3];
        let use_them = |order: [usize; 2]| {
            for _ in 0..10_000 {
                let taken = Turns::take(order.iter().map(|&i| &turns[i]), &stream).unwrap();
                assert!(order.iter().all(|&i| users[i].fetch_add(1, Ordering::SeqCst) == 0));
                assert!(order.iter().all(|&i| users[i].fetch_sub(1, Ordering::SeqCst) == 1));
                drop(taken);
            }
        };
        std::thread::scope(|scope| {
            for order in [[0, 1], [1, 0], [1, 2], [2, 0]] {
                scope.spawn(move || use_them(order));
            }
        });
    }
}
