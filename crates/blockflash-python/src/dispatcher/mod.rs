//! `attention`, `attention_forward` and `attention_out` as kernels in torch's dispatcher, which
//! costs the host less than kernels in Python do.
//!
//! torch calls such a kernel with a stack of 64-bit values and lets it call back through C
//! functions, its stable ABI. They are looked up in the loaded `libtorch_cpu`, so nothing is linked
//! and one build serves every torch from 2.10 on. A kernel owns the tensors on its stack, and
//! reports an error by a C++ exception that torch throws for it.

mod torch;

use self::torch::{Handle, Shim, Tensor, Torch, check};
use crate::attention::{out_dtype, run};
use crate::error::{Failure, Kind, Result, with_memory};
use crate::foreign::views;
use blockflash_foreign::{Arguments, AttentionOptions};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::slice;

type BoxedKernel = unsafe extern "C-unwind" fn(*mut u64, u64, u64);

/// The version of the ABI whose values the kernels read: that of torch 2.10.
const ABI_VERSION: u64 = (2 << 56) | (10 << 48);

/// Registers the kernels for the operators of this namespace, and returns for which dispatch keys:
/// those for whose devices this torch has the functions. The others need kernels in Python.
pub(crate) fn register(namespace: &str) -> Vec<&'static str> {
    let (Some(shim), Ok(namespace)) = (Shim::get(), CString::new(namespace)) else {
        return Vec::new();
    };
    let keys = [Some(c"CPU"), shim.cuda.as_ref().map(|_| c"CUDA")];
    let add = |key: &&CStr| register_for(&shim.torch, &namespace, key).is_ok();
    keys.into_iter().flatten().filter(add).filter_map(|key| key.to_str().ok()).collect()
}

fn register_for(torch: &Torch, namespace: &CStr, key: &CStr) -> Result<()> {
    let mut library = null_mut();
    // SAFETY: the strings end with 0 and live during the calls. torch copies them, and the library
    // is never deleted, so the kernels stay registered.
    unsafe {
        let init = torch.aoti_torch_library_init_impl;
        check(init(namespace.as_ptr(), key.as_ptr(), c"".as_ptr(), 0, &mut library))?;
        let add = torch.torch_library_impl;
        check(add(library, c"attention".as_ptr(), attention, ABI_VERSION))?;
        check(add(library, c"attention_forward".as_ptr(), attention_forward, ABI_VERSION))?;
        check(add(library, c"attention_out".as_ptr(), attention_out, ABI_VERSION))
    }
}

/// The arguments that all operators have.
struct Call {
    qkv: [Tensor; 3],
    options: AttentionOptions<Tensor>,
}

impl Call {
    /// # Safety
    /// `qkv` and `options` are these arguments of a call, read for the first time.
    unsafe fn take(shim: &'static Shim, qkv: [u64; 3], options: &[u64]) -> Result<Call> {
        let qkv = qkv.map(|value| Tensor(shim, handle(value)));
        let options = AttentionOptions::read(&mut Stack { shim, values: options.iter() })?;
        Ok(Call { qkv, options })
    }

    /// Computes. Where a kernel cannot read q, k or v in units of 16 bytes, it gets copies.
    fn run(&mut self, o: &Tensor, lse: Option<&Tensor>) -> Result<()> {
        match with_memory(|| self.run_as_they_are(o, lse)) {
            Err(Failure { kind: Kind::Misaligned, .. }) => {
                for tensor in &mut self.qkv {
                    *tensor = tensor.contiguous_copy()?;
                }
                with_memory(|| self.run_as_they_are(o, lse))
            }
            outcome => outcome,
        }
    }

    fn run_as_they_are(&self, o: &Tensor, lse: Option<&Tensor>) -> Result<()> {
        let [q, k, v] = &self.qkv;
        let qkv = [
            Some(q.foreign("q", false)?),
            Some(k.foreign("k", false)?),
            Some(v.foreign("v", false)?),
        ];
        let AttentionOptions { tensors, numbers } = &self.options;
        let tensors = tensors.each_ref().try_map(|what, tensor| {
            tensor.as_ref().map(|tensor| tensor.foreign(what, false)).transpose()
        })?;
        let lse = lse.map(|lse| lse.foreign("lse", true)).transpose()?;
        run(&qkv, &tensors, numbers, [Some(o.foreign("o", true)?), lse])
    }
}

/// Options on the stack of a call, each of which is read once.
struct Stack<'v> {
    shim: &'static Shim,
    values: slice::Iter<'v, u64>,
}

impl Stack<'_> {
    fn optional(&mut self) -> Option<u64> {
        // SAFETY: who makes a stack promises that it holds the options of a call, which are read
        // for the first time (`Call::take`); their order and types are those of the schema, which
        // is made of the same table.
        self.values.next().and_then(|&value| unsafe { unwrap(self.shim, value) })
    }
}

impl Arguments for Stack<'_> {
    type Tensor = Tensor;
    type Error = Failure;

    fn tensor(&mut self, _: &'static str) -> Result<Option<Tensor>> {
        Ok(self.optional().map(|value| Tensor(self.shim, handle(value))))
    }

    fn int(&mut self, _: &'static str) -> Result<Option<i64>> {
        Ok(self.values.next().map(|&value| value as i64))
    }

    fn bool(&mut self, _: &'static str) -> Result<Option<bool>> {
        // A bool is one byte of its 64 bits.
        Ok(self.values.next().map(|&value| value as u8 != 0))
    }

    fn float(&mut self, _: &'static str) -> Result<Option<f64>> {
        Ok(self.values.next().map(|&value| f64::from_bits(value)))
    }

    fn optional_float(&mut self, _: &'static str) -> Result<Option<f64>> {
        Ok(self.optional().map(f64::from_bits))
    }
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

/// `attention(q, k, v, options…) -> (Tensor o, Tensor lse)`
unsafe extern "C-unwind" fn attention(stack: *mut u64, inputs: u64, outputs: u64) {
    throw(attempt(stack, [inputs, outputs], |shim, values| forward(shim, values, true)));
}

/// `attention_forward(q, k, v, options…) -> Tensor`
unsafe extern "C-unwind" fn attention_forward(stack: *mut u64, inputs: u64, outputs: u64) {
    throw(attempt(stack, [inputs, outputs], |shim, values| forward(shim, values, false)));
}

/// Computes into new tensors, which take the first places of the stack.
fn forward(shim: &'static Shim, values: &mut [u64], with_lse: bool) -> Result<()> {
    let [q, k, v, options @ ..] = values else { return Err(too_few()) };
    // SAFETY: torch calls the kernels with the arguments of the schema.
    let mut call = unsafe { Call::take(shim, [*q, *k, *v], options) }?;
    let o = call.qkv[0].empty_o(&call.qkv[2], out_dtype(&call.options.numbers)?)?;
    let lse = if with_lse { Some(call.qkv[0].empty_lse()?) } else { None };
    if call.options.tensors.cu_seqlens_q.is_some() {
        // Rows that belong to no sequence are not written.
        zero(&o)?;
        lse.as_ref().map(zero).transpose()?;
    }
    call.run(&o, lse.as_ref())?;
    for (place, made) in values.iter_mut().zip([Some(o), lse].into_iter().flatten()) {
        *place = ManuallyDrop::new(made).1.expose_provenance() as u64;
    }
    Ok(())
}

/// Sets a new tensor to zero, which costs the host less than torch's own operator does.
fn zero(made: &Tensor) -> Result<()> {
    let foreign = made.foreign("o", true)?;
    let stream = foreign.stream()?;
    let ([], [], [Some(mut view)]) = views(([], []), [Some(foreign)])? else { return Ok(()) };
    Ok(view.fill_bytes(&stream, 0)?)
}

/// `attention_out(q, k, v, o, lse, options…) -> ()`
unsafe extern "C-unwind" fn attention_out(stack: *mut u64, inputs: u64, outputs: u64) {
    throw(attempt(stack, [inputs, outputs], |shim, values| {
        let [q, k, v, o, lse, options @ ..] = values else { return Err(too_few()) };
        // SAFETY: as in `forward`.
        let mut call = unsafe { Call::take(shim, [*q, *k, *v], options) }?;
        let o = Tensor(shim, handle(*o));
        // SAFETY: as above.
        let lse = unsafe { unwrap(shim, *lse) }.map(|value| Tensor(shim, handle(value)));
        call.run(&o, lse.as_ref())
    }));
}

fn too_few() -> Failure {
    Failure { kind: Kind::Device, text: "torch's call has too few arguments".into() }
}

/// A failure that is to be thrown: its text in memory of this thread.
type Thrown = (&'static Shim, *const c_char);

/// Runs a kernel. It is not inlined: what has to be dropped stays in this frame, which the
/// exception does not pass.
#[inline(never)]
fn attempt(
    stack: *mut u64,
    counts: [u64; 2],
    kernel: impl FnOnce(&'static Shim, &mut [u64]) -> Result<()>,
) -> Option<Thrown> {
    let shim = Shim::get()?;
    let count = counts[0].max(counts[1]) as usize;
    // SAFETY: torch passes as many values as the larger count says.
    let values = unsafe { slice::from_raw_parts_mut(stack, count) };
    let failure = match catch_unwind(AssertUnwindSafe(|| kernel(shim, values))) {
        Ok(Ok(())) => return None,
        Ok(Err(failure)) => failure,
        Err(_) => Failure { kind: Kind::Device, text: "a defect of blockflash".into() },
    };
    Some((shim, hold(failure)))
}

/// Throws a failure as a C++ exception. Neither this frame nor its caller's has anything to drop,
/// so the exception runs no code of Rust. It must not: a wheel linked by zig contains an unwinder
/// of its own, which crashes on the state of the one that throws.
#[inline(never)]
fn throw(thrown: Option<Thrown>) {
    if let Some((shim, text)) = thrown {
        // SAFETY: the strings end with 0 and outlive the call, which copies them. Nothing that
        // needs to be dropped is alive here, and the callers are `C-unwind`.
        unsafe { (shim.torch.aoti_torch_check)(false, c"".as_ptr(), c"".as_ptr(), 0, text) }
    }
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
