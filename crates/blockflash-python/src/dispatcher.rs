//! `attention_forward` and `attention_out` as kernels in torch's dispatcher, which costs the host
//! half of what a kernel in Python costs.
//!
//! torch calls such a kernel with a stack of 64-bit values and lets it call back through C
//! functions, its stable ABI. They are looked up in the loaded `libtorch_cpu`, so nothing is linked
//! and one build serves every torch from 2.10 on. A kernel owns the tensors on its stack, and
//! reports an error by a C++ exception that torch throws for it.

use crate::attention::{Options, Tensors, run};
use crate::error::{Failure, Kind, Result};
use crate::foreign::{Described, Foreign, unsupported_dtype};
use blockflash_ops::{DType, Device};
use libloading::os::unix::{Library, RTLD_NOW};
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_void};
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::slice;
use std::sync::OnceLock;

type Handle = *mut c_void;
type Code = i32;
type BoxedKernel = unsafe extern "C-unwind" fn(*mut u64, u64, u64);

/// The version of the ABI whose values the kernels read: that of torch 2.10.
const ABI_VERSION: u64 = (2 << 56) | (10 << 48);
/// `RTLD_NOLOAD`: only a library that is loaded already.
const ONLY_IF_LOADED: i32 = 4;
/// How torch numbers element types, for texts only.
const DTYPE_NAMES: [&str; 12] = [
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "bool",
];
const CPU: i32 = 0;
const CUDA: i32 = 1;

/// C functions of torch, under their own names.
macro_rules! functions {
    ($name:ident { $($function:ident($($argument:ty),*) $(-> $result:ty)?;)* }) => {
        struct $name { $($function: unsafe extern "C-unwind" fn($($argument),*) $(-> $result)?,)* }

        impl $name {
            /// # Safety
            /// The library is torch's, so that its functions have these types.
            unsafe fn find(library: &Library) -> Option<Self> {
                Some(Self {
                    $($function: {
                        let name = concat!(stringify!($function), "\0");
                        // SAFETY: promised by the caller.
                        *unsafe { library.get(name.as_bytes()) }.ok()?
                    },)*
                })
            }
        }
    };
}

functions!(Torch {
    aoti_torch_library_init_impl(*const c_char, *const c_char, *const c_char, u32, *mut Handle)
        -> Code;
    torch_library_impl(Handle, *const c_char, BoxedKernel, u64) -> Code;
    aoti_torch_get_dim(Handle, *mut i64) -> Code;
    aoti_torch_get_sizes(Handle, *mut *const i64) -> Code;
    aoti_torch_get_strides(Handle, *mut *const i64) -> Code;
    aoti_torch_get_dtype(Handle, *mut i32) -> Code;
    aoti_torch_get_device_type(Handle, *mut i32) -> Code;
    aoti_torch_get_device_index(Handle, *mut i32) -> Code;
    torch_get_const_data_ptr(Handle, *mut *const c_void) -> Code;
    torch_get_mutable_data_ptr(Handle, *mut *mut c_void) -> Code;
    aoti_torch_empty_strided(i64, *const i64, *const i64, i32, i32, i32, *mut Handle) -> Code;
    aoti_torch_zero_(Handle) -> Code;
    aoti_torch_copy_(Handle, Handle, i32) -> Code;
    aoti_torch_delete_tensor_object(Handle) -> Code;
    aoti_torch_dtype_float16() -> i32;
    aoti_torch_dtype_bfloat16() -> i32;
    aoti_torch_dtype_float32() -> i32;
    aoti_torch_dtype_int32() -> i32;
    aoti_torch_check(bool, *const c_char, *const c_char, u32, *const c_char);
});

functions!(TorchCuda {
    aoti_torch_get_current_cuda_stream(i32, *mut *mut c_void) -> Code;
});

struct Shim {
    torch: Torch,
    cuda: Option<TorchCuda>,
    /// Frees a value that torch allocated: its own function from 2.13 on, C++'s `delete` before.
    free: unsafe extern "C-unwind" fn(*mut u64),
}

impl Shim {
    /// The functions of the torch of this process, if it has them all.
    fn get() -> Option<&'static Shim> {
        static SHIM: OnceLock<Option<Shim>> = OnceLock::new();
        SHIM.get_or_init(|| {
            let open = |name: &str| {
                // SAFETY: a library that is loaded already runs no initialisers.
                unsafe { Library::open(Some(name), RTLD_NOW | ONLY_IF_LOADED) }.ok()
            };
            let library = open("libtorch_cpu.so")?;
            // SAFETY: these libraries are torch's. `delete` takes a pointer, like torch's function,
            // whose result nobody needs.
            let shim = unsafe {
                Shim {
                    torch: Torch::find(&library)?,
                    cuda: open("libtorch_cuda.so").and_then(|library| TorchCuda::find(&library)),
                    free: *library
                        .get(b"torch_delete_stable_ivalue\0")
                        .or_else(|_| library.get(b"_ZdlPv\0"))
                        .ok()?,
                }
            };
            Some(shim)
        })
        .as_ref()
    }
}

/// Registers the kernels for the operators of this namespace. False where torch lacks the functions
/// for it; the operators need kernels in Python then.
pub(crate) fn register(namespace: &str) -> Result<bool> {
    let Some(Shim { torch, cuda, .. }) = Shim::get() else { return Ok(false) };
    let namespace = CString::new(namespace).map_err(|error| Failure::value(error.to_string()))?;
    for key in [Some(c"CPU"), cuda.as_ref().map(|_| c"CUDA")].into_iter().flatten() {
        let mut library = null_mut();
        // SAFETY: the strings end with 0 and live during the calls. torch copies them, and the
        // library is never deleted, so the kernels stay registered.
        unsafe {
            let init = torch.aoti_torch_library_init_impl;
            check(init(namespace.as_ptr(), key.as_ptr(), c"".as_ptr(), 0, &mut library))?;
            let add = torch.torch_library_impl;
            check(add(library, c"attention_forward".as_ptr(), attention_forward, ABI_VERSION))?;
            check(add(library, c"attention_out".as_ptr(), attention_out, ABI_VERSION))?;
        }
    }
    Ok(true)
}

/// Whether a function of torch succeeded. Its own text went to the log.
fn check(code: Code) -> Result<()> {
    let text = "a function of torch's stable ABI failed".into();
    if code == 0 { Ok(()) } else { Err(Failure { kind: Kind::Device, text }) }
}

/// A tensor that is ours to release.
struct Tensor(&'static Shim, Handle);

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: the handle is owned and used for the last time.
        unsafe { (self.0.torch.aoti_torch_delete_tensor_object)(self.1) };
    }
}

impl Tensor {
    fn read<T: Copy>(
        &self,
        get: unsafe extern "C-unwind" fn(Handle, *mut T) -> Code,
        mut value: T,
    ) -> Result<T> {
        // SAFETY: the handle lives, and the pointer is valid for writes during the call.
        check(unsafe { get(self.1, &mut value) })?;
        Ok(value)
    }

    fn sizes(&self) -> Result<&[i64]> {
        let torch = &self.0.torch;
        let rank = self.read(torch.aoti_torch_get_dim, 0)?;
        let sizes = self.read(torch.aoti_torch_get_sizes, null_mut::<i64>().cast_const())?;
        // SAFETY: torch keeps as many sizes as there are dimensions while the tensor lives.
        Ok(unsafe { elements(sizes, rank) })
    }

    fn device(&self) -> Result<(i32, i32)> {
        let torch = &self.0.torch;
        let kind = self.read(torch.aoti_torch_get_device_type, 0)?;
        Ok((kind, self.read(torch.aoti_torch_get_device_index, 0)?))
    }

    fn foreign(&self, what: &'static str, written: bool) -> Result<Foreign<'_>> {
        let Shim { torch, cuda, .. } = self.0;
        let shape = self.sizes()?;
        let strides = self.read(torch.aoti_torch_get_strides, null_mut::<i64>().cast_const())?;
        let address = if written {
            self.read(torch.torch_get_mutable_data_ptr, null_mut())?.cast_const()
        } else {
            self.read(torch.torch_get_const_data_ptr, null_mut::<c_void>().cast_const())?
        };
        let (device, stream) = match (self.device()?, cuda) {
            ((CPU, _), _) => (Device::cpu(), null_mut()),
            ((CUDA, index), Some(cuda)) => {
                let mut stream = null_mut();
                // SAFETY: the pointer is valid for writes during the call.
                check(unsafe { (cuda.aoti_torch_get_current_cuda_stream)(index, &mut stream) })?;
                (Device::cuda(usize::try_from(index).unwrap_or(0))?, stream)
            }
            _ => return Err(Failure::value(format!("{what} is neither on the CPU nor on CUDA"))),
        };
        let described = Described {
            what,
            device,
            dtype: self.dtype(what)?,
            shape,
            // SAFETY: as for the sizes.
            strides: unsafe { elements(strides, shape.len() as i64) },
            address: address.expose_provenance(),
            stream,
        };
        // SAFETY: 1. The handle keeps the tensor, and torch frees memory of a GPU in the order of
        // the stream. 2. It is torch's current stream.
        unsafe { Foreign::new(&described) }
    }

    fn dtype(&self, what: &str) -> Result<DType> {
        let torch = &self.0.torch;
        let number = self.read(torch.aoti_torch_get_dtype, 0)?;
        let known = [
            (torch.aoti_torch_dtype_float16, DType::F16),
            (torch.aoti_torch_dtype_bfloat16, DType::BF16),
            (torch.aoti_torch_dtype_float32, DType::F32),
            (torch.aoti_torch_dtype_int32, DType::I32),
        ];
        // SAFETY: these functions take nothing and return a constant.
        let found = known.into_iter().find(|(code, _)| number == unsafe { code() });
        found.map(|(_, dtype)| dtype).ok_or_else(|| {
            let name = usize::try_from(number).ok().and_then(|number| DTYPE_NAMES.get(number));
            unsupported_dtype(what, name.unwrap_or(&"of another type"))
        })
    }

    /// A new contiguous tensor of the same sizes and type.
    fn empty_like(&self) -> Result<Tensor> {
        let Shim { torch, .. } = self.0;
        let sizes = self.sizes()?;
        let mut strides = vec![1; sizes.len()];
        for dim in (1..sizes.len()).rev() {
            strides[dim - 1] = strides[dim] * sizes[dim].max(1);
        }
        let (kind, index) = self.device()?;
        let dtype = self.read(torch.aoti_torch_get_dtype, 0)?;
        let (rank, mut made) = (sizes.len() as i64, null_mut());
        // SAFETY: sizes and strides have as many entries as there are dimensions, and the pointer
        // is valid for writes.
        let code = unsafe {
            let new = torch.aoti_torch_empty_strided;
            new(rank, sizes.as_ptr(), strides.as_ptr(), dtype, kind, index, &mut made)
        };
        let text = "torch could not allocate the output".into();
        check(code).map_err(|_| Failure { kind: Kind::Memory, text })?;
        Ok(Tensor(self.0, made))
    }

    fn contiguous_copy(&self) -> Result<Tensor> {
        let copy = self.empty_like()?;
        // SAFETY: both handles live.
        check(unsafe { (self.0.torch.aoti_torch_copy_)(copy.1, self.1, 0) })?;
        Ok(copy)
    }
}

/// # Safety
/// `numbers` points to `count` numbers that live for `'a`; it may be anything for 0.
unsafe fn elements<'a>(numbers: *const i64, count: i64) -> &'a [i64] {
    match usize::try_from(count) {
        Ok(count) if count > 0 && !numbers.is_null() => {
            // SAFETY: promised by the caller.
            unsafe { slice::from_raw_parts(numbers, count) }
        }
        _ => &[],
    }
}

/// The arguments that both operators have: tensors in the order of their schema, and numbers.
struct Arguments {
    tensors: [Option<Tensor>; 6],
    options: Options,
}

impl Arguments {
    /// # Safety
    /// `qkv` and `options` are these arguments of a call, read for the first time.
    unsafe fn take(shim: &'static Shim, qkv: &[u64], options: &[u64]) -> Arguments {
        let needed = |at: usize| Some(Tensor(shim, handle(qkv[at])));
        // SAFETY: promised by the caller.
        let optional = |at: usize| unsafe { unwrap(shim, options[at]) };
        let tensor = |at| optional(at).map(|value| Tensor(shim, handle(value)));
        let tensors = [needed(0), needed(1), needed(2), tensor(0), tensor(1), tensor(2)];
        let number = |at: usize| options[at] as i64;
        let options = Options {
            max_q: number(3),
            max_k: number(4),
            left: number(5),
            right: number(6),
            // A bool is one byte of its 64 bits.
            top_left: options[7] as u8 != 0,
            scale: optional(8).map(f64::from_bits),
            softcap: f64::from_bits(options[9]),
            block_mask: number(10),
        };
        Arguments { tensors, options }
    }

    /// Computes. Where a kernel cannot read q, k or v in units of 16 bytes, it gets copies.
    fn run(&mut self, o: &Tensor, lse: Option<&Tensor>) -> Result<()> {
        match self.run_as_they_are(o, lse) {
            Err(Failure { kind: Kind::Misaligned, .. }) => {
                for tensor in self.tensors[..3].iter_mut().flatten() {
                    *tensor = tensor.contiguous_copy()?;
                }
                self.run_as_they_are(o, lse)
            }
            outcome => outcome,
        }
    }

    fn run_as_they_are(&self, o: &Tensor, lse: Option<&Tensor>) -> Result<()> {
        let [Some(q), Some(k), Some(v), sink, cu_seqlens_q, cu_seqlens_k] = &self.tensors else {
            return Err(Failure::value("q, k and v are needed"));
        };
        let tensors = Tensors {
            q: q.foreign("q", false)?,
            k: k.foreign("k", false)?,
            v: v.foreign("v", false)?,
            sink: foreign("sink", sink.as_ref())?,
            cu_seqlens_q: foreign("cu_seqlens_q", cu_seqlens_q.as_ref())?,
            cu_seqlens_k: foreign("cu_seqlens_k", cu_seqlens_k.as_ref())?,
            o: o.foreign("o", true)?,
            lse: lse.map(|lse| lse.foreign("lse", true)).transpose()?,
        };
        run(tensors, &self.options)
    }
}

fn foreign<'a>(what: &'static str, tensor: Option<&'a Tensor>) -> Result<Option<Foreign<'a>>> {
    tensor.map(|tensor| tensor.foreign(what, false)).transpose()
}

fn handle(value: u64) -> Handle {
    with_exposed_provenance_mut(value as usize)
}

/// An optional value: null, or a pointer to it that is ours to free.
///
/// # Safety
/// The value is one of an optional argument, and read for the first time.
unsafe fn unwrap(shim: &Shim, value: u64) -> Option<u64> {
    let pointer = with_exposed_provenance_mut::<u64>(value as usize);
    if pointer.is_null() {
        return None;
    }
    // SAFETY: promised by the caller; freed once, after it was read.
    unsafe {
        let value = *pointer;
        (shim.free)(pointer);
        Some(value)
    }
}

/// `attention_forward(q, k, v, options…) -> Tensor`
unsafe extern "C-unwind" fn attention_forward(stack: *mut u64, inputs: u64, outputs: u64) {
    enter(stack, [inputs, outputs], |shim, values| {
        // SAFETY: torch calls this function with the arguments of the schema.
        let mut call = unsafe { Arguments::take(shim, &values[..3], &values[3..]) };
        let [Some(q), .., cu_seqlens_q, _] = &call.tensors else {
            return Err(Failure::value("q is needed"));
        };
        let o = q.empty_like()?;
        if cu_seqlens_q.is_some() {
            // Rows that belong to no sequence are not written. SAFETY: the handle lives.
            check(unsafe { (shim.torch.aoti_torch_zero_)(o.1) })?;
        }
        call.run(&o, None)?;
        values[0] = ManuallyDrop::new(o).1.expose_provenance() as u64;
        Ok(())
    });
}

/// `attention_out(q, k, v, o, lse, options…) -> ()`
unsafe extern "C-unwind" fn attention_out(stack: *mut u64, inputs: u64, outputs: u64) {
    enter(stack, [inputs, outputs], |shim, values| {
        // SAFETY: as in `attention_forward`.
        let mut call = unsafe { Arguments::take(shim, &values[..3], &values[5..]) };
        let o = Tensor(shim, handle(values[3]));
        // SAFETY: as above.
        let lse = unsafe { unwrap(shim, values[4]) }.map(|value| Tensor(shim, handle(value)));
        call.run(&o, lse.as_ref())
    });
}

/// Runs a kernel, and throws its error as a C++ exception.
fn enter(
    stack: *mut u64,
    counts: [u64; 2],
    kernel: impl FnOnce(&'static Shim, &mut [u64]) -> Result<()>,
) {
    let Some(shim) = Shim::get() else { return };
    let count = counts[0].max(counts[1]) as usize;
    // SAFETY: torch passes as many values as the larger count says.
    let values = unsafe { slice::from_raw_parts_mut(stack, count) };
    let failure = match catch_unwind(AssertUnwindSafe(|| kernel(shim, values))) {
        Ok(Ok(())) => return,
        Ok(Err(failure)) => failure,
        Err(_) => Failure { kind: Kind::Device, text: "a defect of blockflash".into() },
    };
    let text = hold(failure);
    // SAFETY: the strings end with 0 and outlive the call, which copies them. It throws: nothing
    // that needs to be dropped is alive here, and the callers are `C-unwind`.
    unsafe { (shim.torch.aoti_torch_check)(false, c"".as_ptr(), c"".as_ptr(), 0, text) }
}

/// The text of a failure, after its kind, in memory of this thread.
fn hold(failure: Failure) -> *const c_char {
    thread_local!(static TEXT: RefCell<CString> = RefCell::default());
    let text = failure.tagged().replace('\0', " ");
    TEXT.with_borrow_mut(|held| {
        *held = CString::new(text).unwrap_or_default();
        held.as_ptr()
    })
}
