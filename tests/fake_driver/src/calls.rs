//! What a thread has called, and which of its calls shall fail.

use std::cell::{Cell, RefCell};

/// A call of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The name of the function, without the suffix of its version.
    pub function: &'static str,
    /// What it launches: for `cuLaunchKernelEx` alone.
    pub launch: Option<Launch>,
}

/// A launch of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel's name.
    pub symbol: String,
    /// CTAs in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a CTA in x, y and z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub smem_bytes: u32,
    /// CTAs of a cluster.
    pub cluster: Option<[u32; 3]>,
    /// Whether it may start before its predecessor has ended.
    pub early: bool,
    /// The bytes of its parameter struct.
    pub params: Vec<u8>,
}

thread_local! {
    /// The calls, while they are recorded.
    static CALLS: RefCell<Option<Vec<Call>>> = const { RefCell::new(None) };
    static FAILURE: Cell<Option<(&'static str, u32)>> = const { Cell::new(None) };
}

/// Whether this thread's calls are recorded.
pub(crate) fn recording() -> bool {
    CALLS.with_borrow(Option::is_some)
}

/// Notes a call. `Err` holds the code that it shall return instead of doing anything.
pub(crate) fn called(function: &'static str, launch: Option<Launch>) -> Result<(), u32> {
    CALLS.with_borrow_mut(|calls| {
        calls.iter_mut().for_each(|calls| calls.push(Call { function, launch: launch.clone() }));
    });
    match FAILURE.get() {
        Some((failing, code)) if failing == function => {
            FAILURE.set(None);
            Err(code)
        }
        _ => Ok(()),
    }
}

/// Starts or ends recording, and returns what was recorded.
#[unsafe(no_mangle)]
fn blockflash_fake_record(on: bool) -> Vec<Call> {
    CALLS.replace(on.then(Vec::new)).unwrap_or_default()
}

/// See [`FakeDriver::fail_next`](crate::FakeDriver::fail_next).
#[unsafe(no_mangle)]
fn blockflash_fake_fail(function: &'static str, code: u32) {
    FAILURE.set(Some((function, code)));
}

/// A function of the driver: notes the call, may fail, and returns the code of its body.
macro_rules! driver {
    ($(fn $name:ident = $symbol:literal ($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(export_name = $symbol)]
        extern "C" fn $name($($arg: $type),*) -> u32 {
            if let Err(code) = $crate::calls::called(stringify!($name), None) {
                return code;
            }
            $body
        }
    )*};
}
pub(crate) use driver;
