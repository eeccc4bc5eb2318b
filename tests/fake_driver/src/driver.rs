//! The driver itself, its GPUs, contexts, streams and events.

use crate::calls::driver;
use crate::graph::Stream;
use crate::memory::CAPTURE_MODE;
use std::cell::RefCell;
use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::Duration;

/// A GPU that the fake driver shows.
#[derive(Clone, Copy, Debug)]
pub struct Gpu {
    /// Major and minor number.
    pub compute_capability: [u32; 2],
    /// Number of SMs.
    pub multiprocessors: u32,
    /// Bytes of shared memory that a CTA may use.
    pub smem_per_block: u32,
    /// L2 cache in bytes.
    pub l2_bytes: u32,
}

/// The GPUs, as the driver numbers them: with the sizes of an H200, an A100, an L4 and an RTX 5090.
pub const GPUS: [Gpu; 4] = [
    gpu([9, 0], 132, 227, 50 << 20),
    gpu([8, 0], 108, 163, 40 << 20),
    gpu([8, 9], 58, 99, 48 << 20),
    gpu([12, 0], 170, 99, 96 << 20),
];

const fn gpu(compute_capability: [u32; 2], multiprocessors: u32, smem: u32, l2_bytes: u32) -> Gpu {
    Gpu { compute_capability, multiprocessors, smem_per_block: smem << 10, l2_bytes }
}

/// How events answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Events {
    /// Each is reached at once.
    Reached,
    /// None is reached.
    Pending,
    /// Whoever asks waits.
    Stuck,
}

static EVENTS: AtomicU8 = AtomicU8::new(Events::Reached as u8);

/// See [`FakeDriver::set_events`](crate::FakeDriver::set_events).
#[unsafe(no_mangle)]
fn blockflash_fake_events(events: Events) {
    EVENTS.store(events as u8, Ordering::Release);
}

fn query() -> u32 {
    let is = |events| EVENTS.load(Ordering::Acquire) == events as u8;
    while is(Events::Stuck) {
        thread::sleep(Duration::from_millis(10));
    }
    if is(Events::Pending) { NOT_READY } else { SUCCESS }
}

pub(crate) const SUCCESS: u32 = 0;
pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const NOT_FOUND: u32 = 500;
const NOT_READY: u32 = 600;

thread_local! {
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The context that is current in this thread.
pub(crate) fn current() -> usize {
    CONTEXTS.with_borrow(|contexts| contexts.last().copied().unwrap_or(0))
}

fn name(code: u32) -> &'static CStr {
    match code {
        SUCCESS => c"CUDA_SUCCESS",
        OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        _ => c"CUDA_ERROR_FAKE",
    }
}

driver! {
    fn cuInit = "cuInit"(_flags: u32) { SUCCESS }
    fn cuDriverGetVersion = "cuDriverGetVersion"(version: &mut i32) { *version = 13_000; SUCCESS }
    fn cuGetErrorName = "cuGetErrorName"(code: u32, text: &mut *const c_char) {
        *text = name(code).as_ptr();
        SUCCESS
    }
    fn cuGetErrorString = "cuGetErrorString"(_code: u32, text: &mut *const c_char) {
        *text = c"by the fake driver".as_ptr();
        SUCCESS
    }
    fn cuDeviceGetCount = "cuDeviceGetCount"(count: &mut i32) {
        *count = GPUS.len() as i32;
        SUCCESS
    }
    fn cuDeviceGet = "cuDeviceGet"(device: &mut i32, ordinal: i32) { *device = ordinal; SUCCESS }
    fn cuDeviceGetName = "cuDeviceGetName"(text: *mut u8, bytes: i32, _device: i32) {
        let name = b"fake\0";
        if (bytes as usize) < name.len() {
            return INVALID_VALUE;
        }
        // SAFETY: the caller's buffer has this many bytes.
        unsafe { text.copy_from_nonoverlapping(name.as_ptr(), name.len()) };
        SUCCESS
    }
    fn cuDeviceTotalMem = "cuDeviceTotalMem_v2"(bytes: &mut usize, _device: i32) {
        *bytes = 64 << 30;
        SUCCESS
    }
    fn cuDeviceGetAttribute = "cuDeviceGetAttribute"(value: &mut i32, attribute: u32, device: i32) {
        let gpu = GPUS[device as usize];
        *value = match attribute {
            13 => 1_980_000,
            16 => gpu.multiprocessors as i32,
            36 => 2_619_000,
            37 => 5120,
            38 => gpu.l2_bytes as i32,
            75 => gpu.compute_capability[0] as i32,
            76 => gpu.compute_capability[1] as i32,
            81 => gpu.smem_per_block as i32 + 1024,
            97 => gpu.smem_per_block as i32,
            115 => 1,
            _ => return INVALID_VALUE,
        };
        SUCCESS
    }
    fn cuDevicePrimaryCtxRetain = "cuDevicePrimaryCtxRetain"(context: &mut usize, device: i32) {
        *context = device as usize + 1;
        SUCCESS
    }
    fn cuCtxGetCurrent = "cuCtxGetCurrent"(context: &mut usize) { *context = current(); SUCCESS }
    fn cuCtxPushCurrent = "cuCtxPushCurrent_v2"(context: usize) {
        CONTEXTS.with_borrow_mut(|contexts| contexts.push(context));
        SUCCESS
    }
    fn cuCtxPopCurrent = "cuCtxPopCurrent_v2"(context: &mut usize) {
        *context = CONTEXTS.with_borrow_mut(Vec::pop).unwrap_or(0);
        SUCCESS
    }
    fn cuCtxGetStreamPriorityRange = "cuCtxGetStreamPriorityRange"(
        least: &mut i32,
        greatest: &mut i32,
    ) {
        [*least, *greatest] = [0, -5];
        SUCCESS
    }
    fn cuStreamCreate = "cuStreamCreate"(stream: &mut &'static Stream, _flags: u32) {
        *stream = Stream::new();
        SUCCESS
    }
    fn cuStreamCreateWithPriority = "cuStreamCreateWithPriority"(
        stream: &mut &'static Stream,
        _flags: u32,
        _priority: i32,
    ) {
        *stream = Stream::new();
        SUCCESS
    }
    fn cuStreamDestroy = "cuStreamDestroy_v2"(_stream: &Stream) { SUCCESS }
    fn cuStreamGetId = "cuStreamGetId"(stream: Option<&Stream>, number: &mut u64) {
        *number = stream.map_or(0, |stream| stream.number);
        SUCCESS
    }
    fn cuStreamQuery = "cuStreamQuery"(_stream: Option<&Stream>) { SUCCESS }
    fn cuStreamSynchronize = "cuStreamSynchronize"(_stream: Option<&Stream>) { SUCCESS }
    fn cuStreamWaitEvent = "cuStreamWaitEvent"(
        _stream: Option<&Stream>,
        _event: usize,
        _flags: u32,
    ) { SUCCESS }
    fn cuThreadExchangeStreamCaptureMode = "cuThreadExchangeStreamCaptureMode"(mode: &mut u32) {
        *mode = CAPTURE_MODE.replace(*mode);
        SUCCESS
    }
    fn cuEventCreate = "cuEventCreate"(event: &mut usize, _flags: u32) { *event = 1; SUCCESS }
    fn cuEventDestroy = "cuEventDestroy_v2"(_event: usize) { SUCCESS }
    fn cuEventQuery = "cuEventQuery"(_event: usize) { query() }
    fn cuEventRecord = "cuEventRecord"(_event: usize, _stream: Option<&Stream>) { SUCCESS }
    fn cuEventSynchronize = "cuEventSynchronize"(_event: usize) { SUCCESS }
    // Under the name that cudarc uses for older drivers, too.
    fn cuEventElapsedTimeOld = "cuEventElapsedTime"(ms: &mut f32, start: usize, end: usize) {
        cuEventElapsedTime(ms, start, end)
    }
    fn cuEventElapsedTime = "cuEventElapsedTime_v2"(ms: &mut f32, _start: usize, _end: usize) {
        *ms = 0.0;
        SUCCESS
    }
}
