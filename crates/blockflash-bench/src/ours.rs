//! Our implementation of a case: inputs on the device, the kernels to compare, and verification
//! before any timing.

mod host;

use crate::case::{Case, Operands};
use crate::error::{Error, Result};
use crate::memory;
use crate::timing::{Cache, Repeat, Window};
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
        for kernel in candidates(&mut *operands, stream, which)? {
            let load_us = match kernel {
                Some(kernel) if !operands.is_loaded() => host::load(kernel, stream)?,
                _ => None,
            };
            let symbol = kernel.map(Kernel::symbol);
            let kernel = kernel.filter(|_| *which != Kernels::Selected);
            let (verified, rel_err) = operands.verify(kernel, stream, seed)?;
            let repeat = Repeat::new(stream, cache, |stream| Ok(operands.launch(kernel, stream)?))?;
            let host = match kernel.is_some() || stream.device().is_cpu() {
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
            let none = "none of the wanted kernels computes this case on this GPU";
            return Err(Error::Option(none.to_owned()));
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
        let kernel = match candidates(&mut *operands, stream, which)?[..] {
            [kernel] => kernel,
            [] => {
                let none = "no kernel that --kernel names computes this case on this GPU";
                return Err(Error::Option(none.to_owned()));
            }
            ref several => {
                let symbols: Vec<_> = several.iter().flatten().map(|one| one.symbol()).collect();
                let several = format!("--kernel matches several kernels: {}", symbols.join(", "));
                return Err(Error::Option(several));
            }
        };
        let forced = kernel.filter(|_| *which != Kernels::Selected);
        (0..launches).try_for_each(|_| operands.launch(forced, stream))?;
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
    Ok(case.operands(stream, seed)?)
}

/// The wanted kernels that accept these operands, `None` on the CPU: a name also matches kernels
/// for other sizes and types.
fn candidates(
    operands: &mut dyn Operands,
    stream: &Stream,
    which: &Kernels,
) -> Result<Vec<Option<&'static Kernel>>> {
    let (gpu, names) = match (stream.device().cuda_properties(), which) {
        (None, Kernels::Selected) => return Ok(vec![None]),
        (None, Kernels::Named(_)) => {
            return Err(Error::Option("kernels run on GPUs, but the CPU is used".to_owned()));
        }
        (Some(gpu), Kernels::Selected) => return Ok(vec![Some(operands.select(gpu)?)]),
        (Some(gpu), Kernels::Named(names)) => (gpu, names),
    };
    let all = manifest::kernels();
    let is_symbol = |text: &str| all.iter().any(|kernel| kernel.symbol() == text);
    let mut found: Vec<&'static Kernel> = Vec::new();
    for kernel in all.iter().filter(|kernel| kernel.target.runs_on(gpu.compute_capability)) {
        let symbol = kernel.symbol();
        // A text that equals a whole symbol does not mean longer symbols.
        let wanted = names
            .iter()
            .any(|name| symbol == *name || symbol.contains(name.as_str()) && !is_symbol(name));
        // A kernel may exist for several targets: the first is preferred.
        let known = found.iter().any(|other| other.symbol() == symbol);
        if wanted && !known && operands.accepts(kernel, gpu)? {
            found.push(kernel);
        }
    }
    Ok(found.into_iter().map(Some).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockflash_ops::Device;

    fn ours(id: &str, cache: Cache, kernels: &Kernels) -> Result<Ours> {
        let case: Case = id.parse().unwrap();
        assert_eq!(case.to_string(), id);
        Ours::new(&case, &Device::cpu().stream().unwrap(), cache, 5, kernels)
    }

    fn refused(id: &str, cache: Cache, kernels: &Kernels) -> String {
        ours(id, cache, kernels).unwrap_err().to_string()
    }

    /// Sums in half precision are never exact, choices can be.
    #[test]
    fn cases_are_verified_and_timed_on_the_cpu() {
        for id in [
            "b1_q33_kv65_h4kv2_d16_causal_bf16",
            "varlen33+1+64x2_h4kv2_d16_causal_bf16",
            "varlen5+40_h2_d8_full_f16",
            "b2_q128_kv192_h4kv2_d16_q64kv64_d0.5_uniform_full_bf16",
            "b1_s256_h4kv2m2_d16_q64kv64_d0.5_uniform_causal_f16",
            "b1_s256_h2m1_d16_q128kv64_d0.4_power_law_full_bf16",
            "sddmm_m100_n90_k70_b32_d0.5_uniform_row_row_bf16",
            "sddmm_m100_n90_k70_b32_d0.5_uniform_row_column_bf16",
            "sddmm_m100_n90_k70_b32_d0.5_uniform_column_row_bf16",
            "sddmm_m100_n90_k70_b32_d0.5_uniform_column_column_bf16",
            "m64_n24_k96_b16_d0.4_uniform_f16",
            "decode_b2_q1_kv96_h4kv2_d16_contiguous_full_bf16",
            "decode_b5_q3_kv96_h4_d16_contiguous_power_f16",
            "decode_b3_q4_kv96_h4kv1_d16_page16_equal_bf16",
            "decode_b9_q2_kv96_h4kv2_d16_page32_power_bf16",
            "decode_b2_q2_kv160_h4kv2_d16_page16top4_equal_bf16",
            "decode_b2_q1_kv160_h4kv2_d16_page16top10_full_bf16",
            "bwd_b2_q33_kv65_h4kv2_d16_causal_bf16",
            "bwd_b1_s64_h12_d8_full_f16",
            "bwd_varlen33+1+64x2_h4kv2_d16_causal_bf16",
            "bwd_b2_q128_kv192_h4kv2_d16_q64kv64_d0.5_uniform_full_bf16",
            "bwd_b1_s256_h4kv2m2_d16_q64kv64_d0.5_uniform_causal_f16",
            "mask_s1000_h2_b64_scores_d16_bf16",
            "mask_s1000_h2_b64_top3",
            "mask_s300_h1_b128_top9",
        ] {
            let [chooses, decodes] = ["mask", "decode"].map(|op| id.starts_with(op));
            let caches = [Cache::Warm, Cache::Rotated].into_iter().take(1 + usize::from(decodes));
            for cache in caches {
                let mut ours = ours(id, cache, &Kernels::Selected).unwrap();
                let MeasuredKernel { verified, rel_err, .. } = ours.kernels[0];
                assert!(verified && rel_err < if chooses { 1e-5 } else { 1e-2 }, "{id} {rel_err}");
                assert!(chooses || rel_err > 0.0, "{id}");
                assert!(ours.window(0, 1.0).unwrap().us > 0.0, "{id}");
            }
        }
    }

    #[test]
    fn what_the_cpu_cannot_do_is_refused() {
        let attention = "b1_q33_kv65_h4kv2_d16_causal_bf16";
        for id in ["b1_s96_h2_d16_q32kv32_d0.5_uniform_full_bf16", "mask_s1000_h2_b100_top3"] {
            let refused = refused(id, Cache::Warm, &Kernels::Selected);
            assert!(refused.contains("multiple of 64"), "{refused}");
        }
        for id in [attention, "m64_n24_k96_b16_d0.4_uniform_f16"] {
            for name in ["sm80", "_"] {
                let kernels = Kernels::Named(vec![name.to_owned()]);
                assert!(refused(id, Cache::Warm, &kernels).contains("the CPU is used"));
            }
        }
        // Only caches of keys and values rotate.
        assert!(refused(attention, Cache::Rotated, &Kernels::Selected).contains("copies"));
    }
}
