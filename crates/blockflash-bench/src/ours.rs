//! Our implementation of a case: inputs on the device, the kernels to compare, and verification
//! before any timing.

mod host;

use crate::case::{Case, Operands};
use crate::error::{Error, Result};
use crate::timing::{Cache, Repeat, Window};
use blockflash_ops::{Kernel, Stream};
use blockflash_sys::manifest;
pub use host::HostCost;

/// One case on one device, with the kernels that compute it.
#[derive(Debug)]
pub struct Ours {
    stream: Stream,
    operands: Box<dyn Operands>,
    /// Kernels to measure: the one that the library selects, or every one that was forced by name.
    pub kernels: Vec<MeasuredKernel>,
}

/// A kernel that computes the case, verified.
#[derive(Debug)]
pub struct MeasuredKernel {
    /// The kernel that is forced by name; `None` leaves the choice to the library.
    kernel: Option<&'static Kernel>,
    /// Name of the kernel; `None` on the CPU.
    pub symbol: Option<String>,
    /// Whether the output is right.
    pub verified: bool,
    /// ‖out − reference‖ / ‖reference‖ on the checked elements.
    pub rel_err: f64,
    /// Microseconds that loading the kernel took, if this case was the first to use it.
    pub load_us: Option<f64>,
    /// Host time of a call; measured for the selected kernel on a GPU.
    pub host: HostCost,
    repeat: Repeat,
}

impl Ours {
    /// Draws inputs, runs and verifies every kernel, and captures its launches. With `names`, the
    /// selected kernel is replaced by all kernels that accept the case and whose names contain one
    /// of these texts.
    ///
    /// # Errors
    /// If no kernel computes the case, or the device fails.
    pub fn new(
        case: &Case,
        stream: &Stream,
        cache: Cache,
        seed: u64,
        names: Option<&[String]>,
    ) -> Result<Self> {
        let mut operands = case.shape().operands(stream, seed)?;
        if cache == Cache::Rotated {
            operands.rotate(stream)?;
        }
        let mut kernels = Vec::new();
        for Candidate { kernel, forced } in candidates(&mut *operands, stream, names)? {
            let load_us = match kernel {
                Some(kernel) if !operands.is_loaded() => host::load(kernel, stream)?,
                _ => None,
            };
            let symbol = kernel.map(Kernel::symbol);
            let kernel = kernel.filter(|_| forced);
            let (verified, rel_err) = operands.verify(kernel, stream, seed)?;
            let repeat = Repeat::new(stream, cache, |stream| operands.launch(kernel, stream))?;
            let host = match forced || stream.device().is_cpu() {
                true => HostCost::default(),
                false => host::cost(&mut *operands, stream, repeat.launch_us())?,
            };
            kernels.push(MeasuredKernel {
                kernel,
                symbol,
                verified,
                rel_err,
                load_us,
                host,
                repeat,
            });
        }
        if kernels.is_empty() {
            return Err(Error::Option(
                "no kernel that --kernel names computes this case on this GPU".to_owned(),
            ));
        }
        Ok(Self { stream: stream.clone(), operands, kernels })
    }

    /// Launches one kernel and waits: the selected kernel or, with `names`, the only kernel that
    /// computes the case and whose name contains one of these texts. Returns the kernel, `None` on
    /// the CPU.
    ///
    /// # Errors
    /// As [`new`](Self::new), and if several kernels match.
    pub fn launch(
        case: &Case,
        stream: &Stream,
        seed: u64,
        names: Option<&[String]>,
        launches: usize,
    ) -> Result<Option<&'static Kernel>> {
        let mut operands = case.shape().operands(stream, seed)?;
        let candidates = candidates(&mut *operands, stream, names)?;
        let [Candidate { kernel, forced }] = candidates[..] else {
            let symbols: Vec<_> = candidates
                .iter()
                .filter_map(|candidate| candidate.kernel)
                .map(Kernel::symbol)
                .collect();
            return Err(Error::Option(match symbols.is_empty() {
                true => "no kernel that --kernel names computes this case on this GPU".to_owned(),
                false => format!("--kernel matches several kernels: {}", symbols.join(", ")),
            }));
        };
        for _ in 0..launches {
            operands.launch(kernel.filter(|_| forced), stream)?;
        }
        stream.synchronize()?;
        Ok(kernel)
    }

    /// Runs one window of a kernel. Returns when the device is idle.
    ///
    /// # Errors
    /// If the device fails.
    pub fn window(&mut self, kernel: usize, ms: f64) -> Result<Window> {
        let Self { stream, operands, kernels } = self;
        let Some(MeasuredKernel { kernel, repeat, .. }) = kernels.get_mut(kernel) else {
            return Err(Error::Option(format!("there is no kernel {kernel}")));
        };
        repeat.window(stream, ms, |stream| operands.launch(*kernel, stream))
    }
}

impl MeasuredKernel {
    /// Number of launches in one CUDA graph.
    pub fn launches(&self) -> usize {
        self.repeat.launches()
    }
}

/// A kernel to measure.
struct Candidate {
    /// `None` on the CPU.
    kernel: Option<&'static Kernel>,
    /// Whether the kernel was forced by name; otherwise it is the library's choice.
    forced: bool,
}

/// Whether a text is the whole symbol of a kernel.
fn is_symbol(text: &str) -> bool {
    manifest::kernels().iter().any(|kernel| kernel.symbol() == text)
}

/// The kernel that the library selects, or the kernels with a wanted name that accept these
/// operands: a name also matches kernels for other sizes and types.
fn candidates(
    operands: &mut dyn Operands,
    stream: &Stream,
    names: Option<&[String]>,
) -> Result<Vec<Candidate>> {
    let Some(gpu) = stream.device().cuda_properties() else {
        return match names {
            Some(_) => {
                Err(Error::Option("--kernel names GPU kernels, but the CPU is used".to_owned()))
            }
            None => Ok(vec![Candidate { kernel: None, forced: false }]),
        };
    };
    let Some(names) = names else {
        return Ok(vec![Candidate { kernel: Some(operands.select(gpu)?), forced: false }]);
    };
    let mut found: Vec<&'static Kernel> = Vec::new();
    for kernel in
        manifest::kernels().iter().filter(|kernel| kernel.target.runs_on(gpu.compute_capability))
    {
        let symbol = kernel.symbol();
        // A text that equals a whole symbol does not mean longer symbols.
        let wanted = names
            .iter()
            .any(|name| symbol == *name || symbol.contains(name.as_str()) && !is_symbol(name));
        // A kernel may exist for several targets: the first is preferred.
        if wanted
            && !found.iter().any(|other| other.symbol() == symbol)
            && operands.accepts(kernel, gpu)?
        {
            found.push(kernel);
        }
    }
    Ok(found.into_iter().map(|kernel| Candidate { kernel: Some(kernel), forced: true }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{AttentionShape, BsrShape, MaskKind, Pattern};
    use blockflash_ops::{DType, Device};

    const ATTENTION: AttentionShape = AttentionShape {
        batch: 1,
        seqlen_q: 33,
        seqlen_kv: 65,
        num_heads_q: 4,
        num_heads_kv: 2,
        head_dim: 16,
        mask: MaskKind::Causal,
        dtype: DType::BF16,
    };
    const BSR: BsrShape = BsrShape {
        m: 64,
        n: 24,
        k: 96,
        block_size: 16,
        density: 0.4,
        pattern: Pattern::Uniform,
        dtype: DType::F16,
    };

    #[test]
    fn packed_sequences_are_verified_and_timed_on_the_cpu() {
        let stream = Device::cpu().stream().unwrap();
        for id in ["varlen33+1+64x2_h4kv2_d16_causal_bf16", "varlen5+40_h2_d8_full_f16"] {
            let case: Case = id.parse().unwrap();
            let mut ours = Ours::new(&case, &stream, Cache::Warm, 5, None).unwrap();
            let kernel = &ours.kernels[0];
            assert!(
                kernel.verified && kernel.rel_err > 0.0 && kernel.rel_err < 1e-2,
                "{id} {}",
                kernel.rel_err
            );
            assert!(ours.window(0, 1.0).unwrap().us > 0.0);
        }
    }

    #[test]
    fn lists_of_blocks_are_verified_and_timed_on_the_cpu() {
        let stream = Device::cpu().stream().unwrap();
        for id in [
            "b2_q128_kv192_h4kv2_d16_q64kv64_d0.5_uniform_full_bf16",
            "b1_s256_h4kv2m2_d16_q64kv64_d0.5_uniform_causal_f16",
            "b1_s256_h2m1_d16_q128kv64_d0.4_power_law_full_bf16",
        ] {
            let case: Case = id.parse().unwrap();
            let mut ours = Ours::new(&case, &stream, Cache::Warm, 5, None).unwrap();
            let kernel = &ours.kernels[0];
            assert!(
                kernel.verified && kernel.rel_err > 0.0 && kernel.rel_err < 1e-2,
                "{id} {}",
                kernel.rel_err
            );
            assert!(ours.window(0, 1.0).unwrap().us > 0.0);
        }
        let odd = "b1_s96_h2_d16_q32kv32_d0.5_uniform_full_bf16".parse().unwrap();
        let refused = Ours::new(&odd, &stream, Cache::Warm, 5, None).unwrap_err();
        assert!(refused.to_string().contains("multiple of 64"), "{refused}");
    }

    #[test]
    fn masks_are_verified_and_timed_on_the_cpu() {
        let stream = Device::cpu().stream().unwrap();
        for id in [
            "mask_s1000_h2_b64_scores_d16_bf16",
            "mask_s1000_h2_b64_top3",
            "mask_s300_h1_b128_top9",
        ] {
            let mut ours = Ours::new(&id.parse().unwrap(), &stream, Cache::Warm, 5, None).unwrap();
            let kernel = &ours.kernels[0];
            assert!(kernel.verified && kernel.rel_err < 1e-5, "{id} {}", kernel.rel_err);
            assert!(ours.window(0, 1.0).unwrap().us > 0.0);
        }
        let odd = "mask_s1000_h2_b100_top3".parse().unwrap();
        let refused = Ours::new(&odd, &stream, Cache::Warm, 5, None).unwrap_err();
        assert!(refused.to_string().contains("multiple of 64"), "{refused}");
    }

    #[test]
    fn sampled_products_are_verified_and_timed_on_the_cpu() {
        let stream = Device::cpu().stream().unwrap();
        for layouts in ["row_row", "row_column", "column_row", "column_column"] {
            let case =
                format!("sddmm_m100_n90_k70_b32_d0.5_uniform_{layouts}_bf16").parse().unwrap();
            let mut ours = Ours::new(&case, &stream, Cache::Warm, 5, None).unwrap();
            let kernel = &ours.kernels[0];
            assert!(
                kernel.verified && kernel.rel_err > 0.0 && kernel.rel_err < 1e-2,
                "{case} {}",
                kernel.rel_err
            );
            assert!(ours.window(0, 1.0).unwrap().us > 0.0);
        }
    }

    #[test]
    fn both_operations_are_verified_and_timed_on_the_cpu() {
        let stream = Device::cpu().stream().unwrap();
        for case in [Case::AttentionFwd(ATTENTION), Case::BsrMatmul(BSR)] {
            let mut ours = Ours::new(&case, &stream, Cache::Warm, 5, None).unwrap();
            assert!(
                ours.kernels[0].verified && ours.kernels[0].rel_err < 1e-2,
                "{case} {}",
                ours.kernels[0].rel_err
            );
            assert!(ours.kernels[0].rel_err > 0.0);
            assert!(ours.window(0, 1.0).unwrap().us > 0.0);
            assert!(Ours::new(&case, &stream, Cache::Warm, 5, Some(&["sm80".to_owned()])).is_err());
        }
    }
}
