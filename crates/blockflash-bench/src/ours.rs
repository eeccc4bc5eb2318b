//! Our implementation of a case: inputs on the device, the kernels to compare, and verification
//! before any timing.

mod host;

use crate::case::{Case, Operands};
use crate::error::{Error, Result};
use crate::memory;
use crate::timing::{Cache, Repeat, Window};
use blockflash_ops::tuning::Measured;
use blockflash_ops::{Kernel, Stream};
use blockflash_sys::manifest;
pub use host::HostCost;

/// Which of our kernels compute a case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Kernels {
    /// The one that the library selects.
    #[default]
    Selected,
    /// Those that accept the case and whose names contain one of these texts.
    Named(Vec<String>),
    /// All that accept the case: those among which the library selects.
    All,
}

/// One case on one device, with the kernels that compute it.
#[derive(Debug)]
pub struct Ours {
    stream: Stream,
    operands: Box<dyn Operands>,
    /// Kernels to measure.
    pub kernels: Vec<MeasuredKernel>,
}

/// A kernel that computes the case, verified.
#[derive(Debug)]
pub struct MeasuredKernel {
    /// The kernel that is forced by name; `None` leaves the choice to the library.
    kernel: Option<&'static Kernel>,
    /// Name of the kernel; `None` on the CPU.
    pub symbol: Option<String>,
    /// What selection reads of its time, where all kernels are measured.
    pub tuning: Option<Measured>,
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
    /// Draws inputs, runs and verifies every kernel, and captures its launches.
    ///
    /// # Errors
    /// If no kernel computes the case, or the device fails.
    pub fn new(
        case: &Case,
        stream: &Stream,
        cache: Cache,
        seed: u64,
        which: &Kernels,
    ) -> Result<Self> {
        let mut operands = operands(case, stream, seed)?;
        if cache == Cache::Rotated {
            operands.rotate(stream)?;
        }
        let mut kernels = Vec::new();
        for Candidate { kernel, forced } in candidates(&mut *operands, stream, which)? {
            let tuning = match (which, kernel) {
                (Kernels::All, Some(kernel)) => measured(&mut *operands, kernel, stream)?,
                _ => None,
            };
            let load_us = match kernel {
                Some(kernel) if !operands.is_loaded() => host::load(kernel, stream)?,
                _ => None,
            };
            let symbol = kernel.map(Kernel::symbol);
            let kernel = kernel.filter(|_| forced);
            let (verified, rel_err) = operands.verify(kernel, stream, seed)?;
            let repeat = Repeat::new(stream, cache, |stream| Ok(operands.launch(kernel, stream)?))?;
            let host = match forced || stream.device().is_cpu() {
                true => HostCost::default(),
                false => host::cost(&mut *operands, stream, repeat.launch_us())?,
            };
            kernels.push(MeasuredKernel {
                kernel,
                symbol,
                tuning,
                verified,
                rel_err,
                load_us,
                host,
                repeat,
            });
        }
        if kernels.is_empty() {
            return Err(Error::Option(
                "none of the wanted kernels computes this case on this GPU".to_owned(),
            ));
        }
        Ok(Self { stream: stream.clone(), operands, kernels })
    }

    /// Launches one kernel and waits. Returns the kernel, `None` on the CPU.
    ///
    /// # Errors
    /// As [`new`](Self::new), and if several kernels match.
    pub fn launch(
        case: &Case,
        stream: &Stream,
        seed: u64,
        which: &Kernels,
        launches: usize,
    ) -> Result<Option<&'static Kernel>> {
        let mut operands = operands(case, stream, seed)?;
        let candidates = candidates(&mut *operands, stream, which)?;
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
        repeat.window(stream, ms, |stream| Ok(operands.launch(*kernel, stream)?))
    }
}

impl MeasuredKernel {
    /// Number of launches in one CUDA graph.
    pub fn launches(&self) -> usize {
        self.repeat.launches()
    }
}

/// Draws inputs, if there is host memory for them: every input is read once by a launch, and every
/// output written once.
fn operands(case: &Case, stream: &Stream, seed: u64) -> Result<Box<dyn Operands>> {
    memory::ensure(&format!("the operands of {case}"), case.work().bytes as u64)?;
    Ok(case.shape().operands(stream, seed)?)
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

/// What selection reads of a measurement of this kernel.
fn measured(
    operands: &mut dyn Operands,
    kernel: &'static Kernel,
    stream: &Stream,
) -> Result<Option<Measured>> {
    let (Some(gpu), Some(problem)) = (stream.device().cuda_properties(), operands.likeness()?)
    else {
        return Ok(None);
    };
    let (image, multiprocessors) = (kernel.image_name(), gpu.multiprocessors);
    let selected = operands.select(gpu)? == kernel;
    Ok(Some(Measured { image, multiprocessors, selected, problem }))
}

/// The wanted kernels that accept these operands: a name also matches kernels for other sizes and
/// types.
fn candidates(
    operands: &mut dyn Operands,
    stream: &Stream,
    which: &Kernels,
) -> Result<Vec<Candidate>> {
    let Some(gpu) = stream.device().cuda_properties() else {
        return match which {
            Kernels::Selected => Ok(vec![Candidate { kernel: None, forced: false }]),
            Kernels::Named(_) | Kernels::All => {
                Err(Error::Option("kernels run on GPUs, but the CPU is used".to_owned()))
            }
        };
    };
    if *which == Kernels::Selected {
        return Ok(vec![Candidate { kernel: Some(operands.select(gpu)?), forced: false }]);
    }
    let mut found: Vec<&'static Kernel> = Vec::new();
    for kernel in
        manifest::kernels().iter().filter(|kernel| kernel.target.runs_on(gpu.compute_capability))
    {
        let symbol = kernel.symbol();
        let wanted = match which {
            // A text that equals a whole symbol does not mean longer symbols.
            Kernels::Named(names) => names
                .iter()
                .any(|name| symbol == *name || symbol.contains(name.as_str()) && !is_symbol(name)),
            // No case asks for the log-sum-exp.
            _ => kernel.attention_tile().is_none_or(|tile| tile.lse.suits(false)),
        };
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
    use blockflash_ops::Device;

    fn ours(case: &Case) -> crate::Result<Ours> {
        Ours::new(case, &Device::cpu().stream().unwrap(), Cache::Warm, 5, &Kernels::Selected)
    }

    /// The case is verified on the CPU, with an error of at most this much, and timed.
    fn is_verified_and_timed(case: &Case, most: f64) {
        let mut ours = ours(case).unwrap();
        let kernel = &ours.kernels[0];
        assert!(kernel.verified && kernel.rel_err < most, "{case} {}", kernel.rel_err);
        assert!(ours.window(0, 1.0).unwrap().us > 0.0, "{case}");
        // Sums in half precision are never exact; choices can be.
        assert!(most < 1e-2 || ours.kernels[0].rel_err > 0.0, "{case}");
    }

    fn refuses_odd_blocks(id: &str) {
        let refused = ours(&id.parse().unwrap()).unwrap_err();
        assert!(refused.to_string().contains("multiple of 64"), "{refused}");
    }

    #[test]
    fn attention_is_verified_and_timed_on_the_cpu() {
        for id in [
            "b1_q33_kv65_h4kv2_d16_causal_bf16",
            "varlen33+1+64x2_h4kv2_d16_causal_bf16",
            "varlen5+40_h2_d8_full_f16",
            "b2_q128_kv192_h4kv2_d16_q64kv64_d0.5_uniform_full_bf16",
            "b1_s256_h4kv2m2_d16_q64kv64_d0.5_uniform_causal_f16",
            "b1_s256_h2m1_d16_q128kv64_d0.4_power_law_full_bf16",
        ] {
            is_verified_and_timed(&id.parse().unwrap(), 1e-2);
        }
        refuses_odd_blocks("b1_s96_h2_d16_q32kv32_d0.5_uniform_full_bf16");
    }

    #[test]
    fn masks_are_verified_and_timed_on_the_cpu() {
        for id in [
            "mask_s1000_h2_b64_scores_d16_bf16",
            "mask_s1000_h2_b64_top3",
            "mask_s300_h1_b128_top9",
        ] {
            is_verified_and_timed(&id.parse().unwrap(), 1e-5);
        }
        refuses_odd_blocks("mask_s1000_h2_b100_top3");
    }

    #[test]
    fn products_are_verified_and_timed_on_the_cpu() {
        for layouts in ["row_row", "row_column", "column_row", "column_column"] {
            let id = format!("sddmm_m100_n90_k70_b32_d0.5_uniform_{layouts}_bf16");
            is_verified_and_timed(&id.parse().unwrap(), 1e-2);
        }
        is_verified_and_timed(&"m64_n24_k96_b16_d0.4_uniform_f16".parse().unwrap(), 1e-2);
    }

    #[test]
    fn kernels_are_refused_on_the_cpu() {
        let stream = Device::cpu().stream().unwrap();
        for id in ["b1_q33_kv65_h4kv2_d16_causal_bf16", "m64_n24_k96_b16_d0.4_uniform_f16"] {
            for kernels in [Kernels::Named(vec!["sm80".to_owned()]), Kernels::All] {
                let refused = Ours::new(&id.parse().unwrap(), &stream, Cache::Warm, 5, &kernels);
                assert!(refused.unwrap_err().to_string().contains("the CPU is used"));
            }
        }
    }

    #[test]
    fn caches_are_verified_and_timed_on_the_cpu() {
        let stream = Device::cpu().stream().unwrap();
        for id in [
            "decode_b2_q1_kv96_h4kv2_d16_contiguous_full_bf16",
            "decode_b5_q3_kv96_h4_d16_contiguous_power_f16",
            "decode_b3_q4_kv96_h4kv1_d16_page16_equal_bf16",
            "decode_b9_q2_kv96_h4kv2_d16_page32_power_bf16",
            "decode_b2_q2_kv160_h4kv2_d16_page16top4_equal_bf16",
            "decode_b2_q1_kv160_h4kv2_d16_page16top10_full_bf16",
        ] {
            let case: Case = id.parse().unwrap();
            assert_eq!((case.op(), case.to_string().as_str()), ("attention_decode", id));
            for cache in [Cache::Warm, Cache::Rotated] {
                let mut ours = Ours::new(&case, &stream, cache, 5, &Kernels::Selected).unwrap();
                let kernel = &ours.kernels[0];
                let error = kernel.rel_err;
                assert!(kernel.verified && error > 0.0 && error < 1e-2, "{id} {error}");
                assert!(ours.window(0, 1.0).unwrap().us > 0.0);
            }
        }
    }

    #[test]
    fn gradients_are_verified_and_timed_on_the_cpu() {
        let stream = Device::cpu().stream().unwrap();
        for (id, op) in [
            ("bwd_b2_q33_kv65_h4kv2_d16_causal_bf16", "attention_bwd"),
            ("bwd_b1_s64_h12_d8_full_f16", "attention_bwd"),
            ("bwd_varlen33+1+64x2_h4kv2_d16_causal_bf16", "attention_bwd"),
            ("bwd_b2_q128_kv192_h4kv2_d16_q64kv64_d0.5_uniform_full_bf16", "block_sparse_bwd"),
            ("bwd_b1_s256_h4kv2m2_d16_q64kv64_d0.5_uniform_causal_f16", "block_sparse_bwd"),
        ] {
            let case: Case = id.parse().unwrap();
            assert_eq!(case.op(), op, "{id}");
            let mut ours = Ours::new(&case, &stream, Cache::Warm, 5, &Kernels::Selected).unwrap();
            let kernel = &ours.kernels[0];
            let error = kernel.rel_err;
            assert!(kernel.verified && error > 0.0 && error < 1e-2, "{id} {error}");
            assert!(ours.window(0, 1.0).unwrap().us > 0.0);
        }
    }

    #[test]
    fn only_caches_rotate() {
        let stream = Device::cpu().stream().unwrap();
        let case: Case = "b1_s8_h1_d8_full_bf16".parse().unwrap();
        let error = Ours::new(&case, &stream, Cache::Rotated, 5, &Kernels::Selected).unwrap_err();
        assert!(error.to_string().contains("copies"), "{error}");
    }
}
