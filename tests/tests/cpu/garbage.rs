//! The cases of `garbage_gpu` on the CPU: a typed error or a result, no panic. Each of them is one
//! that the kernel whose turn it is would take on the GPU that the CPU stands in for.
#![forbid(unsafe_code)]

use blockflash_ops::{ComputeCapability, CudaProperties, Device};
use blockflash_tests::garbage::{Ended, Kind, Place, fuzz};

#[test]
fn typed_errors_and_nothing_outside() {
    let gpu = CudaProperties {
        ordinal: 0,
        name: "imagined".into(),
        compute_capability: ComputeCapability::new(9, 0),
        multiprocessors: 132,
        smem_per_block: 227 << 10,
        smem_per_multiprocessor: 228 << 10,
        l2_bytes: 50 << 20,
        memory_bytes: 141 << 30,
        driver_version: 13000,
        clock_khz: 1_980_000,
        memory_clock_khz: 3_200_000,
        memory_bus_bits: 6144,
    };
    let ended = fuzz("garbage_cpu", 1250, &Place::instead_of(gpu, Device::cpu().stream().unwrap()));
    if std::env::var_os("BLOCKFLASH_FUZZ_CASES").is_none() {
        let kinds = [
            Kind::Packed,
            Kind::PackedMasked,
            Kind::PackedPartial,
            Kind::PackedGradients,
            Kind::MaskedGradients,
            Kind::PartialGradients,
            Kind::Cached,
            Kind::BuiltMask,
            Kind::Product,
            Kind::Sampled,
        ];
        for of in
            kinds.into_iter().flat_map(|kind| [(kind, Ended::Computed), (kind, Ended::Refused)])
        {
            assert!(ended.get(&of).is_some_and(|&count| count >= 10), "{of:?}: {ended:?}");
        }
    }
}
