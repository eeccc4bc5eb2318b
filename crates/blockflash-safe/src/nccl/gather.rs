//! All-gathers in memory that NCCL knows on all ranks. Within a host the copy engines of the GPUs
//! move what is gathered, and no SM has a part in it.

use super::communicator::{NcclCommunicator, bytes_of};
use super::library::BYTES;
use super::watch::{State, Work};
use super::window::Lease;
use crate::freed::Owner;
use crate::memory::DeviceMemory;
use crate::stream::Kept;
use crate::tensor::Memory;
use crate::{
    ComputeCapability, DType, Error, Event, Layout, Result, Stream, Tensor, View, ViewMut,
};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Windows are multiples of what the driver maps at a time.
const GRANULE: usize = 2 << 20;
/// Bytes of each rank in the first all-gather, which readies what NCCL makes when it is needed.
const FIRST: usize = 16;

impl NcclCommunicator {
    /// Readies all-gathers of up to `bytes` bytes of each rank, and says whether there are any, the
    /// same on all ranks. All ranks call this at the same time, and the largest number counts, of
    /// all calls. It takes memory for `bytes` bytes of every rank, the [window](Self::window), and
    /// waits for the other ranks and for all that is under way. Where it grows, both windows are
    /// there for a moment; tensors in the one before keep their memory, but nothing is gathered
    /// into them any more.
    ///
    /// There are none if a rank has another constructor than [`gathering`](Self::gathering), or
    /// NCCL before 2.28, or a GPU before Hopper; if it has too little memory; or if NCCL has no
    /// windows for these GPUs.
    ///
    /// # Errors
    /// Those of [`exchange`](Self::exchange) and [`wait`](Self::wait).
    pub fn reserve_gather(&self, bytes: usize, stream: &Stream) -> Result<bool> {
        self.wait_for_gathers()?;
        let able = self.gathers && self.is_hopper() && self.windows_exist();
        let of_all = self.of_all([bytes, usize::from(able)], stream)?;
        if of_all.iter().any(|[_, able]| *able != 1) {
            return Ok(false);
        }
        let bytes = of_all.iter().map(|[bytes, _]| *bytes).max().unwrap_or(0);
        let size = bytes.checked_mul(self.world());
        let size = size.and_then(|size| size.checked_next_multiple_of(GRANULE));
        // The same on all ranks, as is the size of the window that there is.
        let Some(size) = size else { return Ok(false) };
        if size <= self.windows.size() {
            return Ok(size > 0);
        }
        // The window before stays where there is no room for a larger one, since calls that were
        // prepared count on it.
        let window = self.allocate(size, stream);
        let all = |can: bool| -> Result<bool> {
            let of_all = self.of_all([usize::from(can), 0], stream)?;
            Ok(of_all.iter().all(|[can, _]| *can == 1))
        };
        let allocated = all(window.is_ok())?;
        let (true, Ok(window)) = (allocated, window) else { return Ok(false) };
        // NCCL names it no more on any rank: all-gathers are done on all of them.
        self.deregister()?;
        self.windows.free();
        self.register(&window, size)?;
        if !all(self.windows.size() > 0)? {
            self.deregister()?;
            self.windows.refuse();
            return Ok(false);
        }
        self.windows.put(window);
        let mut first = self.window(stream, DType::U8, &[self.world(), FIRST])?;
        self.all_gather(&mut first.view_mut(), stream)?;
        self.wait(stream)?;
        Ok(true)
    }

    /// A tensor in the window, in the order of `stream`, that is not initialised: what is
    /// [gathered](Self::all_gather) is in parts of it. There is one at a time, no larger than
    /// what was [reserved](Self::reserve_gather).
    ///
    /// # Errors
    /// [`Error::Nccl`] if there is one, or for a larger one; those of [`Layout::contiguous`];
    /// [`Error::DeviceMismatch`], [`Error::Lost`], [`Error::Cuda`].
    pub fn window(&self, stream: &Stream, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.device().expect(stream.device())?;
        // Other ranks may go on writing into the window after an all-gather that was given up.
        drop(self.state()?);
        let layout = Layout::contiguous(shape)?;
        let bytes = bytes_of(&layout, dtype);
        let size = self.windows.size();
        if size == 0 || bytes > size {
            return Err(refused(format!("{bytes} bytes in a window of {size}")));
        }
        let taken = || refused("another tensor has the window".into());
        let mut window = self.windows.take().ok_or_else(taken)?;
        if !window.home.is_same_queue(stream) {
            stream.wait_for(&window.home)?;
            window.home = stream.clone();
        }
        let address = window.ptr.0.addr() as u64;
        let owner: Owner = Mutex::new(Box::new(Lease(Some(window))));
        let memory = DeviceMemory::lent(address, stream, owner);
        Ok(Tensor::with_memory(Memory::Cuda(Arc::new(memory)), dtype, layout))
    }

    /// Gathers a slot of each rank, in the order of `stream`: `slots` is `[ranks, ...]`,
    /// contiguous, in a tensor of [`window`](Self::window). The slot of this rank goes to the same
    /// place in the windows of all others, and theirs come. All ranks do so at the same time, with
    /// slots of the same size at the same place in their windows, or what is gathered is
    /// unspecified, or it ends by the timeout. No rank's slots are written before it has done all
    /// work that it queued on `stream` before.
    ///
    /// An all-gather under way cannot be aborted. If another rank is lost, this one is lost after
    /// the timeout as by an exchange, but its stream does not go on, and where the driver waits for
    /// the device, to load a kernel, say, no error is seen. After twice the timeout the process
    /// ends: see [`gathering`](Self::gathering).
    ///
    /// # Errors
    /// [`Error::Nccl`] for another tensor, or one in a window from before the last
    /// [`reserve_gather`](Self::reserve_gather) that made it larger; [`Error::DeviceMismatch`],
    /// [`Error::InCapture`], [`Error::Lost`].
    pub fn all_gather(&self, slots: &mut ViewMut<'_>, stream: &Stream) -> Result<()> {
        self.device().expect(stream.device())?;
        let slots = slots.as_view();
        let owner = slots.owner().filter(|memory| self.windows.is_at(memory.ptr()));
        let memory = owner.ok_or_else(|| refused("the slots are not in the window".into()))?;
        if slots.shape().first() != Some(&self.world()) || !slots.layout().is_contiguous() {
            let (shape, world) = (slots.shape(), self.world());
            return Err(refused(format!("{shape:?} are no contiguous slots of {world} ranks")));
        }
        memory.prepare(stream)?;
        if let Some(session) = stream.session()? {
            session.refuse_capture("gathering")?;
        }
        let mut state = self.state()?;
        let queued = self.queue_gather(&mut state, slots, stream);
        queued.map_err(|error| self.out_of_step(&mut state, &error))
    }

    /// Queues what was checked, and has it watched.
    fn queue_gather(&self, state: &mut State, slots: View<'_>, stream: &Stream) -> Result<()> {
        let bytes = bytes_of(slots.layout(), slots.dtype()) / self.world();
        let (Some(gather), Some(session), 1..) =
            (&self.watched.nccl.gather, stream.session()?, bytes)
        else {
            return Ok(());
        };
        let (nccl, comm) = (self.watched.nccl, state.raw()?);
        let all = slots.device_ptr().unwrap_or(0) as *mut u8;
        let own = all.wrapping_add(self.rank() * bytes);
        let raw = session.raw().cast();
        self.watched.guard.expect_another(Instant::now() + self.watched.timeout);
        // SAFETY:
        // 1. Communicator and stream live and belong to the current context.
        // 2. The slots are in the window of this rank. One tensor has that, which is borrowed
        //    exclusively and prepared for the stream.
        // 3. Each rank writes its slot to the same place in the windows of the others, also one
        //    whose slots are elsewhere or larger. They are in its own window in any case, and all
        //    windows have the size on which the ranks have agreed.
        // 4. No rank writes before the stream of this one has reached the all-gather: NCCL
        //    synchronises the streams of all ranks before it copies.
        let code = unsafe { (gather.all_gather)(own.cast(), all.cast(), bytes, BYTES, comm, raw) };
        nccl.check("ncclAllGather", code)?;
        self.watched.settle("ncclAllGather", comm)?;
        drop(session);
        let event = Event::new(self.device(), false)?;
        event.record(stream)?;
        state.watch(event, Work::Gather, self.watched.timeout);
        Ok(())
    }

    fn is_hopper(&self) -> bool {
        let gpu = &self.watched.context.properties;
        gpu.compute_capability >= ComputeCapability::new(9, 0)
    }

    /// The words of all ranks. All exchanges are done then, on all ranks.
    fn of_all(&self, words: [usize; 2], stream: &Stream) -> Result<Vec<[usize; 2]>> {
        let bytes = words.map(|word| (word as u64).to_le_bytes()).concat();
        let ours = Tensor::from_slice(stream, &bytes, &[bytes.len()])?;
        let others: Vec<_> = (0..self.world()).filter(|&rank| rank != self.rank()).collect();
        let empty = |_: &usize| Tensor::empty(stream, DType::U8, &[bytes.len()]);
        let mut theirs = others.iter().map(empty).collect::<Result<Vec<_>>>()?;
        let sends: Vec<_> = others.iter().map(|&rank| (rank, ours.view())).collect();
        let receives = others.iter().zip(&mut theirs);
        let mut receives: Vec<_> = receives.map(|(&rank, x)| (rank, x.view_mut())).collect();
        self.exchange(&sends, &mut receives, stream)?;
        self.wait(stream)?;
        let mut of_all = vec![words];
        for tensor in &theirs {
            let bytes = tensor.to_vec::<u8>(stream)?;
            let byte = |sum, &byte: &u8| sum << 8 | usize::from(byte);
            let word = |at: usize| bytes[8 * at..][..8].iter().rev().fold(0, byte);
            of_all.push([word(0), word(1)]);
        }
        Ok(of_all)
    }

    /// Waits until no all-gather of this rank is under way.
    fn wait_for_gathers(&self) -> Result<()> {
        while self.state()?.gathers() {
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    /// Has NCCL forget the window, before any rank ends its part of NCCL.
    pub(super) fn forget_window(&self) -> Result<()> {
        if self.windows.size() == 0 {
            return Ok(());
        }
        self.wait_for_gathers()?;
        let stream = self.device().stream()?;
        self.of_all([0; 2], &stream)?;
        self.deregister()?;
        self.windows.free();
        self.of_all([0; 2], &stream).map(drop)
    }
}

pub(super) fn refused(what: String) -> Error {
    Error::Nccl { call: "all_gather", what }
}
