//! Ceilings: the best rates of the units of this GPU, measured in the same run as the cases that
//! are compared with them.

mod oracle;
mod probes;

pub use probes::{Ceiling, Probed, verify};

use crate::case::Work;
use crate::error::Result;
use crate::timing::Cache;
use blockflash_ops::{DType, Stream};

/// Measured rates, in units per second.
#[derive(Clone, Debug, Default)]
pub struct Ceilings {
    rates: Vec<(Ceiling, f64)>,
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
        self.rates.push((ceiling, rate));
    }

    /// The unit that needs the most time for this work, or `None` if a rate is unknown. Device
    /// memory does not limit a warm launch whose operands fit into L2.
    pub fn limit(&self, work: &Work, dtype: DType, cache: Cache) -> Option<Limit> {
        let best = |ceilings: &[Ceiling]| {
            let rates = self.rates.iter().filter(|(ceiling, _)| ceilings.contains(ceiling));
            rates.map(|&(_, rate)| rate).reduce(f64::max)
        };
        let matmul = match dtype {
            DType::F16 => best(&[Ceiling::MmaF16, Ceiling::WgmmaF16])?,
            DType::BF16 => best(&[Ceiling::MmaBf16, Ceiling::WgmmaBf16])?,
            // Work without multiplications is not limited by their rate.
            _ if work.flops == 0.0 => f64::INFINITY,
            _ => return None,
        };
        let hbm = best(&[Ceiling::HbmRead, Ceiling::HbmCopy])?;
        let l2 = best(&[Ceiling::L2Read, Ceiling::L2Bulk])?;
        let from_memory =
            if cache == Cache::Warm && work.bytes <= self.l2_bytes { 0.0 } else { work.bytes };
        let limits = [
            ("matmul", work.flops / matmul),
            ("exp", work.exps / best(&[Ceiling::Exp2])?),
            ("l2", work.l2_bytes / l2),
            ("hbm", from_memory / hbm),
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
        for (ceiling, rate) in [
            (Ceiling::MmaBf16, 4e14),
            (Ceiling::WgmmaBf16, 8e14),
            (Ceiling::Exp2, 4e12),
            (Ceiling::HbmRead, 4e12),
            (Ceiling::HbmCopy, 3e12),
            (Ceiling::L2Read, 5e12),
            (Ceiling::L2Bulk, 9e12),
        ] {
            ceilings.add(ceiling, rate);
        }
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
