//! What is known about a GPU, and what is kept for it: data, which `context.rs`, `properties.rs`
//! and `kernel.rs` fill in.

use blockflash_sys::{ComputeCapability, Kernel};
use cudarc::driver::sys;
use serde::Serialize;
use std::collections::HashMap;
use std::sync::{Arc, RwLock};

/// A pointer that the driver handed out as a name for one of its objects.
#[derive(Debug)]
pub(crate) struct Handle<T>(pub(crate) *mut T);

// SAFETY: the driver API is thread-safe, and its handles are plain names that are valid in every
// thread. Objects whose calls must not overlap (executable graphs) are behind a lock.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

/// The primary context of a GPU (the one that the CUDA runtime, PyTorch and candle use too) and
/// what belongs to it.
///
/// Retained for the rest of the process: tearing a context down and up again takes seconds, and
/// kernels stay loaded. It is retained directly and not through `cudarc::driver::CudaContext`,
/// whose streams record events around every argument; that disturbs graph capture and timings of
/// microseconds, and here the lifetime rules of `memory.rs` do what is needed.
pub(crate) struct Context {
    pub(crate) ordinal: usize,
    pub(crate) properties: CudaProperties,
    pub(crate) has_memory_pools: bool,
    /// Kernels by row: a hash of a few integers per launch, no strings.
    pub(crate) kernels: RwLock<HashMap<Kernel, Arc<LoadedKernel>>>,
    pub(crate) raw: Handle<sys::CUctx_st>,
}

/// What the driver says about a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CudaProperties {
    /// The N of `cuda:N`.
    pub ordinal: usize,
    /// Product name.
    pub name: String,
    /// Which images it can run.
    pub compute_capability: ComputeCapability,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory in bytes that one block may use when it asks for it.
    pub smem_per_block: u32,
    /// Shared memory in bytes of a multiprocessor.
    pub smem_per_multiprocessor: u32,
    /// L2 cache in bytes.
    pub l2_bytes: u64,
    /// Device memory in bytes.
    pub memory_bytes: u64,
    /// The newest CUDA version that the driver supports: 13000 is 13.0.
    pub driver_version: u32,
    /// Highest multiprocessor clock in kHz.
    pub clock_khz: u32,
    /// Highest memory clock in kHz.
    pub memory_clock_khz: u32,
    /// Width of the memory bus in bits.
    pub memory_bus_bits: u32,
}

/// What a loaded kernel occupies, as the driver reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of local memory per thread: spilled registers and stack.
    pub local_bytes: u32,
    /// Bytes of statically allocated shared memory per block.
    pub static_smem_bytes: u32,
    /// Bytes of dynamic shared memory per block, as the row says.
    pub dynamic_smem_bytes: u32,
    /// Threads that a block may have.
    pub max_threads: u32,
    /// Bytes of its parameter struct.
    pub param_bytes: usize,
}

/// A kernel that is loaded in a context, for the rest of the process.
pub(crate) struct LoadedKernel {
    pub(crate) raw: Handle<sys::CUfunc_st>,
    pub(crate) symbol: String,
    pub(crate) info: KernelInfo,
}
