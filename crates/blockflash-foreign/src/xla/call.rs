//! A call: what a target gets.

use super::api::*;
use super::buffer::{Buffer, Place};
use super::context::Context;
use super::frame::Frame;
use super::{Attribute, Operand, Output, Refusal, Scratch, attribute};
use blockflash_safe::Device;

/// A call of a target.
pub struct Call<'a> {
    /// Its operands.
    pub operands: Vec<Operand<'a>>,
    /// Its results.
    pub outputs: Vec<Output<'a>>,
    /// Its attributes by name.
    pub attributes: Vec<(&'a str, Attribute<'a>)>,
    /// What gives memory.
    pub memory: Memory<'a>,
}

/// The memory of the device of a call.
#[derive(Clone, Copy)]
pub struct Memory<'a> {
    context: Context<'a>,
    place: Place,
}

impl<'a> Memory<'a> {
    /// The device of the call.
    pub fn device(&self) -> &Device {
        &self.place.device
    }

    /// A workspace on the GPU of the call.
    ///
    /// # Errors
    /// XLA has no memory, or the call is on the CPU.
    pub fn scratch(&self, bytes: usize) -> Result<Scratch<'a>, Refusal> {
        if self.place.device.is_cpu() {
            return Err(Refusal::invalid("there is no workspace on the CPU"));
        }
        self.context.scratch(bytes, self.place.device, self.place.stream)
    }
}

/// The call of a frame.
///
/// # Safety
/// Pointers of the frame are null or valid during `'a`. Its operands are valid for reads, its
/// results for reads and writes, on a GPU by work that is queued on the call's stream; nobody else
/// writes to operands or uses results meanwhile.
pub(super) unsafe fn read<'a>(frame: &'a Frame, gpu: bool) -> Result<Call<'a>, Refusal> {
    // SAFETY: this function's.
    let context = unsafe { Context::new(frame) }?;
    if frame.stage != XLA_FFI_ExecutionStage_EXECUTE {
        let stage = frame.stage;
        return Err(Refusal::frame(format!("stage {stage}, expected the execution")));
    }
    let (device, stream) = if gpu { context.gpu()? } else { (Device::cpu(), 0) };
    let place = Place { device, stream };
    let (args, rets) = (&frame.args, &frame.rets);
    // SAFETY: this function's.
    let operands = unsafe { buffers("operand", args.size, args.types, args.args, place) }?;
    // SAFETY: this function's.
    let outputs = unsafe { buffers("result", rets.size, rets.types, rets.rets, place) }?;
    let mut operands: Vec<_> = operands.into_iter().map(Operand::new).collect();
    apart(&mut operands, &outputs)?;
    // SAFETY: this function's.
    let attributes = unsafe { attribute::read(&frame.attrs) }?;
    let outputs = outputs.into_iter().map(Output).collect();
    Ok(Call { operands, outputs, attributes, memory: Memory { context, place } })
}

/// The buffers of a list, all of whose entries are of type 1, `BUFFER`.
///
/// # Safety
/// As many types and buffers can be read as it says, or the pointers are null.
unsafe fn buffers<'a>(
    what: &str,
    size: i64,
    types: *const u32,
    buffers: *const *mut std::ffi::c_void,
    place: Place,
) -> Result<Vec<Buffer<'a>>, Refusal> {
    let each = |at: usize| {
        let what = format!("{what} {at}");
        // SAFETY: there are as many.
        let (kind, buffer) = unsafe { (*types.add(at), *buffers.add(at)) };
        // Operands and results number this type alike.
        if kind != XLA_FFI_ArgType_BUFFER {
            return Err(Refusal::frame(format!("{what} is of type {kind}, expected a buffer")));
        }
        // SAFETY: a buffer, or null.
        unsafe { Buffer::read(&what, buffer.cast(), place) }
    };
    (0..count(what, size, types, buffers)?).map(each).collect()
}

/// The length of a list, which has types and values.
pub(super) fn count<T, V>(
    what: &str,
    size: i64,
    types: *const T,
    values: *const V,
) -> Result<usize, Refusal> {
    let most = 64;
    let count = usize::try_from(size).ok().filter(|&count| count <= most);
    let Some(count) = count else {
        return Err(Refusal::frame(format!("{size} of {what}, expected 0 to {most}")));
    };
    if count > 0 && (types.is_null() || values.is_null()) {
        return Err(Refusal::frame(format!("{what}: no list of {count}")));
    }
    Ok(count)
}

/// Notes which operands are in the memory of a result, and refuses any other shared memory.
fn apart(operands: &mut [Operand<'_>], outputs: &[Buffer<'_>]) -> Result<(), Refusal> {
    let overlap = |[a, b]: [usize; 2], [c, d]: [usize; 2]| a.max(c) < b.min(d);
    for (at, output) in outputs.iter().enumerate() {
        let span = output.span();
        if outputs[..at].iter().any(|other| overlap(span, other.span())) {
            return Err(Refusal::frame(format!("result {at} shares memory with another one")));
        }
        for (number, operand) in operands.iter_mut().enumerate() {
            if span == operand.span() && span[0] < span[1] {
                operand.output = Some(at);
            } else if overlap(span, operand.span()) {
                let text = format!("result {at} shares memory with operand {number}");
                return Err(Refusal::frame(text));
            }
        }
    }
    Ok(())
}
