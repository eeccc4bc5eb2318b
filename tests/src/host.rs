//! Bits of host buffers into tensors of any device and back.

use crate::number::POISON;
use crate::placement::Placed;
use blockflash_cases::io::Array;
use blockflash_ops::{DType, Device, E4M3, E5M2, Stream, Tensor, View, ViewMut};
use half::{bf16, f16};

/// A stream of the CPU.
pub fn cpu() -> Stream {
    Device::cpu().stream().expect("the CPU has streams")
}

/// Runs every case on the CPU, and fails with what was wrong in each that failed.
pub fn all_pass<C, T>(cases: &[C], run: impl Fn(&C, &Stream) -> Result<T, String>) {
    let stream = cpu();
    let failures: Vec<String> = cases.iter().filter_map(|case| run(case, &stream).err()).collect();
    let (failed, all) = (failures.len(), cases.len());
    assert!(failed == 0, "{failed} of {all} cases failed:\n{}", failures.join("\n"));
}

/// Numbers of a floating-point type that are exact in f32, or rounded to it.
pub fn array(dtype: DType, shape: &[usize], values: &[f32]) -> Array {
    Array::rounded(shape, values, dtype)
        .unwrap_or_else(|| panic!("{} values of {dtype} for {shape:?}", values.len()))
}

/// An operand of these numbers where a placement has it, with NaN in every gap. Numbers beyond its
/// shape are left out.
pub fn place(
    stream: &Stream,
    dtype: DType,
    values: &[f32],
    placed: &Placed,
) -> Result<Tensor, String> {
    let tensor = placed.upload(&logical(dtype, values, placed), stream);
    tensor.map_err(|error| format!("upload of {dtype} {:?}: {error}", placed.physical))
}

/// Replaces the numbers of such an operand; its memory stays where it is.
pub fn replace(
    tensor: &mut Tensor,
    stream: &Stream,
    values: &[f32],
    placed: &Placed,
) -> Result<(), String> {
    let replaced = logical(tensor.dtype(), values, placed).placed(placed).write(tensor, stream);
    replaced.map_err(|error| format!("refill: {error}"))
}

fn logical(dtype: DType, values: &[f32], placed: &Placed) -> Array {
    array(dtype, placed.shape(), &values[..placed.shape().iter().product()])
}

/// A tensor with these bits, one `u32` per element.
pub fn upload(
    stream: &Stream,
    dtype: DType,
    bits: &[u32],
    shape: &[usize],
) -> Result<Tensor, String> {
    let narrow = || bits.iter().map(|&bits| bits as u16).collect::<Vec<u16>>();
    let bytes = || bits.iter().map(|&bits| bits as u8).collect::<Vec<u8>>();
    match dtype {
        DType::F16 => Tensor::from_slice::<f16>(stream, bytemuck::cast_slice(&narrow()), shape),
        DType::BF16 => Tensor::from_slice::<bf16>(stream, bytemuck::cast_slice(&narrow()), shape),
        DType::F32 => Tensor::from_slice::<f32>(stream, bytemuck::cast_slice(bits), shape),
        DType::I32 => Tensor::from_slice::<i32>(stream, bytemuck::cast_slice(bits), shape),
        DType::U8 => Tensor::from_slice(stream, &bytes(), shape),
        DType::E4M3 => Tensor::from_slice::<E4M3>(stream, bytemuck::cast_slice(&bytes()), shape),
        DType::E5M2 => Tensor::from_slice::<E5M2>(stream, bytemuck::cast_slice(&bytes()), shape),
        DType::I8 => Tensor::from_slice::<i8>(stream, bytemuck::cast_slice(&bytes()), shape),
        other => panic!("no tensors of {other}"),
    }
    .map_err(|error| format!("upload of {dtype} {shape:?}: {error}"))
}

/// Replaces the contents of a tensor; its memory stays where it is.
pub fn refill(tensor: &mut Tensor, stream: &Stream, bits: &[u32]) -> Result<(), String> {
    let narrow = || bits.iter().map(|&bits| bits as u16).collect::<Vec<u16>>();
    let bytes = || bits.iter().map(|&bits| bits as u8).collect::<Vec<u8>>();
    match tensor.dtype() {
        DType::F16 => tensor.copy_from_slice::<f16>(stream, bytemuck::cast_slice(&narrow())),
        DType::BF16 => tensor.copy_from_slice::<bf16>(stream, bytemuck::cast_slice(&narrow())),
        DType::F32 => tensor.copy_from_slice::<f32>(stream, bytemuck::cast_slice(bits)),
        DType::I32 => tensor.copy_from_slice::<i32>(stream, bytemuck::cast_slice(bits)),
        DType::U8 => tensor.copy_from_slice(stream, &bytes()),
        DType::E4M3 => tensor.copy_from_slice::<E4M3>(stream, bytemuck::cast_slice(&bytes())),
        DType::E5M2 => tensor.copy_from_slice::<E5M2>(stream, bytemuck::cast_slice(&bytes())),
        DType::I8 => tensor.copy_from_slice::<i8>(stream, bytemuck::cast_slice(&bytes())),
        other => panic!("no tensors of {other}"),
    }
    .map_err(|error| format!("refill: {error}"))
}

/// The bits of a tensor, after everything queued on the stream.
pub fn download(stream: &Stream, tensor: &Tensor) -> Result<Vec<u32>, String> {
    let widen = |bits: &[u16]| bits.iter().map(|&bits| u32::from(bits)).collect();
    let widen_bytes = |bits: &[u8]| bits.iter().map(|&bits| u32::from(bits)).collect();
    match tensor.dtype() {
        DType::F16 => tensor.to_vec::<f16>(stream).map(|v| widen(bytemuck::cast_slice(&v))),
        DType::BF16 => tensor.to_vec::<bf16>(stream).map(|v| widen(bytemuck::cast_slice(&v))),
        DType::F32 => tensor.to_vec::<f32>(stream).map(|v| bytemuck::cast_slice(&v).to_vec()),
        DType::I32 => tensor.to_vec::<i32>(stream).map(|v| bytemuck::cast_slice(&v).to_vec()),
        DType::U8 => tensor.to_vec::<u8>(stream).map(|v| widen_bytes(&v)),
        DType::E4M3 => tensor.to_vec::<E4M3>(stream).map(|v| widen_bytes(bytemuck::cast_slice(&v))),
        DType::E5M2 => tensor.to_vec::<E5M2>(stream).map(|v| widen_bytes(bytemuck::cast_slice(&v))),
        DType::I8 => tensor.to_vec::<i8>(stream).map(|v| widen_bytes(bytemuck::cast_slice(&v))),
        other => panic!("no tensors of {other}"),
    }
    .map_err(|error| format!("download: {error}"))
}

/// A tensor whose every byte is poison.
pub fn poisoned(stream: &Stream, dtype: DType, shape: &[usize]) -> Result<Tensor, String> {
    let mut tensor = Tensor::empty(stream, dtype, shape).map_err(|error| error.to_string())?;
    tensor.fill_bytes(stream, POISON).map_err(|error| error.to_string())?;
    Ok(tensor)
}

/// The logical tensor inside a physical one.
pub fn view<'a>(tensor: &'a Tensor, placed: &Placed) -> View<'a> {
    placed.view(tensor).expect("a tensor of the physical shape")
}

/// The logical tensor inside a physical one, for writing.
pub fn view_mut<'a>(tensor: &'a mut Tensor, placed: &Placed) -> ViewMut<'a> {
    placed.view_mut(tensor).expect("a tensor of the physical shape")
}
