//! Bits of host buffers into tensors of any device and back.

use crate::number::POISON;
use crate::placement::Placed;
use blockflash_ops::{DType, Layout, Stream, Tensor, View, ViewMut};
use half::{bf16, f16};

/// A tensor with these bits, one `u32` per element.
pub fn upload(stream: &Stream, dtype: DType, bits: &[u32], shape: &[usize]) -> Result<Tensor, String> {
    let narrow = || bits.iter().map(|&bits| bits as u16).collect::<Vec<u16>>();
    match dtype {
        DType::F16 => Tensor::from_slice::<f16>(stream, bytemuck::cast_slice(&narrow()), shape),
        DType::BF16 => Tensor::from_slice::<bf16>(stream, bytemuck::cast_slice(&narrow()), shape),
        DType::F32 => Tensor::from_slice::<f32>(stream, bytemuck::cast_slice(bits), shape),
        DType::I32 => Tensor::from_slice::<i32>(stream, bytemuck::cast_slice(bits), shape),
    }
    .map_err(|error| format!("upload of {dtype} {shape:?}: {error}"))
}

/// Replaces the contents of a tensor; its memory stays where it is.
pub fn refill(tensor: &mut Tensor, stream: &Stream, bits: &[u32]) -> Result<(), String> {
    let narrow = || bits.iter().map(|&bits| bits as u16).collect::<Vec<u16>>();
    match tensor.dtype() {
        DType::F16 => tensor.copy_from_slice::<f16>(stream, bytemuck::cast_slice(&narrow())),
        DType::BF16 => tensor.copy_from_slice::<bf16>(stream, bytemuck::cast_slice(&narrow())),
        DType::F32 => tensor.copy_from_slice::<f32>(stream, bytemuck::cast_slice(bits)),
        DType::I32 => tensor.copy_from_slice::<i32>(stream, bytemuck::cast_slice(bits)),
    }
    .map_err(|error| format!("refill: {error}"))
}

/// The bits of a tensor, after everything queued on the stream.
pub fn download(stream: &Stream, tensor: &Tensor) -> Result<Vec<u32>, String> {
    let widen = |bits: &[u16]| bits.iter().map(|&bits| u32::from(bits)).collect();
    match tensor.dtype() {
        DType::F16 => tensor.to_vec::<f16>(stream).map(|v| widen(bytemuck::cast_slice(&v))),
        DType::BF16 => tensor.to_vec::<bf16>(stream).map(|v| widen(bytemuck::cast_slice(&v))),
        DType::F32 => tensor.to_vec::<f32>(stream).map(|v| bytemuck::cast_slice(&v).to_vec()),
        DType::I32 => tensor.to_vec::<i32>(stream).map(|v| bytemuck::cast_slice(&v).to_vec()),
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
    let mut view = tensor.view();
    for (dim, range) in placed.ranges.iter().enumerate() {
        view = view.slice(dim, range.clone()).expect("a range of the physical shape");
    }
    view.permute(&placed.permutation).expect("a permutation")
}

/// The logical tensor inside a physical one, for writing.
pub fn view_mut<'a>(tensor: &'a mut Tensor, placed: &Placed) -> ViewMut<'a> {
    let mut view = tensor.view_mut();
    for (dim, range) in placed.ranges.iter().enumerate() {
        view = view.slice(dim, range.clone()).expect("a range of the physical shape");
    }
    view.permute(&placed.permutation).expect("a permutation")
}

/// A view with the first entry of dimension 0 repeated `times` times, by a stride of 0.
pub fn repeat(view: View<'_>, times: usize) -> View<'_> {
    let (mut shape, mut strides) = (view.shape().to_vec(), view.strides().to_vec());
    (shape[0], strides[0]) = (times, 0);
    let host = match view.dtype() {
        _ if !view.is_cpu() => None,
        DType::F16 => {
            Some(View::from_slice_strided::<f16>(view.as_slice().expect("on the CPU"), &shape, &strides))
        }
        DType::BF16 => {
            Some(View::from_slice_strided::<bf16>(view.as_slice().expect("on the CPU"), &shape, &strides))
        }
        DType::F32 => {
            Some(View::from_slice_strided::<f32>(view.as_slice().expect("on the CPU"), &shape, &strides))
        }
        DType::I32 => {
            Some(View::from_slice_strided::<i32>(view.as_slice().expect("on the CPU"), &shape, &strides))
        }
    };
    let repeated = host.unwrap_or_else(|| {
        let layout = Layout::strided(&shape, &strides).expect("a layout with the span of the old one");
        let ptr = view.device_ptr().expect("on a GPU");
        // SAFETY:
        // 1. `ptr` is the first element of a view of our own tensor on this device, and the layout reaches no further.
        // 2. The tensor is borrowed for the lifetime of the result, is not written meanwhile, and is freed in the order of the
        //    one stream on which it is used; no graph is captured from a repeated view.
        unsafe { View::from_raw_cuda(view.device(), ptr, view.dtype(), layout) }
    });
    repeated.expect("no more memory than before")
}
