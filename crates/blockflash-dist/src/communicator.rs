use crate::Result;
use blockflash_ops::{DType, Stream, Tensor, View, ViewMut};
use blockflash_safe::NcclCommunicator;

/// A rank of a group that exchanges tensors. All ranks make the same calls in the same order.
pub trait Communicator {
    /// Number of this rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world(&self) -> usize;

    /// The stream of this rank's device in whose order exchanges happen.
    fn stream(&self) -> &Stream;

    /// Sends and receives contiguous tensors, each to or from the given rank. Messages between two
    /// ranks arrive in the order in which they are named. The call may wait for the other ranks to
    /// make theirs, but not for tensors of a GPU.
    ///
    /// # Errors
    /// [`Error::Message`](crate::Error::Message) or the communicator's own error if the peer sends
    /// something else, [`Error::Timeout`](crate::Error::Timeout) and
    /// [`Error::Gone`](crate::Error::Gone) for a peer that does not answer; the device's errors.
    fn exchange(
        &self,
        sends: &[(usize, View<'_>)],
        receives: &mut [(usize, ViewMut<'_>)],
    ) -> Result<()>;

    /// Whether tensors of all ranks can be gathered ([`all_gather`](Self::all_gather)), beside
    /// which attention does not slow down. The same on all ranks; false if it is not written.
    fn gathers(&self) -> bool {
        false
    }

    /// Prepares a window for up to this many bytes of each rank, and says whether there is one, the
    /// same on all ranks. All ranks call this at the same time, and the largest number counts.
    /// There is none if it is not written.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    fn reserve_gather(&self, _bytes: usize) -> Result<bool> {
        Ok(false)
    }

    /// A tensor in the window, not initialised, in the order of the communicator's stream. There is
    /// one at a time, not larger than what was prepared.
    ///
    /// # Errors
    /// The communicator's own; [`Error::Size`](crate::Error::Size) if it is not written.
    fn window(&self, _dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let (what, value) = ("the number of elements of a window", shape.iter().product());
        Err(crate::Error::Size { what, value, expected: "0, as there are no windows".into() })
    }

    /// Gathers a slot of each rank, in the order of the communicator's stream: `slots` is
    /// `[ranks, ...]`, contiguous, in a tensor of [`window`](Self::window). The slot of this rank
    /// goes to the same place in the windows of the others, and theirs come. No rank's window is
    /// written before its communicator's stream has done what was queued on it before. The call may
    /// wait for the other ranks to make theirs, but not for tensors of a GPU.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange); [`Error::Size`](crate::Error::Size) if it is not written.
    fn all_gather(&self, slots: ViewMut<'_>) -> Result<()> {
        let (what, value) = ("the number of slots of an all-gather", slots.shape()[0]);
        Err(crate::Error::Size { what, value, expected: "0, as there are no windows".into() })
    }

    /// Waits until everything queued on a stream is done, and not without end for other ranks: only
    /// after it is it known that what was received is right.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    fn wait(&self, stream: &Stream) -> Result<()>;

    /// Tells the other ranks that this one cannot go on.
    fn give_up(&self, why: &str);

    /// Called before work on `stream` that fills its device, beside an exchange that was queued a
    /// moment ago: lets that find its place on the device first. Does nothing if it is not written.
    ///
    /// # Errors
    /// The device's errors.
    fn head_start(&self, _stream: &Stream) -> Result<()> {
        Ok(())
    }

    /// Called where the attention of a step begins, when its keys are there, and where it ends, in
    /// the order of `stream`: a communicator that wraps another one can record events, for a
    /// timeline. It is called so for each part of the heads that are gathered. Does nothing if it
    /// is not written.
    ///
    /// # Errors
    /// The device's errors.
    fn mark(&self, _mark: Mark, _stream: &Stream) -> Result<()> {
        Ok(())
    }
}

/// A place in the work of a rank: see [`Communicator::mark`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// The attention of a step begins; steps count from 0.
    Begin(usize),
    /// It ends.
    End(usize),
}

/// Ranks with a GPU each, on one host or several, by NCCL.
#[derive(Debug)]
pub struct Nccl {
    ranks: NcclCommunicator,
    stream: Stream,
    gathers: bool,
}

impl Nccl {
    /// # Errors
    /// The device's errors.
    pub fn new(ranks: NcclCommunicator) -> Result<Nccl> {
        let stream = ranks.device().urgent_stream()?;
        Ok(Nccl { ranks, stream, gathers: false })
    }

    /// Where keys are divided among all ranks, the forward pass gathers the keys and values of all
    /// of them into a window ([`NcclCommunicator::reserve_gather`]), which the copy engines of the
    /// GPUs do, so that attention has all SMs. The ranks come from
    /// [`NcclCommunicator::gathering`]. All ranks do it, or none.
    ///
    /// The window takes `2 · seqlen · heads of keys · head_dim` elements on each GPU, up to
    /// rounding, of the largest call, until the communicator is dropped. Where few keys are of use,
    /// under a window mask, say, and where there can be no window of memory, keys travel as with
    /// [`new`](Self::new).
    ///
    /// An all-gather cannot be aborted. If a rank is lost, work that the others have queued behind
    /// it stays on their GPUs. From the timeout on, calls that can return have a typed error; a
    /// thread that the driver keeps waiting has none. After twice the timeout the process ends with
    /// a message on stderr, whatever its threads do ([`NcclCommunicator::gathering`]).
    ///
    /// # Errors
    /// The device's errors.
    pub fn gathering(ranks: NcclCommunicator) -> Result<Nccl> {
        Ok(Nccl { gathers: true, ..Nccl::new(ranks)? })
    }
}

impl Communicator for Nccl {
    fn rank(&self) -> usize {
        self.ranks.rank()
    }

    fn world(&self) -> usize {
        self.ranks.world()
    }

    fn stream(&self) -> &Stream {
        &self.stream
    }

    fn exchange(
        &self,
        sends: &[(usize, View<'_>)],
        receives: &mut [(usize, ViewMut<'_>)],
    ) -> Result<()> {
        Ok(self.ranks.exchange(sends, receives, &self.stream)?)
    }

    fn gathers(&self) -> bool {
        self.gathers
    }

    fn reserve_gather(&self, bytes: usize) -> Result<bool> {
        Ok(self.gathers && self.ranks.reserve_gather(bytes, &self.stream)?)
    }

    fn window(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        Ok(self.ranks.window(&self.stream, dtype, shape)?)
    }

    fn all_gather(&self, mut slots: ViewMut<'_>) -> Result<()> {
        Ok(self.ranks.all_gather(&mut slots, &self.stream)?)
    }

    fn wait(&self, stream: &Stream) -> Result<()> {
        Ok(self.ranks.wait(stream)?)
    }

    fn give_up(&self, why: &str) {
        self.ranks.abort(why);
    }

    /// Fills 16 MiB that nobody reads, some 10 µs, by CTAs that end soon.
    fn head_start(&self, stream: &Stream) -> Result<()> {
        Tensor::zeros(stream, DType::F32, &[1 << 22])?;
        Ok(())
    }
}
