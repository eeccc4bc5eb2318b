//! Device memory, which is host memory.

use crate::calls::driver;
use crate::driver::{OUT_OF_MEMORY, SUCCESS};
use crate::graph::Stream;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

/// The alignment of the driver's allocations.
const ALIGNMENT: usize = 256;

/// The allocations and their sizes.
static MEMORY: LazyLock<Mutex<HashMap<u64, Layout>>> = LazyLock::new(Mutex::default);

fn allocate(address: &mut u64, bytes: usize) -> u32 {
    let Ok(layout) = Layout::from_size_align(bytes.max(1), ALIGNMENT) else { return OUT_OF_MEMORY };
    // SAFETY: the size is not 0.
    *address = unsafe { alloc_zeroed(layout) } as u64;
    if *address == 0 {
        return OUT_OF_MEMORY;
    }
    MEMORY.lock().unwrap_or_else(PoisonError::into_inner).insert(*address, layout);
    SUCCESS
}

fn copy(to: u64, from: u64, bytes: usize) -> u32 {
    // SAFETY: the caller vouches for both as it does to the driver.
    unsafe { (to as *mut u8).copy_from(from as *const u8, bytes) };
    SUCCESS
}

/// One side of a copy of rows.
#[repr(C)]
pub(crate) struct Rows {
    x: usize,
    y: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    pitch: usize,
}

/// The driver's description of a copy of rows.
#[repr(C)]
pub(crate) struct Copy2d {
    from: Rows,
    to: Rows,
    width: usize,
    height: usize,
}

/// Copies rows between places in the memory of a device. The driver takes no rows that overlap.
fn copy_rows(Copy2d { from, to, width, height }: &Copy2d) -> u32 {
    const DEVICE: u32 = 2;
    let sides = [from, to];
    let valid = |side: &&Rows| side.kind == DEVICE && side.pitch >= *width;
    if !sides.iter().all(valid) {
        return crate::driver::INVALID_VALUE;
    }
    for row in 0..*height {
        let [from, to] = sides.map(|side| {
            let start = side.x + (side.y + row) * side.pitch;
            side.device + start as u64
        });
        copy(to, from, *width);
    }
    SUCCESS
}

/// What the pool of each GPU may keep.
static LIMIT: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// What calls of this thread may disturb.
    pub(crate) static CAPTURE_MODE: Cell<u32> = const { Cell::new(0) };
}

/// The result of a call that would break a capture, as if somebody were always capturing: only
/// threads with the relaxed mode may make it.
pub(crate) fn without_captures() -> u32 {
    const RELAXED: u32 = 2;
    const CAPTURE_UNSUPPORTED: u32 = 900;
    if CAPTURE_MODE.get() == RELAXED { SUCCESS } else { CAPTURE_UNSUPPORTED }
}

driver! {
    fn cuDeviceGetDefaultMemPool = "cuDeviceGetDefaultMemPool"(pool: &mut usize, _device: i32) {
        *pool = 1;
        SUCCESS
    }
    fn cuMemPoolGetAttribute = "cuMemPoolGetAttribute"(_pool: usize, _which: u32, value: &mut u64) {
        *value = LIMIT.load(Ordering::Relaxed);
        without_captures()
    }
    fn cuMemPoolSetAttribute = "cuMemPoolSetAttribute"(_pool: usize, _which: u32, value: &mut u64) {
        LIMIT.store(*value, Ordering::Relaxed);
        without_captures()
    }
    fn cuMemAlloc = "cuMemAlloc_v2"(address: &mut u64, bytes: usize) { allocate(address, bytes) }
    fn cuMemAllocAsync = "cuMemAllocAsync"(
        address: &mut u64,
        bytes: usize,
        _stream: Option<&Stream>,
    ) { allocate(address, bytes) }
    fn cuMemFreeAsync = "cuMemFreeAsync"(address: u64, _stream: Option<&Stream>) {
        let mut memory = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(layout) = memory.remove(&address) else { return crate::driver::INVALID_VALUE };
        // SAFETY: it was allocated with this layout and is freed once.
        unsafe { dealloc(address as *mut u8, layout) };
        SUCCESS
    }
    fn cuMemsetD8Async = "cuMemsetD8Async"(
        address: u64,
        value: u8,
        bytes: usize,
        _stream: Option<&Stream>,
    ) {
        // SAFETY: the caller vouches for the memory as it does to the driver.
        unsafe { (address as *mut u8).write_bytes(value, bytes) };
        SUCCESS
    }
    fn cuMemcpyHtoDAsync = "cuMemcpyHtoDAsync_v2"(
        to: u64,
        from: u64,
        bytes: usize,
        _stream: Option<&Stream>,
    ) { copy(to, from, bytes) }
    fn cuMemcpyDtoHAsync = "cuMemcpyDtoHAsync_v2"(
        to: u64,
        from: u64,
        bytes: usize,
        _stream: Option<&Stream>,
    ) { copy(to, from, bytes) }
    fn cuMemcpyDtoDAsync = "cuMemcpyDtoDAsync_v2"(
        to: u64,
        from: u64,
        bytes: usize,
        _stream: Option<&Stream>,
    ) { copy(to, from, bytes) }
    fn cuMemcpyPeerAsync = "cuMemcpyPeerAsync"(
        to: u64,
        _to_context: usize,
        from: u64,
        _from_context: usize,
        bytes: usize,
        _stream: Option<&Stream>,
    ) { copy(to, from, bytes) }
    fn cuMemcpy2DAsync = "cuMemcpy2DAsync_v2"(rows: &Copy2d, _stream: Option<&Stream>) {
        copy_rows(rows)
    }
}
