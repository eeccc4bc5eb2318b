//! Memory that NCCL knows on all ranks, so that a sender writes into it directly. Exchanges between
//! such tensors are twice as fast as through NCCL's own buffers, on half of the SMs.

use super::communicator::bytes_of;
use super::library::{Code, RawComm};
use super::watch::Watched;
use crate::driver::Relaxed;
use crate::gpu::Handle;
use crate::memory::DeviceMemory;
use crate::tensor::Memory;
use crate::{DType, Error, Layout, Result, Stream, Tensor, lock::lock};
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex};

/// Blocks are multiples of what the driver maps at a time.
const GRANULE: usize = 2 << 20;

/// The blocks of a communicator that no tensor uses.
///
/// Nothing tells a sender how large the tensor of the receiver is. So all blocks have the size that
/// all ranks have agreed on, a tensor begins where its block does, and no message from such a
/// tensor is larger: whatever arrives lies inside the block.
#[derive(Default)]
pub(super) struct Blocks {
    idle: Mutex<Idle>,
}

#[derive(Default)]
struct Idle {
    /// Bytes of a block, and so of the largest message; 0 where there are none.
    size: usize,
    blocks: Vec<Block>,
}

struct Block {
    ptr: Handle<c_void>,
    size: usize,
    /// What NCCL calls the registration.
    handle: Option<Handle<c_void>>,
    /// In whose order the memory was last used.
    home: Stream,
    watched: Arc<Watched>,
}

impl Drop for Block {
    fn drop(&mut self) {
        let Watched { nccl, context, state, .. } = &*self.watched;
        let (Ok(_bound), Some(lend)) = (context.bind(), &nccl.lend) else { return };
        let state = lock(state);
        if let (Some(comm), Some(handle)) = (&state.comm, self.handle.take()) {
            // SAFETY: the communicator lives while the lock is held, and `handle` is of a
            // registration with it. With the communicator it ends by itself.
            let code = unsafe { (lend.deregister)(comm.0, handle.0) };
            // NCCL may still name memory that it has not forgotten, so that is kept.
            let forgotten = nccl.check("ncclCommDeregister", code);
            if forgotten.and_then(|()| self.watched.settle("ncclCommDeregister", comm.0)).is_err() {
                return;
            }
        }
        drop(state);
        // SAFETY: the memory is that of `ncclMemAlloc`, and no tensor has it; what the device still
        // does with it the driver waits for.
        let _ = unsafe { (lend.free)(self.ptr.0) };
    }
}

/// Gives the block back when the memory is free in the order of its home.
struct Lease {
    blocks: Arc<Blocks>,
    block: Option<Block>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut idle = lock(&self.blocks.idle);
        let fits = |block: &Block| block.size == idle.size;
        if let Some(block) = self.block.take_if(|block| fits(block)) {
            idle.blocks.push(block);
        }
    }
}

impl Blocks {
    /// From now on blocks have this size. No exchange is under way, on any rank.
    pub(super) fn resize(&self, size: usize) {
        let size = size.next_multiple_of(GRANULE);
        let mut idle = lock(&self.idle);
        if size > idle.size {
            let old = std::mem::take(&mut idle.blocks);
            idle.size = size;
            drop(idle);
            drop(old);
        }
    }

    /// Bytes of the largest message between such tensors.
    pub(super) fn size(&self) -> usize {
        lock(&self.idle).size
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
        let (size, block) = {
            let mut idle = lock(&self.idle);
            let found = idle.blocks.iter().position(|block| block.home.is_same_queue(stream));
            let fits = bytes_of(&layout, dtype) <= idle.size;
            (idle.size, found.filter(|_| fits).map(|at| idle.blocks.swap_remove(at)))
        };
        if bytes_of(&layout, dtype) > size || size == 0 {
            return Ok(None);
        }
        let block = match block {
            Some(block) => block,
            None => Block::new(size, watched, stream)?,
        };
        let address = block.ptr.0.addr() as u64;
        let lease = Lease { blocks: self.clone(), block: Some(block) };
        let memory = DeviceMemory::lent(address, size, stream, Mutex::new(Box::new(lease)));
        Ok(Some(Tensor::with_memory(Memory::Cuda(Arc::new(memory)), dtype, layout)))
    }
}

impl Block {
    fn new(size: usize, watched: &Arc<Watched>, stream: &Stream) -> Result<Block> {
        let missing = || Error::NoNccl { what: "the library has no ncclMemAlloc".into() };
        let lend = watched.nccl.lend.as_ref().ok_or_else(missing)?;
        let mut state = lock(&watched.state);
        state.alive()?;
        let closed = || Error::Lost { what: "it is closed".into() };
        let comm: RawComm = state.comm.as_mut().ok_or_else(closed)?.0;
        let _bound = watched.context.bind()?;
        let _relaxed = Relaxed::enter()?;
        let mut ptr = ptr::null_mut();
        // SAFETY: 1. The context is current. 2. The pointer is valid for writes during the call.
        let code: Code = unsafe { (lend.allocate)(&mut ptr, size) };
        watched.nccl.check("ncclMemAlloc", code)?;
        let home = stream.clone();
        let watched = watched.clone();
        let mut block = Block { ptr: Handle(ptr), size, handle: None, home, watched };
        let mut handle = ptr::null_mut();
        // SAFETY: 1. The communicator lives while the lock is held, and its context is current.
        // 2. The memory has so many bytes, and is not freed before the communicator ends, or nobody
        // names it in an exchange any more. 3. The pointer is valid for writes during the call.
        let code = unsafe { (lend.register)(comm, ptr, size, &mut handle) };
        let registered = block.watched.nccl.check("ncclCommRegister", code);
        let registered = registered.and_then(|()| block.watched.settle("ncclCommRegister", comm));
        // Dropping the block takes the lock.
        drop(state);
        registered?;
        block.handle = Some(Handle(handle));
        Ok(block)
    }
}
