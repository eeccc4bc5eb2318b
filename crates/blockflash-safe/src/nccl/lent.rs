//! Memory that NCCL knows on all ranks, so that a sender writes into it directly. Exchanges between
//! such tensors are up to twice as fast as through NCCL's own buffers, on half of the SMs.

use super::communicator::{NcclCommunicator, bytes_of};
use super::library::{Lend, RawComm};
use super::watch::Watched;
use crate::driver::Relaxed;
use crate::freed::Owner;
use crate::gpu::Handle;
use crate::memory::DeviceMemory;
use crate::tensor::Memory;
use crate::{ComputeCapability, DType, Error, Layout, Result, Stream, Tensor, lock::lock};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex};

/// Blocks are multiples of what the driver maps at a time.
pub(super) const GRANULE: usize = 2 << 20;

impl NcclCommunicator {
    /// Has [`tensor`](Self::tensor) give memory into which other ranks write directly: messages of
    /// up to so many bytes between two such tensors are up to twice as fast as others, on half of
    /// the SMs. All ranks call this at the same time, and the largest number counts, of all calls.
    /// It waits for the other ranks and for all exchanges.
    ///
    /// Nothing comes of it where NCCL is older than 2.19, a GPU is older than Hopper, or a process
    /// has several ranks.
    ///
    /// # Errors
    /// Those of [`exchange`](Self::exchange) and [`wait`](Self::wait).
    pub fn reserve(&self, bytes: usize, stream: &Stream) -> Result<()> {
        // Before Hopper, NCCL has the receiver read instead, from wherever the sender's tensor is.
        let lends = self.is_hopper() && self.is_alone() && self.watched.nccl.lend.is_some();
        let of_all = self.of_all([bytes, usize::from(lends)], stream)?;
        if of_all.iter().all(|[_, lends]| *lends == 1) {
            self.blocks.resize(of_all.iter().map(|[bytes, _]| *bytes).max().unwrap_or(0));
        }
        Ok(())
    }

    pub(super) fn is_hopper(&self) -> bool {
        let gpu = &self.watched.context.properties;
        gpu.compute_capability >= ComputeCapability::new(9, 0)
    }

    /// The words of all ranks. All exchanges are done then, on all ranks.
    pub(super) fn of_all(&self, words: [usize; 2], stream: &Stream) -> Result<Vec<[usize; 2]>> {
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

    /// Has NCCL forget all memory for messages, before any rank ends its part of NCCL.
    pub(super) fn forget(&self) -> Result<()> {
        if self.blocks.size() == 0 {
            return Ok(());
        }
        let stream = self.device().stream()?;
        self.of_all([0; 2], &stream)?;
        self.blocks.close(&self.watched)?;
        self.of_all([0; 2], &stream).map(drop)
    }

    /// Memory for messages, in the order of `stream`, that is not initialised. What was
    /// [reserved](Self::reserve) decides whether other ranks write into it directly, by the size of
    /// the tensor. A message lies in such memory at both ends or at neither; otherwise the exchange
    /// may end by the timeout.
    ///
    /// # Errors
    /// As [`Tensor::empty`]; [`Error::Nccl`], [`Error::Lost`].
    pub fn tensor(&self, stream: &Stream, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.device().expect(stream.device())?;
        // Other ranks may go on writing into blocks of an exchange that was aborted.
        drop(self.state()?);
        match self.blocks.tensor(&self.watched, stream, dtype, shape)? {
            Some(tensor) => Ok(tensor),
            None => Tensor::empty(stream, dtype, shape),
        }
    }
}

/// The blocks of a communicator.
///
/// Nothing tells a sender how large the tensor of the receiver is. So all blocks have the size that
/// all ranks have agreed on, a tensor begins where its block does, and no message from such a
/// tensor is larger: whatever arrives lies inside the block.
#[derive(Default)]
pub(super) struct Blocks {
    state: Mutex<BlocksState>,
}

#[derive(Default)]
struct BlocksState {
    /// Bytes of a block, and so of the largest message; 0 where there are none.
    size: usize,
    /// Blocks that no tensor uses, by number. The one with the lowest number is taken, so that
    /// equal calls send the same blocks to the same ranks: with each new pair the ranks have to
    /// exchange addresses, which takes milliseconds.
    idle: BTreeMap<usize, Block>,
    /// What NCCL calls the registrations of all blocks, by number.
    handles: BTreeMap<usize, Handle<c_void>>,
    /// How many blocks there have been.
    count: usize,
    /// Whether no block is registered any more.
    closed: bool,
}

struct Block {
    number: usize,
    ptr: Handle<c_void>,
    size: usize,
    /// In whose order the memory was last used.
    home: Stream,
    blocks: Arc<Blocks>,
    watched: Arc<Watched>,
}

impl Drop for Block {
    fn drop(&mut self) {
        let Watched { nccl, context, state, .. } = &*self.watched;
        let (Ok(_bound), Some(lend)) = (context.bind(), &nccl.lend) else { return };
        let mut blocks = lock(&self.blocks.state);
        if let Some(handle) = blocks.handles.remove(&self.number) {
            let state = lock(state);
            // After an abort, NCCL may go on naming the memory for a while, so that is kept.
            let Some(comm) = &state.comm else { return };
            if self.watched.deregister(lend, comm.0, handle.0).is_err() {
                return;
            }
        } else if !blocks.closed {
            return;
        }
        drop(blocks);
        // SAFETY: the memory is that of `ncclMemAlloc`. No tensor has it, and NCCL does not name it
        // any more; what the device still does with it the driver waits for.
        let _ = unsafe { (lend.free)(self.ptr.0) };
    }
}

/// Gives the block back when the memory is free in the order of its home.
struct Lease(Option<Block>);

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(block) = self.0.take() else { return };
        let blocks = block.blocks.clone();
        let mut state = lock(&blocks.state);
        if !state.closed && block.size == state.size {
            state.idle.insert(block.number, block);
        } else {
            // Dropping a block takes the lock.
            drop(state);
            drop(block);
        }
    }
}

impl Blocks {
    /// From now on blocks have at least this size. No exchange is under way, on any rank.
    pub(super) fn resize(&self, size: usize) {
        // No GPU has a block of a size that cannot be rounded up.
        let size = size.checked_next_multiple_of(GRANULE).unwrap_or(usize::MAX / GRANULE * GRANULE);
        let mut state = lock(&self.state);
        if size > state.size {
            state.size = size;
            let old = std::mem::take(&mut state.idle);
            drop(state);
            drop(old);
        }
    }

    /// Bytes of the largest message between such tensors.
    pub(super) fn size(&self) -> usize {
        lock(&self.state).size
    }

    /// Has NCCL forget all blocks. No exchange is under way, on any rank, and none follows.
    pub(super) fn close(&self, watched: &Watched) -> Result<()> {
        let Some(lend) = &watched.nccl.lend else { return Ok(()) };
        let _bound = watched.context.bind()?;
        let mut blocks = lock(&self.state);
        let state = lock(&watched.state);
        let comm = state.raw()?;
        while let Some((_, handle)) = blocks.handles.pop_first() {
            watched.deregister(lend, comm, handle.0)?;
        }
        blocks.closed = true;
        let idle = std::mem::take(&mut blocks.idle);
        drop((blocks, state));
        drop(idle);
        Ok(())
    }

    /// A tensor in a block, or `None` if it does not fit into one.
    pub(super) fn tensor(
        self: &Arc<Self>,
        watched: &Arc<Watched>,
        stream: &Stream,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Option<Tensor>> {
        let layout = Layout::contiguous(shape)?;
        let mut state = lock(&self.state);
        if state.size == 0 || bytes_of(&layout, dtype) > state.size {
            return Ok(None);
        }
        let mut idle = state.idle.iter();
        let found = idle.find(|(_, block)| block.home.is_same_queue(stream)).map(|(at, _)| *at);
        let found = found.and_then(|number| state.idle.remove(&number));
        let size = state.size;
        drop(state);
        let block = match found {
            Some(block) => block,
            None => self.block(size, watched, stream)?,
        };
        let address = block.ptr.0.addr() as u64;
        let owner: Owner = Mutex::new(Box::new(Lease(Some(block))));
        let memory = DeviceMemory::lent(address, size, stream, owner);
        Ok(Some(Tensor::with_memory(Memory::Cuda(Arc::new(memory)), dtype, layout)))
    }

    /// A new block.
    fn block(
        self: &Arc<Self>,
        size: usize,
        watched: &Arc<Watched>,
        home: &Stream,
    ) -> Result<Block> {
        let nccl = watched.nccl;
        let missing = || Error::NoNccl { what: "the library has no ncclMemAlloc".into() };
        let lend = nccl.lend.as_ref().ok_or_else(missing)?;
        let mut blocks = lock(&self.state);
        let state = lock(&watched.state);
        state.alive()?;
        let comm = state.raw()?;
        let _bound = watched.context.bind()?;
        let _relaxed = Relaxed::enter()?;
        let (mut ptr, mut handle) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: 1. The context is current. 2. The pointer is valid for writes during the call.
        nccl.check("ncclMemAlloc", unsafe { (lend.allocate)(&mut ptr, size) })?;
        // SAFETY: 1. The communicator lives while the lock is held, and its context is current.
        // 2. The memory has so many bytes; it is freed only after NCCL has forgotten it (`Block`).
        // 3. The pointer is valid for writes during the call.
        let code = unsafe { (lend.register)(comm, ptr, size, &mut handle) };
        nccl.check("ncclCommRegister", code)?;
        watched.settle("ncclCommRegister", comm)?;
        let number = blocks.count;
        blocks.count += 1;
        blocks.handles.insert(number, Handle(handle));
        let (blocks, watched) = (self.clone(), watched.clone());
        Ok(Block { number, ptr: Handle(ptr), size, home: home.clone(), blocks, watched })
    }
}

impl Watched {
    /// Has NCCL forget the memory of a registration with a communicator, whose lock is held.
    fn deregister(&self, lend: &Lend, comm: RawComm, handle: *mut c_void) -> Result<()> {
        // SAFETY: the communicator lives, and `handle` is what it called a registration.
        let code = unsafe { (lend.deregister)(comm, handle) };
        self.nccl.check("ncclCommDeregister", code)?;
        self.settle("ncclCommDeregister", comm)
    }
}
