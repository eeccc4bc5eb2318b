use super::*;
use blockflash_safe::ComputeCapability;

/// A GPU with the attributes that its data sheet or white paper states; the memory clock is half of
/// the data rate of a pin, as the driver reports it.
pub(crate) fn known(
    name: &str,
    (major, minor): (u32, u32),
    [multiprocessors, clock_mhz, memory_mhz, memory_bus_bits]: [u32; 4],
    [l2_mib, smem_kib]: [u32; 2],
) -> CudaProperties {
    CudaProperties {
        ordinal: 0,
        name: name.into(),
        compute_capability: ComputeCapability::new(major, minor),
        multiprocessors,
        smem_per_block: smem_kib * 1024,
        smem_per_multiprocessor: (smem_kib + 1) * 1024,
        l2_bytes: u64::from(l2_mib) << 20,
        memory_bytes: 24 << 30,
        driver_version: 13000,
        clock_khz: clock_mhz * 1000,
        memory_clock_khz: memory_mhz * 1000,
        memory_bus_bits,
    }
}

pub(crate) fn a100() -> CudaProperties {
    known("NVIDIA A100-SXM4-80GB", (8, 0), [108, 1410, 1593, 5120], [40, 163])
}

pub(crate) fn a10() -> CudaProperties {
    known("NVIDIA A10", (8, 6), [72, 1695, 6251, 384], [6, 99])
}

pub(crate) fn l4() -> CudaProperties {
    known("NVIDIA L4", (8, 9), [58, 2040, 6251, 192], [48, 99])
}

pub(crate) fn l40s() -> CudaProperties {
    known("NVIDIA L40S", (8, 9), [142, 2520, 9001, 384], [96, 99])
}

pub(crate) fn rtx_4090() -> CudaProperties {
    known("NVIDIA GeForce RTX 4090", (8, 9), [128, 2520, 10501, 384], [72, 99])
}

pub(crate) fn h200() -> CudaProperties {
    known("NVIDIA H200", (9, 0), [132, 1980, 3125, 6144], [50, 227])
}

/// TFLOP/s with f32 sums and without sparsity, and GB/s, as NVIDIA states them.
#[test]
fn attributes_give_the_rates_of_data_sheets() {
    let ga102 = |name, multiprocessors, clock, memory| {
        known(name, (8, 6), [multiprocessors, clock, memory, 384], [6, 99])
    };
    let stated = [
        (a100(), 312.0, 2039.0),
        (a10(), 125.0, 600.0),
        (ga102("NVIDIA RTX A6000", 84, 1800, 8001), 154.8, 768.0),
        (ga102("NVIDIA GeForce RTX 3090", 82, 1695, 9751), 71.0, 936.0),
        (l4(), 121.0, 300.0),
        (known("NVIDIA L40", (8, 9), [142, 2490, 9001, 384], [96, 99]), 181.0, 864.0),
        (l40s(), 362.0, 864.0),
        (
            known("NVIDIA RTX 6000 Ada Generation", (8, 9), [142, 2505, 10001, 384], [96, 99]),
            364.2,
            960.0,
        ),
        (rtx_4090(), 165.2, 1008.0),
        (
            known("NVIDIA GeForce RTX 5090", (12, 0), [170, 2407, 14001, 512], [96, 99]),
            209.5,
            1792.0,
        ),
        // Of an H100 only the memory is stated; the products are those of the H200's record.
        (known("NVIDIA H100 80GB HBM3", (9, 0), [132, 1980, 2619, 5120], [50, 227]), 637.0, 3350.0),
        (h200(), 637.0, 4800.0),
    ];
    for (gpu, tflops, gigabytes) in stated {
        let rates = GpuRates::of(&gpu);
        let [flops, bytes] =
            [rates.flops_per_second() / 1e12, rates.memory_bytes_per_second() / 1e9];
        assert!((flops / tflops - 1.0).abs() < 0.02, "{}: {flops} TFLOP/s", gpu.name);
        assert!((bytes / gigabytes - 1.0).abs() < 0.01, "{}: {bytes} GB/s", gpu.name);
    }
}

#[test]
fn what_a_driver_does_not_report_limits_nothing() {
    let gpu = CudaProperties { memory_clock_khz: 0, clock_khz: 0, multiprocessors: 0, ..l4() };
    let rates = GpuRates::of(&gpu);
    let grid = Grid {
        ctas: 10.0,
        resident: 2.0,
        busy: 1000.0,
        alone: 1500.0,
        longest: 1500.0,
        memory_bytes: 1e12,
    };
    assert_eq!(rates.clocks(&grid), 10.5 * 1000.0_f64.max((1500.0 + CHANGE) / 2.0));
}

#[test]
fn launches_end_with_their_busiest_multiprocessor() {
    let rates = GpuRates::of(&l4());
    let clocks = |ctas: f64| {
        let (busy, alone) = (10_000.0, 15_000.0);
        rates.clocks(&Grid { ctas, resident: 2.0, busy, alone, longest: alone, memory_bytes: 0.0 })
    };
    // A CTA for each SM, or for one alone, takes as long; a second one hides in its gaps.
    assert_eq!([1.0, 58.0].map(clocks), [17_000.0; 2]);
    assert_eq!([59.0, 116.0].map(clocks), [20_000.0; 2]);
    assert_eq!(clocks(117.0), 34_000.0);
    assert_eq!(clocks(58.0 * 100.0), 100.5 * 10_000.0);
    // The longest one takes its time on any GPU.
    let uneven =
        Grid { ctas: 4.0, resident: 2.0, busy: 10.0, alone: 10.0, longest: 1e6, memory_bytes: 0.0 };
    assert_eq!(rates.clocks(&uneven), 1e6 + CHANGE);
    // 300 GB/s, unless L2 holds everything.
    let read = |mib: f64| rates.clocks(&Grid { memory_bytes: mib * 1048576.0, ..uneven });
    assert_eq!(read(48.0), 1e6 + CHANGE);
    let seconds = read(4096.0) / rates.clock;
    assert!((seconds / (4.0 * 1.0737e9 / 300e9) - 1.0).abs() < 0.01, "{seconds}");
}

#[test]
fn residents_fit_into_shared_memory() {
    let kib = |kib: u32| kib * 1024;
    assert_eq!(
        [kib(48), kib(49), kib(50), kib(98)].map(|smem| resident(4, smem, &l4())),
        [2.0, 2.0, 1.0, 1.0]
    );
    assert_eq!(resident(2, kib(16), &l4()), 2.0);
    assert_eq!(resident(4, kib(48), &a100()), 3.0);
}
