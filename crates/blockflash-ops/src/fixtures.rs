//! Made-up GPUs for tests of what needs none, and tensors in host memory.

use blockflash_safe::{ComputeCapability, CudaProperties, Device, E4M3, E5M2, Stream, Tensor};
use blockflash_sys::DType;
use half::{bf16, f16};

/// A GPU of this compute capability, with the shared memory that NVIDIA documents for it.
pub(crate) fn gpu(major: u32, minor: u32) -> CudaProperties {
    let smem_kib = match (major, minor) {
        (7, 5) => 64,
        (8, 0 | 7) => 163,
        (8 | 12, _) => 99,
        _ => 227,
    };
    CudaProperties {
        ordinal: 0,
        name: format!("test GPU {major}.{minor}"),
        compute_capability: ComputeCapability::new(major, minor),
        multiprocessors: 108,
        smem_per_block: smem_kib * 1024,
        smem_per_multiprocessor: (smem_kib + 1) * 1024,
        l2_bytes: 40 << 20,
        memory_bytes: 40 << 30,
        driver_version: 13000,
        clock_khz: 1_410_000,
        memory_clock_khz: 1_215_000,
        memory_bus_bits: 5120,
    }
}

/// One of every architecture that the kernels are made for, by image or by PTX.
pub(crate) fn gpus() -> Vec<CudaProperties> {
    [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (12, 0)]
        .map(|(major, minor)| gpu(major, minor))
        .into()
}

/// Reproducible values between −2 and 2, roughly normal.
pub(crate) fn values(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(1);
    let mut uniform = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..count).map(|_| uniform() + uniform() + uniform() + uniform()).collect()
}

/// The stream of the CPU.
pub(crate) fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

/// A tensor of f32.
pub(crate) fn f32s(values: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&cpu(), values, shape).unwrap()
}

/// A tensor of f16, bf16 or f32.
pub(crate) fn rounded(dtype: DType, values: &[f32], shape: &[usize]) -> Tensor {
    let stream = cpu();
    match dtype {
        DType::F16 => {
            let values: Vec<_> = values.iter().map(|&x| f16::from_f32(x)).collect();
            Tensor::from_slice(&stream, &values, shape)
        }
        DType::BF16 => {
            let values: Vec<_> = values.iter().map(|&x| bf16::from_f32(x)).collect();
            Tensor::from_slice(&stream, &values, shape)
        }
        _ => Tensor::from_slice(&stream, values, shape),
    }
    .unwrap()
}

/// The numbers in a tensor.
pub(crate) fn widened(tensor: &Tensor) -> Vec<f32> {
    let stream = cpu();
    match tensor.dtype() {
        DType::F16 => tensor.to_vec::<f16>(&stream).unwrap().iter().map(|x| x.to_f32()).collect(),
        DType::BF16 => tensor.to_vec::<bf16>(&stream).unwrap().iter().map(|x| x.to_f32()).collect(),
        DType::E4M3 => tensor.to_vec::<E4M3>(&stream).unwrap().iter().map(|x| x.to_f32()).collect(),
        DType::E5M2 => tensor.to_vec::<E5M2>(&stream).unwrap().iter().map(|x| x.to_f32()).collect(),
        DType::I8 => tensor.to_vec::<i8>(&stream).unwrap().iter().map(|&x| f32::from(x)).collect(),
        _ => tensor.to_vec(&stream).unwrap(),
    }
}

/// Codes of numbers around 0, and what they are.
pub(crate) fn codes(dtype: DType, seed: u64, shape: &[usize]) -> (Tensor, Vec<f32>) {
    let count = shape.iter().product();
    let numbers = values(count, seed);
    let stream = cpu();
    let tensor = match dtype {
        DType::E4M3 => {
            let codes: Vec<_> = numbers.iter().map(|&x| E4M3::saturated(x)).collect();
            Tensor::from_slice(&stream, &codes, shape)
        }
        DType::E5M2 => {
            let codes: Vec<_> = numbers.iter().map(|&x| E5M2::saturated(x)).collect();
            Tensor::from_slice(&stream, &codes, shape)
        }
        _ => {
            let codes: Vec<_> = numbers.iter().map(|&x| (x * 60.0) as i8).collect();
            Tensor::from_slice(&stream, &codes, shape)
        }
    };
    let tensor = tensor.unwrap();
    let numbers = widened(&tensor);
    (tensor, numbers)
}
