//! The data kept per GPU: its properties and its loaded kernels. `context.rs`, `properties.rs` and
//! `kernel.rs` fill them in.

use blockflash_sys::{ComputeCapability, Kernel};
use cudarc::driver::sys;
use rustc_hash::FxHashMap;
use serde::Serialize;
use std::sync::RwLock;

/// A pointer that the driver uses as the handle of one of its objects.
#[derive(Debug)]
pub(crate) struct Handle<T>(pub(crate) *mut T);

// SAFETY: the driver API is thread-safe, and its handles are valid in every thread. Objects whose
// calls must not overlap (executable graphs) are behind a lock.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

/// The primary context of a GPU (which the CUDA runtime, PyTorch and candle use too) and everything
/// that belongs to it.
///
/// Retained for the rest of the process, because creating a context again takes seconds, and so
/// kernels stay loaded. It is not a `cudarc::driver::CudaContext`: cudarc's streams record events
/// around every argument, which disturbs graph capture and timings of microseconds. Here the
/// lifetime rules of `memory.rs` protect the memory instead.
pub(crate) struct Context {
    pub(crate) ordinal: usize,
    pub(crate) properties: CudaProperties,
    pub(crate) has_memory_pools: bool,
    /// Loaded kernels by kernel of the table, so that a launch hashes a few integers and no
    /// strings; nobody can choose them, so the hash need not resist anybody.
    pub(crate) kernels: RwLock<FxHashMap<Kernel, &'static LoadedKernel>>,
    pub(crate) raw: Handle<sys::CUctx_st>,
}

/// Properties of a GPU, as the driver reports them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CudaProperties {
    /// The index N of `cuda:N`.
    pub ordinal: usize,
    /// Product name.
    pub name: String,
    /// The images that it can run.
    pub compute_capability: ComputeCapability,
    /// Number of SMs.
    pub multiprocessors: u32,
    /// Bytes of shared memory that one CTA may use if it asks for them.
    pub smem_per_block: u32,
    /// Bytes of shared memory per SM.
    pub smem_per_multiprocessor: u32,
    /// L2 cache in bytes.
    pub l2_bytes: u64,
    /// Device memory in bytes.
    pub memory_bytes: u64,
    /// The newest CUDA version that the driver supports: 13000 is 13.0.
    pub driver_version: u32,
    /// Highest SM clock in kHz.
    pub clock_khz: u32,
    /// Highest memory clock in kHz.
    pub memory_clock_khz: u32,
    /// Width of the memory bus in bits.
    pub memory_bus_bits: u32,
}

/// Resources of a loaded kernel, as the driver reports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of local memory per thread: spilled registers and stack.
    pub local_bytes: u32,
    /// Bytes of statically allocated shared memory per CTA.
    pub static_smem_bytes: u32,
    /// Bytes of dynamic shared memory per CTA, from the kernel table.
    pub dynamic_smem_bytes: u32,
    /// Largest number of threads of a CTA.
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
