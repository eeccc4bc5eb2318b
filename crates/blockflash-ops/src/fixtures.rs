//! Made-up GPUs for tests of what needs none.

use blockflash_safe::{ComputeCapability, CudaProperties};

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
