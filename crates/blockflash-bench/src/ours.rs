//! Our implementation of a case: inputs on the device, the kernels that are compared, verification before any time.

mod operands;

use crate::case::Case;
use crate::error::{Error, Result};
use crate::timing::{Repeat, Window};
use blockflash_ops::{Row, Stream, attention, bsr_matmul};
use blockflash_sys::manifest;
use operands::Operands;

/// One case on one device, with the kernels that compute it.
#[derive(Debug)]
pub struct Ours {
    stream: Stream,
    operands: Operands,
    /// What is measured: the kernel that the library selects, or each that was asked for.
    pub kernels: Vec<Kernel>,
}

/// A kernel that computes the case, verified.
#[derive(Debug)]
pub struct Kernel {
    /// Forced by name; `None` leaves the choice to the library.
    row: Option<&'static Row>,
    /// Name of the kernel; `None` on the CPU.
    pub symbol: Option<String>,
    /// Whether the output is right.
    pub verified: bool,
    /// ‖out − reference‖ / ‖reference‖ on the checked elements.
    pub rel_err: f64,
    repeat: Repeat,
}

impl Ours {
    /// Draws inputs, runs and verifies every kernel, and captures its launches. With `rows`, every kernel whose name contains
    /// one of them and that accepts the case is measured instead of the selected one.
    ///
    /// # Errors
    /// If no kernel computes the case, or the device fails.
    pub fn new(case: &Case, stream: &Stream, seed: u64, rows: Option<&[String]>) -> Result<Self> {
        let (mut operands, host) = Operands::new(case, stream, seed)?;
        let mut kernels = Vec::new();
        for (row, symbol) in candidates(case, stream, rows)? {
            let verdict = match operands.verify(&host, row, stream, seed) {
                // Of the kernels with a wanted name, those for other sizes and types are not meant.
                Err(Error::Ops(blockflash_ops::Error::Unsupported { .. })) if row.is_some() => continue,
                verdict => verdict?,
            };
            let (verified, rel_err) = verdict;
            let repeat = Repeat::new(stream, |stream| operands.launch(row, stream))?;
            kernels.push(Kernel { row, symbol, verified, rel_err, repeat });
        }
        if kernels.is_empty() {
            return Err(Error::Option(
                "no kernel whose name contains --row computes this case on this GPU".to_owned(),
            ));
        }
        Ok(Self { stream: stream.clone(), operands, kernels })
    }

    /// One window of a kernel. Returns when the device is idle.
    ///
    /// # Errors
    /// If the device fails.
    pub fn window(&mut self, kernel: usize, ms: f64) -> Result<Window> {
        let Self { stream, operands, kernels } = self;
        let Some(Kernel { row, repeat, .. }) = kernels.get_mut(kernel) else {
            return Err(Error::Option(format!("there is no kernel {kernel}")));
        };
        repeat.window(stream, ms, |stream| operands.launch(*row, stream))
    }
}

impl Kernel {
    /// Launches in one CUDA graph.
    pub fn launches(&self) -> usize {
        self.repeat.launches()
    }
}

/// The kernels to try: the row, if it is forced, and its name.
fn candidates(
    case: &Case,
    stream: &Stream,
    names: Option<&[String]>,
) -> Result<Vec<(Option<&'static Row>, Option<String>)>> {
    let Some(gpu) = stream.device().cuda_properties() else {
        return match names {
            Some(_) => Err(Error::Option("--row names kernels, and the CPU has none".to_owned())),
            None => Ok(vec![(None, None)]),
        };
    };
    let Some(names) = names else {
        let row = match case {
            Case::AttentionFwd(shape) => attention::select(&shape.problem(), gpu)?,
            Case::BsrMatmul(shape) => bsr_matmul::select(&shape.problem(), gpu)?,
        };
        return Ok(vec![(None, Some(row.symbol()))]);
    };
    let mut found: Vec<(Option<&'static Row>, Option<String>)> = Vec::new();
    for row in manifest::rows().iter().filter(|row| row.target.runs_on(gpu.compute_capability)) {
        let symbol = row.symbol();
        let wanted = names.iter().any(|name| symbol.contains(name.as_str()));
        // The same kernel for several targets: the first is preferred.
        if wanted && !found.iter().any(|(_, other)| other.as_ref() == Some(&symbol)) {
            found.push((Some(row), Some(symbol)));
        }
    }
    Ok(found)
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
    fn both_operations_are_verified_and_timed_on_the_cpu() {
        let stream = Device::cpu().stream().unwrap();
        for case in [Case::AttentionFwd(ATTENTION), Case::BsrMatmul(BSR)] {
            let mut ours = Ours::new(&case, &stream, 5, None).unwrap();
            assert!(
                ours.kernels[0].verified && ours.kernels[0].rel_err < 1e-2,
                "{case} {}",
                ours.kernels[0].rel_err
            );
            assert!(ours.kernels[0].rel_err > 0.0);
            assert!(ours.window(0, 1.0).unwrap().us > 0.0);
            assert!(Ours::new(&case, &stream, 5, Some(&["sm80".to_owned()])).is_err());
        }
    }
}
