use crate::{Communicator, Error, Result};
use blockflash_ops::{DType, Device, Stream, Tensor, View, ViewMut};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Ranks in threads of one process that share a device: the CPU, or one GPU. For tests, and for
/// programs that also run where there are no several GPUs.
#[derive(Debug)]
pub struct Memory {
    shared: Arc<Shared>,
    rank: usize,
    timeout: Duration,
    stream: Stream,
    gathers: bool,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Messages under way, by sender and receiver.
    messages: Vec<Vec<VecDeque<Tensor>>>,
    /// Ranks that are gone or have given up.
    gone: Vec<bool>,
}

impl Memory {
    /// The ranks of a group, in order, to be moved to threads. A rank waits no longer than
    /// `timeout` for another one.
    ///
    /// # Errors
    /// The device's errors.
    pub fn group(device: &Device, world: usize, timeout: Duration) -> Result<Vec<Memory>> {
        let messages = (0..world).map(|_| (0..world).map(|_| VecDeque::new()).collect()).collect();
        let state = Mutex::new(State { messages, gone: vec![false; world] });
        let shared = Arc::new(Shared { state, changed: Condvar::new() });
        let rank = |rank| {
            let stream = device.urgent_stream()?;
            Ok(Memory { shared: shared.clone(), rank, timeout, stream, gathers: false })
        };
        (0..world).map(rank).collect()
    }

    /// Keys are gathered, as by [`Nccl::gathering`](crate::Nccl::gathering). All ranks do it, or
    /// none.
    pub fn gathering(mut self) -> Memory {
        self.gathers = true;
        self
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_peer(&self, peer: usize) -> Result<()> {
        let expected = || format!("another rank than {} of {}", self.rank, self.world());
        let exists = peer < self.world() && peer != self.rank;
        let error = || Error::Size { what: "a peer", value: peer, expected: expected() };
        exists.then_some(()).ok_or_else(error)
    }

    fn send(&self, to: usize, view: &View<'_>) -> Result<()> {
        let message = view.to_tensor(&self.stream)?;
        self.state().messages[self.rank][to].push_back(message);
        self.shared.changed.notify_all();
        Ok(())
    }

    fn receive(&self, from: usize, mut view: ViewMut<'_>) -> Result<()> {
        let message = self.next(from)?;
        let text = |dtype, shape: &[usize]| format!("{dtype} {shape:?}");
        if message.dtype() != view.dtype() || message.shape() != view.shape() {
            return Err(Error::Message {
                from,
                expected: text(view.dtype(), view.shape()),
                found: text(message.dtype(), message.shape()),
            });
        }
        Ok(view.copy_from(&message.view(), &self.stream)?)
    }

    /// The next message of a peer.
    fn next(&self, from: usize) -> Result<Tensor> {
        let deadline = Instant::now() + self.timeout;
        let mut state = self.state();
        loop {
            if let Some(message) = state.messages[from][self.rank].pop_front() {
                return Ok(message);
            }
            if state.gone[from] {
                return Err(Error::Gone { rank: from });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Timeout { rank: from, timeout: self.timeout });
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Communicator for Memory {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.state().gone.len()
    }

    fn stream(&self) -> &Stream {
        &self.stream
    }

    fn exchange(
        &self,
        sends: &[(usize, View<'_>)],
        receives: &mut [(usize, ViewMut<'_>)],
    ) -> Result<()> {
        let peers = sends.iter().map(|(to, _)| *to).chain(receives.iter().map(|(from, _)| *from));
        peers.into_iter().try_for_each(|peer| self.check_peer(peer))?;
        for (to, view) in sends {
            self.send(*to, view)?;
        }
        for (from, view) in receives {
            self.receive(*from, view.reborrow())?;
        }
        Ok(())
    }

    fn gathers(&self) -> bool {
        self.gathers
    }

    fn reserve_gather(&self, _bytes: usize) -> Result<bool> {
        Ok(self.gathers)
    }

    fn window(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        Ok(Tensor::empty(&self.stream, dtype, shape)?)
    }

    fn all_gather(&self, mut slots: ViewMut<'_>) -> Result<()> {
        let others = || (0..self.world()).filter(|&rank| rank != self.rank);
        let own = slots.as_view().slice(0, self.rank..self.rank + 1)?;
        others().try_for_each(|to| self.send(to, &own))?;
        for from in others() {
            self.receive(from, slots.reborrow().slice(0, from..from + 1)?)?;
        }
        Ok(())
    }

    fn wait(&self, stream: &Stream) -> Result<()> {
        Ok(stream.synchronize()?)
    }

    fn give_up(&self, _why: &str) {
        self.state().gone[self.rank] = true;
        self.shared.changed.notify_all();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.give_up("");
    }
}
