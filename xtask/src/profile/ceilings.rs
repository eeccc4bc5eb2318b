//! Ceilings of the GPU: measured on it, or else as Nsight Compute states them.

use super::{launch::Launch, raw::Raw};
use serde::Deserialize;
use std::{collections::BTreeMap, path::PathBuf};

/// Rates of one GPU per second, where known.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ceilings {
    /// Source of the rates.
    pub origin: String,
    /// Floating-point operations of the tensor cores with inputs of the kernel's type.
    pub matmul: Option<f64>,
    /// Exponentials.
    pub exp: Option<f64>,
    /// Bytes from L2.
    pub l2: Option<f64>,
    /// Bytes of device memory.
    pub hbm: Option<f64>,
}

/// A line of the records of `blockflash bench`; only ceilings have a rate.
#[derive(Deserialize)]
struct Line {
    /// Name of the ceiling: `hbm_read`, `l2_bulk`, `wgmma_bf16`, `exp2`.
    case: String,
    rate: Option<f64>,
    gpu: String,
}

/// The unit that limits a launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    /// Name of the unit.
    pub name: &'static str,
    /// Duration of a launch in seconds if that unit never idled.
    pub seconds: f64,
}

impl Ceilings {
    /// Ceilings of a GPU from the first file that has any.
    pub fn measured(files: &[PathBuf], gpu: &str, dtype: &str) -> Option<Self> {
        let read = |path: &PathBuf| {
            let text = std::fs::read_to_string(path).ok()?;
            Self::parse(&text, gpu, dtype)
        };
        files.iter().find_map(read)
    }

    /// For each rate the highest one, taking the newest record of each ceiling; `None` if there is
    /// no record for this GPU.
    fn parse(text: &str, gpu: &str, dtype: &str) -> Option<Self> {
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok());
        let newest: BTreeMap<String, f64> = lines
            .filter(|line| line.gpu == gpu)
            .filter_map(|line| Some((line.case, line.rate?)))
            .collect();
        let mut found = Self { origin: "measured".into(), ..Self::default() };
        let unknown = found.clone();
        for (name, rate) in newest {
            let slot = match name.split('_').next().unwrap_or_default() {
                // The choice of the matrix instruction belongs to the kernel and may be its
                // potential gain, so the faster one sets the ceiling.
                "mma" | "wgmma" if name.ends_with(&format!("_{dtype}")) => &mut found.matmul,
                "exp2" => &mut found.exp,
                "l2" => &mut found.l2,
                "hbm" => &mut found.hbm,
                _ => continue,
            };
            // `None` compares below every rate.
            if Some(rate) > *slot {
                *slot = Some(rate);
            }
        }
        (found != unknown).then_some(found)
    }

    /// Rates that Nsight Compute states, at the clocks of the profile.
    pub fn stated(raw: &Raw, dtype: &str) -> Self {
        let product = |peak: &str, clock: &str| Some(raw.get(peak)? * raw.get(clock)?);
        let source = if dtype == "bf16" { "bf16" } else { "fp16" };
        let matmul =
            format!("sm__ops_path_tensor_src_{source}_dst_fp32_sparsity_off.sum.peak_sustained");
        Self {
            origin: "stated by Nsight Compute".into(),
            matmul: product(&matmul, "sm__cycles_elapsed.avg.per_second"),
            exp: None,
            l2: product("lts__t_bytes.sum.peak_sustained", "lts__cycles_elapsed.avg.per_second"),
            hbm: product("dram__bytes.sum.peak_sustained", "dram__cycles_elapsed.avg.per_second"),
        }
    }

    /// The limit of a launch that moves these bytes: the unit that takes longest.
    pub fn limit(&self, launch: &Launch, l2_bytes: f64, hbm_bytes: f64) -> Option<Limit> {
        let units = [
            ("the tensor cores", launch.flops, self.matmul),
            ("exponentials", launch.exps, self.exp),
            ("L2", l2_bytes, self.l2),
            ("device memory", hbm_bytes, self.hbm),
        ];
        let limits = units
            .into_iter()
            .filter_map(|(name, work, rate)| Some(Limit { name, seconds: work / rate? }));
        limits.max_by(|a, b| a.seconds.total_cmp(&b.seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::super::raw;
    use super::*;

    #[test]
    fn lines_of_this_gpu_and_type_count() {
        let text = r#"{"op":"ceiling","case":"hbm_read","rate":5.0e12,"gpu":"A"}
{"op":"ceiling","case":"hbm_read","rate":4.0e12,"gpu":"A"}
{"op":"ceiling","case":"hbm_copy","rate":3.5e12,"gpu":"A"}
{"op":"ceiling","case":"hbm_read","rate":9.0e12,"gpu":"B"}
{"op":"ceiling","case":"mma_bf16","rate":5.0e14,"gpu":"A"}
{"op":"ceiling","case":"wgmma_bf16","rate":7.0e14,"gpu":"A"}
{"op":"attention_fwd","case":"b4_s4096_h32_d64_full_bf16","ceiling":"matmul","gpu":"A"}
{"op":"ceiling","case":"mma_f16","rate":8.0e14,"gpu":"A"}
no json"#;
        let found = Ceilings::parse(text, "A", "bf16").unwrap();
        assert_eq!((found.hbm, found.matmul, found.l2), (Some(4.0e12), Some(7.0e14), None));
        assert_eq!(Ceilings::parse(text, "A", "f16").unwrap().matmul, Some(8.0e14));
        assert_eq!(Ceilings::parse(text, "C", "f16"), None);
    }

    #[test]
    fn the_slowest_unit_limits() {
        let raw = raw::parse(raw::tests::CSV, "blockflash_sample").unwrap();
        let ceilings = Ceilings::stated(&raw, "bf16");
        assert_eq!(ceilings.hbm, Some(768.0 * 6.25e9));
        assert_eq!(Ceilings::stated(&raw, "f16").matmul, None, "the sample lacks it");
        let launch = Launch { flops: 946.176e9, ..Launch::default() };
        let limit = ceilings.limit(&launch, 0.0, 0.0).unwrap();
        assert_eq!(limit.name, "the tensor cores");
        assert!((limit.seconds - 1e-3).abs() < 1e-9);
        assert_eq!(ceilings.limit(&launch, 0.0, 48e9).unwrap().name, "device memory");
        assert_eq!(Ceilings::default().limit(&launch, 1.0, 1.0), None);
    }
}
