//! A fake of NCCL: its ranks are threads of one process, messages are copied by the CPU, and it
//! notes what a program must not do. With the fake driver, tests cover exchanges without GPUs.
//!
//! The crate is built twice, as a library that takes NCCL's place and as the crate that loads it.

mod collective;
mod functions;
mod state;

use libloading::{Library, Symbol};
use std::path::PathBuf;
use std::sync::OnceLock;

/// The fake NCCL of this process.
#[derive(Clone, Copy, Debug)]
pub struct FakeNccl {
    faults: fn() -> Vec<String>,
    addresses: fn() -> Vec<u64>,
}

impl FakeNccl {
    /// Loads the library, so that it is found instead of NCCL: must be called before anything of
    /// NCCL. Loading again gives the same one.
    ///
    /// # Panics
    /// If the library is not beside the program, where cargo puts it.
    pub fn load() -> FakeNccl {
        static LOADED: OnceLock<FakeNccl> = OnceLock::new();
        *LOADED.get_or_init(|| {
            let path = library();
            // SAFETY:
            // 1. Loading runs no code of ours, and the library is never unloaded. From now on the
            //    dynamic linker gives it to whoever asks for its name, libnccl.so.2.
            // 2. The functions have these types: the library and this crate are made of one source
            //    by one run of the compiler, and both allocate with the system's allocator.
            unsafe {
                let library = Library::new(&path)
                    .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                let library: &'static Library = Box::leak(Box::new(library));
                let faults: Symbol<'_, fn() -> Vec<String>> =
                    library.get(b"blockflash_fake_nccl_faults\0").expect("a fake NCCL");
                let addresses: Symbol<'_, fn() -> Vec<u64>> =
                    library.get(b"blockflash_fake_nccl_addresses\0").expect("a fake NCCL");
                FakeNccl { faults: *faults, addresses: *addresses }
            }
        })
    }

    /// What the program has done that it must not do.
    pub fn faults(&self) -> Vec<String> {
        (self.faults)()
    }

    /// Where the memory is that NCCL has given and not taken back, in ascending order.
    pub fn addresses(&self) -> Vec<u64> {
        (self.addresses)()
    }
}

/// Beside the program.
fn library() -> PathBuf {
    let program = std::env::current_exe().expect("the path of the program");
    let name = format!("{}blockflash_fake_nccl{}", std::env::consts::DLL_PREFIX, ".so");
    let folders = program.ancestors().skip(1).take(2);
    let mut paths =
        folders.flat_map(|folder| [folder.join("deps").join(&name), folder.join(&name)]);
    paths.find(|path| path.is_file()).unwrap_or_else(|| panic!("no {name} near {program:?}"))
}
