//! A frame without XLA.

use super::api::*;
use super::{Attribute, Call, Refusal, Target};
use crate::views;
use std::ffi::{CStr, c_void};
use std::ptr::{from_mut, null_mut};

/// A call with one operand, one result, and the attributes `times`, a number, and `word`, a string.
pub(super) struct Fake {
    pub(super) given: [f32; 6],
    pub(super) written: [f32; 6],
    pub(super) dims: [i64; 2],
    pub(super) operand: XLA_FFI_Buffer,
    pub(super) result: XLA_FFI_Buffer,
    pub(super) operands: [*mut c_void; 1],
    pub(super) results: [*mut c_void; 1],
    pub(super) types: [u32; 1],
    pub(super) spans: [XLA_FFI_ByteSpan; 2],
    pub(super) names: [*mut XLA_FFI_ByteSpan; 2],
    pub(super) number: i64,
    pub(super) scalar: XLA_FFI_Scalar,
    pub(super) word: XLA_FFI_ByteSpan,
    pub(super) kinds: [XLA_FFI_AttrType; 2],
    pub(super) attributes: [*mut c_void; 2],
    pub(super) api: XLA_FFI_Api,
    pub(super) frame: XLA_FFI_CallFrame,
}

fn span(text: &'static str) -> XLA_FFI_ByteSpan {
    XLA_FFI_ByteSpan { ptr: text.as_ptr().cast(), len: text.len() }
}

impl Fake {
    pub(super) fn new() -> Box<Self> {
        // SAFETY: structs of numbers, pointers and functions that may be missing.
        let (api, frame, buffer, scalar) = unsafe { std::mem::zeroed() };
        let mut fake = Box::new(Fake {
            given: [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            written: [0.0; 6],
            dims: [2, 3],
            operand: buffer,
            result: buffer,
            operands: [null_mut()],
            results: [null_mut()],
            types: [XLA_FFI_ArgType_BUFFER],
            spans: [span("times"), span("word")],
            names: [null_mut(); 2],
            number: 3,
            scalar,
            word: span("go"),
            kinds: [XLA_FFI_AttrType_SCALAR, XLA_FFI_AttrType_STRING],
            attributes: [null_mut(); 2],
            api,
            frame,
        });
        let it = &mut *fake;
        it.operand.dims = it.dims.as_mut_ptr();
        it.operand.data = it.given.as_mut_ptr().cast();
        it.operand.rank = 2;
        it.operand.dtype = XLA_FFI_DataType_F32;
        it.operand.struct_size = size_of::<XLA_FFI_Buffer>();
        it.result = XLA_FFI_Buffer { data: it.written.as_mut_ptr().cast(), ..it.operand };
        it.operands = [from_mut(&mut it.operand).cast()];
        it.results = [from_mut(&mut it.result).cast()];
        it.names = it.spans.each_mut().map(from_mut);
        it.scalar.dtype = XLA_FFI_DataType_S64;
        it.scalar.value = from_mut(&mut it.number).cast();
        it.attributes = [from_mut(&mut it.scalar).cast(), from_mut(&mut it.word).cast()];
        it.api.struct_size = size_of::<XLA_FFI_Api>();
        it.api.api_version.minor_version = XLA_FFI_API_MINOR;
        it.api.XLA_FFI_Error_Create = Some(create);
        it.frame.struct_size = std::mem::offset_of!(XLA_FFI_CallFrame, future);
        it.frame.api = &raw const it.api;
        it.frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
        it.frame.args.size = 1;
        it.frame.args.types = it.types.as_mut_ptr();
        it.frame.args.args = it.operands.as_mut_ptr();
        it.frame.rets.size = 1;
        it.frame.rets.types = it.types.as_mut_ptr();
        it.frame.rets.rets = it.results.as_mut_ptr();
        it.frame.attrs.size = 2;
        it.frame.attrs.types = it.kinds.as_mut_ptr();
        it.frame.attrs.names = it.names.as_mut_ptr();
        it.frame.attrs.attrs = it.attributes.as_mut_ptr();
        fake
    }

    /// What a target answers.
    pub(super) fn answer<T: Target>(&mut self, gpu: bool) -> Result<(), Refusal> {
        // SAFETY: all pointers are null, or those of fields of this box, as long as they say.
        unsafe { super::answer::<T>(&raw mut self.frame, gpu) }
    }

    /// The code and the text of the error that the handler returns.
    pub(super) fn handle<T: Target>(&mut self) -> Option<(u32, String)> {
        // SAFETY: as above.
        let error = unsafe { super::handle::<T, false>(&raw mut self.frame) };
        // SAFETY: `create` has made it.
        (!error.is_null()).then(|| unsafe { *Box::from_raw(error.cast()) })
    }
}

/// # Safety
/// The arguments are valid.
unsafe extern "C" fn create(args: *mut XLA_FFI_Error_Create_Args) -> *mut XLA_FFI_Error {
    // SAFETY: this function's.
    let args = unsafe { &*args };
    assert_eq!(args.struct_size, size_of::<XLA_FFI_Error_Create_Args>());
    // SAFETY: a string that ends.
    let text = unsafe { CStr::from_ptr(args.message) }.to_str().unwrap().to_owned();
    Box::into_raw(Box::new((args.errc, text))).cast()
}

/// Multiplies the operand by `times` into the result.
pub(super) struct Times;

impl Target for Times {
    fn run(call: Call<'_>) -> Result<(), Refusal> {
        let Call { operands, mut outputs, attributes, .. } = call;
        let [operand] = &operands[..] else { return Err(Refusal::invalid("operands")) };
        let [output] = &mut outputs[..] else { return Err(Refusal::invalid("results")) };
        let [("times", Attribute::Int(times)), ("word", Attribute::Text("go"))] = attributes[..]
        else {
            return Err(Refusal::invalid(format!("{attributes:?}")));
        };
        assert!(times != 0, "nothing times {times}");
        let read = Some(operand.part("x", 0, operand.dims(), &[3, 1])?);
        let write = Some(output.part("y", 0, output.dims(), &[3, 1])?);
        let ([Some(x)], [], [Some(mut y)]) = views(([&read], []), [write])? else {
            return Err(Refusal::invalid("views"));
        };
        let x = x.as_slice::<f32>().map_err(Refusal::invalid)?;
        let y = y.as_mut_slice::<f32>().map_err(Refusal::invalid)?;
        y.iter_mut().zip(x).for_each(|(y, x)| *y = x * times as f32);
        Ok(())
    }
}
