//! NCCL's library, found at run time, and the functions of it that are called.
//!
//! cudarc has bindings of NCCL, too. They panic where a symbol is missing, make a Rust enum of any
//! number that NCCL returns, and are linked at build time if another crate of the program has
//! cudarc linked. The few functions that are needed have not changed since NCCL 2.18.

use crate::{Error, Result};
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::offset_of;
use std::ptr;
use std::sync::OnceLock;

/// The oldest version with non-blocking communicators as they are used here.
const NEEDED_VERSION: c_int = 21_800;
/// The oldest version whose all-gathers can do without SMs.
const GATHER_VERSION: c_int = 22_800;
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// `ncclResult_t`.
pub(super) type Code = c_int;
pub(super) const SUCCESS: Code = 0;
pub(super) const IN_PROGRESS: Code = 7;
/// `ncclUint8`: everything is sent as bytes.
pub(super) const BYTES: c_int = 1;
/// `NCCL_WIN_COLL_SYMMETRIC`: a window is at the same place on all ranks.
pub(super) const SYMMETRIC: c_int = 1;
/// `ncclComm_t`.
pub(super) type RawComm = *mut c_void;
/// `cudaStream_t`, which is a `CUstream`.
pub(super) type RawStream = *mut c_void;

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// `ncclConfig_t` of NCCL 2.28, which begins as that of 2.18 does. A newer library reads as many
/// bytes as `size` says and takes its defaults for the rest, by `version`.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    /// Where the structure of 2.18 has no member but is not over.
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
    channels_per_net_peer: c_int,
    nvlink_centric_sched: c_int,
}

impl Config {
    /// No call waits for another rank. `gathers`: copy engines in place of SMs, where there are
    /// such algorithms, for which the library needs [`GATHER_VERSION`].
    pub(super) fn non_blocking(gathers: bool) -> Config {
        const UNDEFINED: c_int = c_int::MIN;
        /// `NCCL_CTA_POLICY_ZERO`
        const NO_CTAS: c_int = 2;
        let (size, version) = match gathers {
            true => (size_of::<Config>(), GATHER_VERSION),
            false => (offset_of!(Config, comm_name), NEEDED_VERSION),
        };
        Config {
            size,
            magic: 0xcafe_beef,
            version: version as c_uint,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
            comm_name: ptr::null(),
            collnet_enable: UNDEFINED,
            cta_policy: if gathers { NO_CTAS } else { UNDEFINED },
            shrink_share: UNDEFINED,
            nvls_ctas: UNDEFINED,
            channels_per_net_peer: UNDEFINED,
            nvlink_centric_sched: UNDEFINED,
        }
    }
}

macro_rules! functions {
    (
        $(#[$about:meta])* $name:ident $([$more:ident: $type:ty = $read:expr])*
        $($field:ident = $symbol:literal: fn($($argument:ty),*) -> $result:ty;)*
    ) => {
        $(#[$about])*
        pub(super) struct $name {
            $(pub(super) $more: $type,)*
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $name {
            fn read(library: &Library) -> Result<$name> {
                $(
                    // SAFETY: the type is that of the function in `nccl.h` from 2.18 on.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> $result>(
                            concat!($symbol, "\0").as_bytes(),
                        )
                    };
                    let $field = *found.map_err(|_| Error::NoNccl {
                        what: format!("the library has no {}", $symbol),
                    })?;
                )*
                Ok($name { $($more: $read(library),)* $($field),* })
            }
        }
    };
}

functions! {
    /// The functions. The library is never unloaded.
    Nccl
    [gather: Option<Gather> = |library| Gather::read(library).ok()]
    get_version = "ncclGetVersion": fn(*mut c_int) -> Code;
    get_unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> Code;
    init = "ncclCommInitRankConfig": fn(*mut RawComm, c_int, UniqueId, c_int, *mut Config) -> Code;
    async_error = "ncclCommGetAsyncError": fn(RawComm, *mut Code) -> Code;
    finalize = "ncclCommFinalize": fn(RawComm) -> Code;
    destroy = "ncclCommDestroy": fn(RawComm) -> Code;
    abort = "ncclCommAbort": fn(RawComm) -> Code;
    group_start = "ncclGroupStart": fn() -> Code;
    group_end = "ncclGroupEnd": fn() -> Code;
    send = "ncclSend": fn(*const c_void, usize, c_int, c_int, RawComm, RawStream) -> Code;
    receive = "ncclRecv": fn(*mut c_void, usize, c_int, c_int, RawComm, RawStream) -> Code;
    error_string = "ncclGetErrorString": fn(Code) -> *const c_char;
}

functions! {
    /// Those for all-gathers in windows, from 2.28 on.
    Gather
    allocate = "ncclMemAlloc": fn(*mut *mut c_void, usize) -> Code;
    free = "ncclMemFree": fn(*mut c_void) -> Code;
    register = "ncclCommWindowRegister":
        fn(RawComm, *mut c_void, usize, *mut *mut c_void, c_int) -> Code;
    deregister = "ncclCommWindowDeregister": fn(RawComm, *mut c_void) -> Code;
    all_gather = "ncclAllGather":
        fn(*const c_void, *mut c_void, usize, c_int, RawComm, RawStream) -> Code;
}

impl Nccl {
    /// The library, loaded at the first call.
    pub(super) fn get() -> Result<&'static Nccl> {
        static LOADED: OnceLock<Result<Nccl, String>> = OnceLock::new();
        let load = || Nccl::load().map_err(|error| error.to_string());
        let loaded = LOADED.get_or_init(load).as_ref();
        loaded.map_err(|what| Error::NoNccl {
            what: what.strip_prefix("NCCL: ").unwrap_or(what).to_owned(),
        })
    }

    fn load() -> Result<Nccl> {
        // SAFETY: loading runs the initialisers of the library that the system has under this
        // name, which have no conditions.
        let library = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
        let library = library.ok_or_else(|| Error::NoNccl {
            what: format!("{} is not found; LD_LIBRARY_PATH may name its folder", NAMES[0]),
        })?;
        let mut nccl = Nccl::read(&library)?;
        std::mem::forget(library);
        let mut version = 0;
        // SAFETY: the pointer is valid for writes during the call.
        nccl.check("ncclGetVersion", unsafe { (nccl.get_version)(&mut version) })?;
        if version < NEEDED_VERSION {
            let text = |v: c_int| format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100);
            let (found, needed) = (text(version), text(NEEDED_VERSION));
            return Err(Error::NoNccl { what: format!("version {found}, needed is {needed}") });
        }
        // 2.27 has windows, but neither the policy nor all-gathers by copy engines.
        nccl.gather = nccl.gather.filter(|_| version >= GATHER_VERSION);
        Ok(nccl)
    }

    /// The result of a function. Of a communicator that does not block, a call that is still under
    /// way counts as done.
    pub(super) fn check(&self, call: &'static str, code: Code) -> Result<()> {
        if matches!(code, SUCCESS | IN_PROGRESS) {
            return Ok(());
        }
        // SAFETY: every number is taken; what comes back is a constant of the library.
        let text = unsafe {
            let text = (self.error_string)(code);
            if text.is_null() { c"unknown error" } else { CStr::from_ptr(text) }
        };
        Err(Error::Nccl { call, what: format!("{} ({code})", text.to_string_lossy()) })
    }
}
