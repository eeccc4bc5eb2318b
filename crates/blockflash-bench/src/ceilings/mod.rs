//! Ceilings: the best rates of the units of this GPU, measured in the same run as the cases that
//! are compared with them.

mod expected;
mod probes;

pub use probes::{Ceiling, Probed, verify};

use crate::case::Work;
use crate::error::Result;
use crate::timing::Cache;
use blockflash_ops::{DType, Stream};

/// Measured rates, in units per second.
#[derive(Clone, Debug, Default)]
pub struct Ceilings {
    rates: Vec<(&'static str, f64)>,
    l2_bytes: f64,
}

/// The unit that limits a case, and the time at that limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    /// `matmul`, `exp`, `l2` or `hbm`.
    pub name: &'static str,
    /// Microseconds of a launch that only does this work, at the measured rate.
    pub us: f64,
}

impl Ceilings {
    /// Prepares and verifies every ceiling that the GPU of a stream has; a CPU has none.
    ///
    /// # Errors
    /// If the device fails.
    pub fn probes(stream: &Stream) -> Result<Vec<Probed>> {
        probes::prepare(stream)
    }

    /// Ceilings without any measured rate.
    pub fn new(stream: &Stream) -> Self {
        let l2_bytes = stream.device().cuda_properties().map_or(0.0, |gpu| gpu.l2_bytes as f64);
        Self { rates: Vec::new(), l2_bytes }
    }

    /// Adds a measured rate in units per second.
    pub fn add(&mut self, ceiling: Ceiling, rate: f64) {
        self.rates.push((ceiling.name, rate));
    }

    /// The unit that needs the most time for this work, or `None` if a rate is unknown. Device
    /// memory does not limit a warm launch whose operands fit into L2.
    pub fn limit(&self, work: &Work, dtype: DType, cache: Cache) -> Option<Limit> {
        let best = |names: [&str; 2]| {
            let rates = self.rates.iter().filter(|(name, _)| names.contains(name));
            rates.map(|&(_, rate)| rate).reduce(f64::max)
        };
        let matmul = match dtype {
            DType::F16 => best(["mma_f16", "wgmma_f16"])?,
            DType::BF16 => best(["mma_bf16", "wgmma_bf16"])?,
            DType::E4M3 => best(["mma_e4m3", "wgmma_e4m3"])?,
            // Work without multiplications is not limited by their rate.
            _ if work.flops == 0.0 => f64::INFINITY,
            _ => return None,
        };
        let fits = cache == Cache::Warm && work.bytes <= self.l2_bytes;
        let limits = [
            ("matmul", work.flops / matmul),
            ("exp", work.exps / best(["exp2"; 2])?),
            ("l2", work.l2_bytes / best(["l2_read", "l2_bulk"])?),
            ("hbm", if fits { 0.0 } else { work.bytes } / best(["hbm_read", "hbm_copy"])?),
        ];
        let (name, seconds) = limits.into_iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
        Some(Limit { name, us: seconds * 1e6 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_unit_binds() {
        let mut ceilings = Ceilings { rates: Vec::new(), l2_bytes: 50e6 };
        let work = Work { flops: 8e11, exps: 1e9, bytes: 4e8, l2_bytes: 1e9 };
        assert_eq!(ceilings.limit(&work, DType::BF16, Cache::Warm), None);
        ceilings.rates = vec![("mma_bf16", 4e14), ("wgmma_bf16", 8e14), ("exp2", 4e12)];
        ceilings.rates.extend([("hbm_read", 4e12), ("hbm_copy", 3e12)]);
        ceilings.rates.extend([("l2_read", 5e12), ("l2_bulk", 9e12)]);
        let limit = |work: Work, cache| {
            let limit = ceilings.limit(&work, DType::BF16, cache).unwrap();
            (limit.name, limit.us.round())
        };
        assert_eq!(limit(work, Cache::Warm), ("matmul", 1000.0));
        assert_eq!(limit(Work { exps: 8e9, ..work }, Cache::Warm), ("exp", 2000.0));
        assert_eq!(limit(Work { l2_bytes: 18e9, ..work }, Cache::Warm), ("l2", 2000.0));
        let bandwidth = Work { flops: 1e6, exps: 0.0, l2_bytes: 9e6, bytes: 4e7 };
        assert_eq!(limit(bandwidth, Cache::Warm), ("l2", 1.0));
        assert_eq!(limit(bandwidth, Cache::Cold), ("hbm", 10.0));
        assert_eq!(ceilings.limit(&work, DType::F32, Cache::Warm), None);
        let choosing = Work { flops: 0.0, ..bandwidth };
        assert_eq!(ceilings.limit(&choosing, DType::F32, Cache::Cold).unwrap().name, "hbm");
    }
}
