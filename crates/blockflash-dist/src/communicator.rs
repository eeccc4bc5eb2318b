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

    /// Whether large messages lie in memory of [`tensor`](Self::tensor), for which their senders
    /// copy them. The same on all ranks; false if it is not written.
    fn lends(&self) -> bool {
        false
    }

    /// Prepares memory for messages of up to so many bytes. All ranks call this at the same time,
    /// and the largest number counts. Does nothing if it is not written.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    fn reserve(&self, _bytes: usize) -> Result<()> {
        Ok(())
    }

    /// Memory for a message, not initialised, in the order of the communicator's stream. A message
    /// lies in such memory at both ends or at neither.
    ///
    /// # Errors
    /// The device's errors.
    fn tensor(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        Ok(Tensor::empty(self.stream(), dtype, shape)?)
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
    /// timeline. Does nothing if it is not written.
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
    lends: bool,
}

impl Nccl {
    /// # Errors
    /// The device's errors.
    pub fn new(ranks: NcclCommunicator) -> Result<Nccl> {
        let stream = ranks.device().urgent_stream()?;
        Ok(Nccl { ranks, stream, lends: false })
    }

    /// Large messages lie in memory that all ranks know, into which their senders write directly
    /// ([`NcclCommunicator::reserve`]): exchanges are faster and take half of the SMs, but keys are
    /// copied first, and each pair of ranks exchanges addresses when it first uses some memory. All
    /// ranks do it, or none.
    ///
    /// Where [`NcclCommunicator::reserve`] has no effect (NCCL before 2.19, GPUs before Hopper,
    /// several ranks in a process), messages travel as usual and are copied for nothing. With NCCL
    /// 2.28 a process has ended without an error when another rank was lost before the first
    /// exchange of addresses.
    ///
    /// # Errors
    /// The device's errors.
    pub fn direct(ranks: NcclCommunicator) -> Result<Nccl> {
        Ok(Nccl { lends: true, ..Nccl::new(ranks)? })
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

    fn lends(&self) -> bool {
        self.lends
    }

    fn reserve(&self, bytes: usize) -> Result<()> {
        if self.lends {
            self.ranks.reserve(bytes, &self.stream)?;
        }
        Ok(())
    }

    /// Nothing is lent before something is reserved.
    fn tensor(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        Ok(self.ranks.tensor(&self.stream, dtype, shape)?)
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
