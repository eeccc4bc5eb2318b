//! A fake of the CUDA driver. Its functions check little, run no kernel, hand out host memory as
//! device memory, and record every call: so tests see what the host side of an operation asks of
//! the driver, and what it costs, on a machine without a GPU.
//!
//! The crate is built twice, as a library that takes the driver's place and as the crate that
//! loads it. It shows one GPU for each entry of [`GPUS`], whatever the machine has.

#![expect(non_snake_case, reason = "the names of the driver's functions")]

mod calls;
mod driver;
mod graph;
mod image;
mod memory;
mod module;

pub use calls::{Call, Launch};
pub use driver::{Events, GPUS};

use libloading::{Library, Symbol};
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::OnceLock;

/// The fake driver of this process.
#[derive(Clone, Copy, Debug)]
pub struct FakeDriver {
    record: fn(bool) -> Vec<Call>,
    fail: fn(&'static str, u32),
    events: fn(Events),
    begin_capture: extern "C" fn(*mut c_void, u32) -> u32,
    end_capture: extern "C" fn(*mut c_void, *mut *mut c_void) -> u32,
}

impl FakeDriver {
    /// Loads the library, so that cudarc finds it instead of the driver: must be called before
    /// anything of CUDA. Loading again gives the same one.
    ///
    /// # Panics
    /// If the library is not beside the program, where cargo puts it.
    pub fn load() -> FakeDriver {
        Self::load_from(library)
    }

    /// The same for a driver that has everything but this function: a copy of the library in which
    /// the name is another one.
    ///
    /// # Panics
    /// As [`load`](Self::load), or if there is no such function.
    pub fn load_without(function: &str) -> FakeDriver {
        Self::load_from(|| {
            let mut bytes = std::fs::read(library()).expect("the library");
            let name = [b"\0", function.as_bytes(), b"\0"].concat();
            let mut found = 0..bytes.len() - name.len();
            let mut count = 0;
            while let Some(at) = found.find(|&at| bytes[at..].starts_with(&name)) {
                bytes[at + 1] = b'_';
                count += 1;
            }
            assert!(count > 0, "the library has no {function}");
            let copy = std::env::temp_dir()
                .join(format!("blockflash_fake_driver_{}.so", std::process::id()));
            std::fs::write(&copy, bytes).expect("a copy of the library");
            copy
        })
    }

    fn load_from(path: impl FnOnce() -> PathBuf) -> FakeDriver {
        static LOADED: OnceLock<FakeDriver> = OnceLock::new();
        *LOADED.get_or_init(|| {
            let path = path();
            // SAFETY:
            // 1. Loading runs no code of ours, and the library is never unloaded. From now on the
            //    dynamic linker gives it to whoever asks for its name, libcuda.so.
            // 2. The functions have these types: the library and this crate are made of one source
            //    by one run of the compiler, so that all types are the same, and both allocate with
            //    the system's allocator.
            unsafe {
                let library = Library::new(&path)
                    .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                let library: &'static Library = Box::leak(Box::new(library));
                let record: Symbol<'_, fn(bool) -> Vec<Call>> =
                    library.get(b"blockflash_fake_record\0").expect("a fake driver");
                let fail: Symbol<'_, fn(&'static str, u32)> =
                    library.get(b"blockflash_fake_fail\0").expect("a fake driver");
                let events: Symbol<'_, fn(Events)> =
                    library.get(b"blockflash_fake_events\0").expect("a fake driver");
                let begin: Symbol<'_, extern "C" fn(*mut c_void, u32) -> u32> =
                    library.get(b"cuStreamBeginCapture_v2\0").expect("a fake driver");
                let end: Symbol<'_, extern "C" fn(*mut c_void, *mut *mut c_void) -> u32> =
                    library.get(b"cuStreamEndCapture\0").expect("a fake driver");
                let (begin_capture, end_capture) = (*begin, *end);
                let (record, fail, events) = (*record, *fail, *events);
                FakeDriver { record, fail, events, begin_capture, end_capture }
            }
        })
    }

    /// Does some work and returns the calls of the driver that this thread made meanwhile.
    pub fn calls<T>(&self, work: impl FnOnce() -> T) -> (T, Vec<Call>) {
        (self.record)(true);
        let result = work();
        (result, (self.record)(false))
    }

    /// Lets the next call of this function by this thread return an error code instead of doing
    /// anything.
    pub fn fail_next(&self, function: &'static str, code: u32) {
        (self.fail)(function, code);
    }

    /// Does some work while a stream is being captured by somebody else than blockflash.
    ///
    /// # Panics
    /// If the stream cannot be captured.
    pub fn captured<T>(&self, stream: *mut c_void, work: impl FnOnce() -> T) -> T {
        const THREAD_LOCAL: u32 = 1;
        assert_eq!((self.begin_capture)(stream, THREAD_LOCAL), 0);
        let result = work();
        let mut graph = std::ptr::null_mut();
        assert_eq!((self.end_capture)(stream, &mut graph), 0);
        result
    }

    /// How events answer from now on, to all threads.
    pub fn set_events(&self, events: Events) {
        (self.events)(events);
    }
}

/// Beside the program or, for an example, beside its folder.
fn library() -> PathBuf {
    let program = std::env::current_exe().expect("the path of the program");
    let name = format!("{}blockflash_fake_driver{}", std::env::consts::DLL_PREFIX, ".so");
    let folders = program.ancestors().skip(1).take(2);
    let mut paths =
        folders.flat_map(|folder| [folder.join("deps").join(&name), folder.join(&name)]);
    paths.find(|path| path.is_file()).unwrap_or_else(|| panic!("no {name} near {program:?}"))
}
