//! What a GPU can do in a clock, from its own attributes: the input of the estimates by which
//! kernels that no measurement has ranked are compared.

use blockflash_safe::CudaProperties;

/// Rates of a GPU at its highest clock, per SM or for the whole GPU.
///
/// Number of SMs, clocks, width of the memory bus and size of L2 are attributes that the driver
/// reports. Only the rate of the tensor cores is looked up, since no attribute tells it: FLOPs per
/// clock and SM of products of f16 and bf16 with f32 sums, without structured sparsity.
///
/// | compute capability | GPUs | rate | source |
/// |---|---|---:|---|
/// | 8.0, 8.7 | A100, Orin | 2048 | data sheets: 312 TFLOP/s, 170 sparse int8 TOPS |
/// | 8.6 | A10, A40, RTX A6000 | 1024 | data sheets: 125, 149.7, 154.8 TFLOP/s |
/// | 8.6 | GeForce RTX 30 | 512 | GA102 white paper: RTX 3090 71 TFLOP/s |
/// | 8.9 | L4, L40S, RTX 6000 Ada | 1024 | data sheets: 121, 362, 364 TFLOP/s |
/// | 8.9 | L40 | 512 | data sheet: 181 TFLOP/s |
/// | 8.9 | GeForce RTX 40 | 512 | Ada white paper: RTX 4090 165.2 TFLOP/s |
/// | 9.0 | H100, H200 | 2440 | measured on an H200 (`mma_bf16`) |
/// | 12.0 | GeForce RTX 50 | 512 | Blackwell white paper: RTX 5090 209.5 TFLOP/s |
/// | 12.0 | others | 1024 | assumed, as Ada |
/// | 10, 11 | B200, Thor | 2048 | assumed, as an A100 |
///
/// The white papers state that GeForce GPUs multiply with f16 sums at twice that rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuRates {
    /// SMs.
    pub multiprocessors: f64,
    /// SM clocks per second.
    pub clock: f64,
    /// FLOPs per clock and SM of dense `mma.sync` products of f16 and bf16 with f32 sums.
    pub flops: f64,
    /// Bytes of device memory per clock, for the whole GPU; infinite where the driver does not
    /// report the memory.
    pub memory_bytes: f64,
    /// Bytes that L2 holds.
    pub l2_capacity: f64,
}

/// Bytes per clock that an SM gets from L2, with all SMs reading: 32.4 on an H200
/// (`benches/results/nvidia-h200/ceilings.jsonl`), assumed for every GPU.
const L2_BYTES: f64 = 32.0;
/// Bytes per clock that an SM reads from or writes to shared memory: 32 banks of 4 bytes.
const SHARED_BYTES: f64 = 128.0;
/// Exponentials per clock and SM, from the table of arithmetic throughput in the CUDA programming
/// guide: the same from compute capability 8.0 to 12.0.
const EXPONENTIALS: f64 = 16.0;
/// Clocks of a CTA before its first product and after its last one, in which it waits for memory
/// about four times. Assumed.
const CHANGE: f64 = 2000.0;

/// How much longer than the mean the longest CTA may be for CTAs to count as equally long.
const EVEN: f64 = 1.2;

impl GpuRates {
    /// The rates of a GPU.
    #[inline]
    pub fn of(gpu: &CudaProperties) -> Self {
        let clock = f64::from(gpu.clock_khz.max(1)) * 1e3;
        // Two transfers per clock and line of the bus.
        let memory =
            2.0 * f64::from(gpu.memory_clock_khz) * 1e3 * f64::from(gpu.memory_bus_bits) / 8.0;
        Self {
            multiprocessors: f64::from(gpu.multiprocessors.max(1)),
            clock,
            flops: tensor_flops(gpu),
            memory_bytes: if memory > 0.0 { memory / clock } else { f64::INFINITY },
            l2_capacity: gpu.l2_bytes as f64,
        }
    }

    /// FLOPs per second of dense products with f32 sums.
    pub fn flops_per_second(&self) -> f64 {
        self.flops * self.multiprocessors * self.clock
    }

    /// Bytes of device memory per second.
    pub fn memory_bytes_per_second(&self) -> f64 {
        self.memory_bytes * self.clock
    }

    /// Clocks of an SM for some work, unit by unit.
    #[inline]
    pub(crate) fn units(&self, work: &Work) -> Units {
        Units {
            multiply: work.flops / self.flops,
            exponential: work.exponentials / EXPONENTIALS,
            shared: work.shared_bytes / SHARED_BYTES,
            copy: work.copied_bytes / L2_BYTES,
        }
    }

    /// Clocks of a launch. When CTAs are few, the SMs that get the most of them determine the time.
    /// Many spread evenly, apart from half a CTA at the end; so do those of unequal length, since
    /// the longest start first. Device memory needs its time in any case.
    #[inline]
    pub(crate) fn clocks(&self, grid: &Grid) -> f64 {
        let Grid { ctas, resident, busy, alone, longest, memory_bytes } = *grid;
        let per_sm = ctas / self.multiprocessors;
        let few = per_sm <= 4.0 && longest <= EVEN * alone;
        let per_sm = if few { ceil(per_sm) } else { per_sm + 0.5 };
        // CTAs that share an SM fill the gaps of each other, until a unit is busy all the time.
        let turns = if few { ceil(per_sm / resident) } else { per_sm / resident };
        let all = (per_sm * busy).max(turns * (alone + CHANGE)).max(longest + CHANGE);
        let missed = if memory_bytes > self.l2_capacity { memory_bytes } else { 0.0 };
        all.max(missed / self.memory_bytes)
    }
}

/// What is done, in counts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    pub(crate) flops: f64,
    pub(crate) exponentials: f64,
    /// Reads and writes of shared memory.
    pub(crate) shared_bytes: f64,
    /// From L2 into shared memory, or from registers into L2.
    pub(crate) copied_bytes: f64,
}

/// Clocks of an SM by unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Units {
    pub(crate) multiply: f64,
    pub(crate) exponential: f64,
    pub(crate) shared: f64,
    pub(crate) copy: f64,
}

impl Units {
    /// Clocks until the busiest unit is done, with enough CTAs to keep it busy.
    pub(crate) fn busiest(&self) -> f64 {
        self.multiply.max(self.exponential).max(self.shared).max(self.copy)
    }
}

/// The CTAs of a launch, with one tile each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) ctas: f64,
    /// CTAs that fit into an SM together.
    pub(crate) resident: f64,
    /// Clocks of the busiest unit for a CTA of mean length.
    pub(crate) busy: f64,
    /// Clocks that a CTA of mean length takes on an SM of its own.
    pub(crate) alone: f64,
    /// The same of the longest one.
    pub(crate) longest: f64,
    /// Bytes of all operands, which come from device memory unless L2 holds them.
    pub(crate) memory_bytes: f64,
}

/// Number of CTAs that share an SM: as many as the kernel leaves registers for, if shared memory
/// has room for them, of which each CTA takes 1 KB more than it asks for.
pub(crate) fn resident(registers_for: u32, smem_bytes: u32, gpu: &CudaProperties) -> f64 {
    let room = gpu.smem_per_multiprocessor / (smem_bytes + 1024);
    f64::from(registers_for.min(room).max(1))
}

/// Whether portable kernels keep the order that they have on an H200, where they were tuned and are
/// the second choice.
pub(crate) fn was_tuned(gpu: &CudaProperties) -> bool {
    gpu.compute_capability.major == 9
}

/// `x.ceil()` for 0 ≤ x < 2^51. Before SSE 4.1 the standard one is a call into the C library on
/// x86-64. Adding 2^52 instead leaves no bits for a fraction.
#[inline]
pub(crate) fn ceil(x: f64) -> f64 {
    const NO_FRACTION: f64 = (1u64 << 52) as f64;
    let nearest = (x + NO_FRACTION) - NO_FRACTION;
    if nearest < x { nearest + 1.0 } else { nearest }
}

/// See the table of [`GpuRates`].
fn tensor_flops(gpu: &CudaProperties) -> f64 {
    let halved = gpu.name.starts_with("NVIDIA GeForce") || gpu.name == "NVIDIA L40";
    match (gpu.compute_capability.major, gpu.compute_capability.minor) {
        (8, 0 | 7) | (10 | 11, _) => 2048.0,
        (9, _) => 2440.0,
        _ if halved => 512.0,
        _ => 1024.0,
    }
}

#[cfg(test)]
#[path = "rates_tests.rs"]
pub(crate) mod tests;
