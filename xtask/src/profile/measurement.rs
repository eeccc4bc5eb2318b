//! One profiled launch: its counted work, its measured counters, and the ceilings of its GPU.

use super::{
    ceilings::{Ceilings, Limit},
    gpu::Gpu,
    launch::Launch,
    raw::Raw,
};

/// Counters of the tensor pipe: the first one that the GPU has.
pub const TENSOR_PIPE: &[&str] = &[
    "sm__pipe_tensor_cycles_active",
    "sm__pipe_tensor_op_hmma_cycles_active",
    "sm__pipe_tensor_subpipe_hmma_cycles_active",
    "sm__inst_executed_pipe_tensor",
];
/// Duration of the kernel.
pub const DURATION: &str = "gpu__time_duration.sum";
/// Bytes that L2 delivers to the SMs, TMA loads included.
pub const L2_READ: &str = "l1tex__m_xbar2l1tex_read_bytes.sum";
/// Bytes read from device memory.
pub const HBM_READ: &str = "dram__bytes_read.sum";
/// Bytes written to device memory.
pub const HBM_WRITE: &str = "dram__bytes_write.sum";

/// A profiled launch.
pub struct Measurement {
    /// The GPU that ran it.
    pub gpu: Gpu,
    /// Where the image comes from.
    pub images: String,
    /// The kernel and its counted work.
    pub launch: Launch,
    /// What Nsight Compute counted.
    pub raw: Raw,
    /// The GPU's limits.
    pub ceilings: Ceilings,
}

impl Measurement {
    /// Puts a measurement together.
    pub fn new(gpu: Gpu, images: String, launch: Launch, raw: Raw, ceilings: Ceilings) -> Self {
        let mut measurement = Self { gpu, images, launch, raw, ceilings };
        // Where the rate of the tensor cores is not known, their utilisation implies it.
        measurement.ceilings.matmul = measurement.ceilings.matmul.or_else(|| {
            let name = |counter| format!("{counter}.avg.pct_of_peak_sustained_active");
            let busy = TENSOR_PIPE.iter().find_map(|counter| measurement.raw.get(&name(counter)));
            ratio(100.0 * measurement.flop_rate()?, busy)
        });
        measurement
    }

    /// Useful floating-point operations per second.
    pub fn flop_rate(&self) -> Option<f64> {
        self.rate(self.launch.flops)
    }

    /// A quantity of the launch per second.
    pub fn rate(&self, quantity: f64) -> Option<f64> {
        ratio(quantity, self.raw.get(DURATION))
    }

    /// Bytes that L2 delivered to the SMs.
    pub fn l2_bytes(&self) -> Option<f64> {
        self.raw.get(L2_READ)
    }

    /// Bytes that went to and from device memory.
    pub fn hbm_bytes(&self) -> Option<f64> {
        Some(self.raw.get(HBM_READ)? + self.raw.get(HBM_WRITE)?)
    }

    /// What limits the launch with the bytes that it moved.
    pub fn limit(&self) -> Option<Limit> {
        let [l2, hbm] = [self.l2_bytes(), self.hbm_bytes()].map(Option::unwrap_or_default);
        self.ceilings.limit(&self.launch, l2, hbm)
    }

    /// The useful FLOP/s that this limit allows.
    pub fn attainable(&self) -> Option<f64> {
        ratio(self.launch.flops, Some(self.limit()?.seconds))
    }
}

/// A quotient; `None` where the divisor is missing or 0.
pub fn ratio(above: f64, below: Option<f64>) -> Option<f64> {
    below.filter(|&below| below > 0.0).map(|below| above / below)
}

#[cfg(test)]
pub(super) mod tests {
    use super::{super::raw, *};
    use blockflash_sys::ComputeCapability;

    pub(in super::super) fn sample() -> Measurement {
        let raw = raw::parse(raw::tests::CSV, "blockflash_sample").unwrap();
        let gpu = Gpu {
            name: "Some GPU".into(),
            capability: ComputeCapability::new(9, 0),
            driver: "1.2".into(),
        };
        let launch = Launch {
            case: "b4_s4096_h32_d64_full_bf16".into(),
            symbol: "blockflash_sample".into(),
            flops: 200e9,
            bytes: 125e6,
            l2_bytes: 1e9,
            exps: 0.0,
        };
        let ceilings = Ceilings::stated(&raw, "bf16");
        Measurement::new(gpu, "0123456789ab".into(), launch, raw, ceilings)
    }

    #[test]
    fn rates_and_limits() {
        let mut measurement = sample();
        assert_eq!(measurement.flop_rate(), Some(400e12));
        assert_eq!((measurement.l2_bytes(), measurement.hbm_bytes()), (Some(2e9), Some(250e6)));
        measurement.ceilings = Ceilings { matmul: Some(800e12), ..Ceilings::default() };
        assert_eq!(measurement.attainable(), Some(800e12));
        let Measurement { gpu, images, launch, raw, .. } = sample();
        let implied = Measurement::new(gpu, images, launch, raw, Ceilings::default());
        assert!((implied.ceilings.matmul.unwrap() / (400e12 / 0.541) - 1.0).abs() < 1e-9);
    }
}
