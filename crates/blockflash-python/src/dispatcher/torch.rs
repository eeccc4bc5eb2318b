//! The C functions of torch's stable ABI, and its tensors through them.

use super::BoxedKernel;
use crate::error::{Failure, Kind, Result, out_of_memory_error};
use blockflash_foreign::{Described, Error, Foreign, layout};
use blockflash_ops::{DType, Device};
use libloading::os::unix::{Library, RTLD_NOW};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::IntoPyDict;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::slice;
use std::sync::OnceLock;

pub(super) type Handle = *mut c_void;
type Code = i32;

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
        pub(super) struct $name {
            $(pub(super) $function: unsafe extern "C-unwind" fn($($argument),*) $(-> $result)?,)*
        }

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
    aoti_torch_copy_(Handle, Handle, i32) -> Code;
    aoti_torch_delete_tensor_object(Handle) -> Code;
    aoti_torch_dtype_float16() -> i32;
    aoti_torch_dtype_bfloat16() -> i32;
    aoti_torch_dtype_float32() -> i32;
    aoti_torch_dtype_int32() -> i32;
    aoti_torch_dtype_float8_e4m3fn() -> i32;
    aoti_torch_dtype_float8_e5m2() -> i32;
    aoti_torch_dtype_int8() -> i32;
    aoti_torch_check(bool, *const c_char, *const c_char, u32, *const c_char);
});

functions!(TorchCuda {
    aoti_torch_get_current_cuda_stream(i32, *mut *mut c_void) -> Code;
});

/// The functions that the kernels call.
pub(super) struct Shim {
    pub(super) torch: Torch,
    pub(super) cuda: Option<TorchCuda>,
    /// Frees a value that torch allocated: its own function from 2.13 on, C++'s `delete` before.
    pub(super) free: unsafe extern "C-unwind" fn(*mut u64),
    /// The text of the error that a function of torch has reported last to this thread; from 2.13
    /// on.
    what: Option<unsafe extern "C-unwind" fn() -> *const c_char>,
}

impl Shim {
    /// The functions of the torch of this process, if it has them all.
    pub(super) fn get() -> Option<&'static Shim> {
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
                    what: library
                        .get(b"torch_exception_get_what_without_backtrace\0")
                        .map(|function| *function)
                        .ok(),
                }
            };
            Some(shim)
        })
        .as_ref()
    }
}

/// Whether a function of torch succeeded.
pub(super) fn check(code: Code) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(reported()) }
}

/// What torch says of the function that has just failed; older versions say it in the log alone.
#[cold]
fn reported() -> Failure {
    let text = Shim::get().and_then(|shim| shim.what).map(|what| {
        // SAFETY: torch keeps the string, which ends with 0, until the next error of this thread.
        unsafe { CStr::from_ptr(what()) }.to_string_lossy().into_owned()
    });
    let unknown = || "a function of torch's stable ABI failed".into();
    Failure { kind: Kind::Device, text: text.unwrap_or_else(unknown) }
}

/// Why torch could not allocate `bytes`: the exception that it raises in Python. `None` if it
/// can.
#[cold]
fn why_not_allocated(bytes: i64, kind: i32, index: i32) -> Option<Failure> {
    Python::attach(|py| {
        let device = if kind == CUDA { format!("cuda:{index}") } else { "cpu".into() };
        let allocate = || -> PyResult<()> {
            let torch = py.import("torch")?;
            let options =
                [("dtype", torch.getattr("uint8")?), ("device", device.into_bound_py_any(py)?)];
            let options = options.into_py_dict(py)?;
            torch.call_method("empty", (bytes,), Some(&options)).map(drop)
        };
        let error = allocate().err()?;
        let out_of_memory = out_of_memory_error(py).is_ok_and(|kind| error.is_instance(py, &kind));
        let kind = if out_of_memory { Kind::Memory } else { Kind::Device };
        Some(Failure { kind, text: error.value(py).to_string() })
    })
}

/// A tensor that is ours to release.
pub(super) struct Tensor(pub(super) &'static Shim, pub(super) Handle);

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

    pub(super) fn foreign(&self, what: &'static str, written: bool) -> Result<Foreign<'_>> {
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
            _ => return Err(Error::Device { what, kind: String::new() }.into()),
        };
        // SAFETY: as for the sizes.
        let strides = unsafe { elements(strides, shape.len() as i64) };
        let described = Described {
            what,
            device,
            dtype: self.dtype(what)?,
            layout: layout(what, shape, strides)?,
            address: address.expose_provenance(),
            stream: stream.expose_provenance(),
        };
        // SAFETY: 1. The handle keeps the tensor, and torch frees memory of a GPU in the order of
        // the stream. 2. and 3. It is torch's current stream: see `crate::foreign::of`.
        Ok(unsafe { Foreign::new(described) })
    }

    fn dtype(&self, what: &'static str) -> Result<DType> {
        let number = self.read(self.0.torch.aoti_torch_get_dtype, 0)?;
        Ok(known(&self.0.torch, number).ok_or_else(|| {
            let name = usize::try_from(number).ok().and_then(|number| DTYPE_NAMES.get(number));
            Error::DType { what, dtype: (*name.unwrap_or(&"of another type")).into() }
        })?)
    }

    /// A new contiguous tensor of the same sizes and type.
    pub(super) fn empty_like(&self) -> Result<Tensor> {
        self.empty(self.sizes()?, self.read(self.0.torch.aoti_torch_get_dtype, 0)?)
    }

    /// A new output of these queries: contiguous, with rows as long as those of v, of this type or
    /// theirs, or bf16 beside codes.
    pub(super) fn empty_o(&self, v: &Self, asked: Option<DType>) -> Result<Tensor> {
        let (sizes, of_v) = (self.sizes()?, v.sizes()?);
        let own = self.read(self.0.torch.aoti_torch_get_dtype, 0)?;
        let of_codes = || known(&self.0.torch, own).filter(|own| own.is_code());
        let asked = asked.or_else(|| of_codes().map(|_| DType::BF16));
        let dtype = asked.map_or(own, |asked| number(&self.0.torch, asked).unwrap_or(own));
        if sizes.last() == of_v.last() {
            return self.empty(sizes, dtype);
        }
        let (Some((_, rows)), Some(&width)) = (sizes.split_last(), of_v.last()) else {
            return Err(Failure::value(format!("q has shape {sizes:?} and v {of_v:?}")));
        };
        self.empty(&[rows, &[width]].concat(), dtype)
    }

    /// A new log-sum-exp of these queries: f32, `[B, Hq, Sq]` or `[Hq, Tq]`.
    pub(super) fn empty_lse(&self) -> Result<Tensor> {
        // SAFETY: it takes nothing and returns a constant.
        let f32 = unsafe { (self.0.torch.aoti_torch_dtype_float32)() };
        match *self.sizes()? {
            [batch, seqlen, heads, _] => self.empty(&[batch, heads, seqlen], f32),
            [total, heads, _] => self.empty(&[heads, total], f32),
            ref shape => Err(Failure::value(format!("q has shape {shape:?}"))),
        }
    }

    /// A new contiguous tensor on the same device; the type as torch numbers it.
    fn empty(&self, sizes: &[i64], dtype: i32) -> Result<Tensor> {
        let Shim { torch, .. } = self.0;
        let mut strides = vec![1; sizes.len()];
        for dim in (1..sizes.len()).rev() {
            strides[dim - 1] = strides[dim] * sizes[dim].max(1);
        }
        let (kind, index) = self.device()?;
        let allocate = || {
            let (rank, mut made) = (sizes.len() as i64, null_mut());
            // SAFETY: sizes and strides have as many entries as there are dimensions, and the
            // pointer is valid for writes.
            check(unsafe {
                let new = torch.aoti_torch_empty_strided;
                new(rank, sizes.as_ptr(), strides.as_ptr(), dtype, kind, index, &mut made)
            })?;
            Ok(Tensor(self.0, made))
        };
        allocate().or_else(|error: Failure| {
            let elements = sizes.iter().fold(1i64, |elements, &size| elements.saturating_mul(size));
            let Some(dtype) = known(torch, dtype) else { return Err(error) };
            let bytes = elements.saturating_mul(dtype.size() as i64);
            why_not_allocated(bytes, kind, index).map_or_else(allocate, Err)
        })
    }

    pub(super) fn contiguous_copy(&self) -> Result<Tensor> {
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

/// The element types that an operation takes, by the functions that return torch's numbers.
fn types(torch: &Torch) -> [(unsafe extern "C-unwind" fn() -> i32, DType); 7] {
    [
        (torch.aoti_torch_dtype_float16, DType::F16),
        (torch.aoti_torch_dtype_bfloat16, DType::BF16),
        (torch.aoti_torch_dtype_float32, DType::F32),
        (torch.aoti_torch_dtype_int32, DType::I32),
        (torch.aoti_torch_dtype_float8_e4m3fn, DType::E4M3),
        (torch.aoti_torch_dtype_float8_e5m2, DType::E5M2),
        (torch.aoti_torch_dtype_int8, DType::I8),
    ]
}

/// The element type that torch numbers so, if an operation takes it.
fn known(torch: &Torch, number: i32) -> Option<DType> {
    // SAFETY: these functions take nothing and return a constant.
    let found = types(torch).into_iter().find(|(code, _)| number == unsafe { code() });
    found.map(|(_, dtype)| dtype)
}

/// torch's number of an element type.
fn number(torch: &Torch, dtype: DType) -> Option<i32> {
    let found = types(torch).into_iter().find(|(_, known)| *known == dtype);
    // SAFETY: as in `known`.
    found.map(|(code, _)| unsafe { code() })
}
