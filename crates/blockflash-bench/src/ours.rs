//! Our implementation of a case: inputs on the device, the kernels that are compared, verification before any time.

use crate::case::{AttentionShape, BsrShape, Case};
use crate::check;
use crate::error::{Error, Result};
use crate::io::{Array, Values};
use crate::random;
use crate::timing::{Repeat, Window};
use blockflash_ops::bsr_matmul::BsrMatrix;
use blockflash_ops::{Attention, BsrMatmul, DType, Row, Stream, Tensor, attention, bsr_matmul};
use blockflash_sys::manifest;
use rayon::prelude::*;

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

#[derive(Debug)]
enum Operands {
    Attention { shape: AttentionShape, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor },
    Bsr { a: BsrMatrix, b: Tensor, c: Tensor },
}

/// What the reference is computed from.
enum Host {
    Attention { q: Array, k: Array, v: Array },
    Bsr { row_ptr: Vec<i32>, col_idx: Vec<i32>, values: Array, b: Array },
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
            return Err(Error::Option("no kernel whose name contains --row computes this case on this GPU".to_owned()));
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

impl Operands {
    fn new(case: &Case, stream: &Stream, seed: u64) -> Result<(Self, Host)> {
        let normal = |shape: &[usize], dtype: DType, lane: u64| {
            random::normal(dtype, shape, seed, lane, |_| ()).map_err(|bytes| {
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                Error::Device(blockflash_safe::Error::OutOfMemory { bytes })
            })
        };
        match *case {
            Case::AttentionFwd(shape) => {
                let AttentionShape { batch, num_heads_q, head_dim, dtype, .. } = shape;
                let q_shape = [batch, shape.seqlen_q, num_heads_q, head_dim];
                let kv_shape = [batch, shape.seqlen_kv, shape.num_heads_kv, head_dim];
                let [q, k, v] = [normal(&q_shape, dtype, 0)?, normal(&kv_shape, dtype, 1)?, normal(&kv_shape, dtype, 2)?];
                let operands = Self::Attention {
                    shape,
                    q: q.upload(stream)?,
                    k: k.upload(stream)?,
                    v: v.upload(stream)?,
                    o: Tensor::empty(stream, dtype, &q_shape)?,
                    lse: Tensor::empty(stream, DType::F32, &[batch, num_heads_q, shape.seqlen_q])?,
                };
                Ok((operands, Host::Attention { q, k, v }))
            }
            Case::BsrMatmul(shape) => {
                let BsrShape { m, n, k, block_size, dtype, .. } = shape;
                let (row_ptr, col_idx) = shape.pattern(seed);
                let values = normal(&[col_idx.len(), block_size, block_size], dtype, 0)?;
                let b = normal(&[k, n], dtype, 1)?;
                let a = BsrMatrix::from_parts(m, k, block_size, &row_ptr, &col_idx, values.view()?)?;
                let operands = Self::Bsr {
                    a: a.to(stream)?,
                    b: b.upload(stream)?,
                    c: Tensor::empty(stream, dtype, &[m, n])?,
                };
                Ok((operands, Host::Bsr { row_ptr, col_idx, values, b }))
            }
        }
    }

    fn launch(&mut self, row: Option<&'static Row>, stream: &Stream) -> Result<()> {
        match self {
            Self::Attention { shape, q, k, v, o, lse } => {
                let call = Attention { mask: shape.mask(), ..Attention::new(q.view(), k.view(), v.view()) };
                let (o, lse) = (o.view_mut(), Some(lse.view_mut()));
                match row {
                    None => call.forward_into(o, lse, stream)?,
                    Some(row) => call.forward_with(row, o, lse, stream)?,
                }
            }
            Self::Bsr { a, b, c } => {
                let call = BsrMatmul::new(a, b.view());
                match row {
                    None => call.matmul_into(c.view_mut(), stream)?,
                    Some(row) => call.matmul_with(row, c.view_mut(), stream)?,
                }
            }
        }
        Ok(())
    }

    /// Launches once into NaN and compares. Every element must be written; a sample is compared with the f64 reference.
    fn verify(
        &mut self,
        host: &Host,
        row: Option<&'static Row>,
        stream: &Stream,
        seed: u64,
    ) -> Result<(bool, f64)> {
        for output in self.outputs() {
            output.fill_bytes(stream, 0xFF)?;
        }
        self.launch(row, stream)?;
        let outputs = self.outputs().into_iter().map(|output| Array::download(output, stream));
        let outputs = outputs.collect::<blockflash_safe::Result<Vec<_>>>()?;
        let complete = !outputs.iter().any(holds_nan);
        let mismatch = |mismatch: check::Mismatch| Error::Option(mismatch.to_string());
        let comparisons = match (&*self, host, outputs.as_slice()) {
            (Self::Attention { shape, .. }, Host::Attention { q, k, v }, [o, lse]) => {
                let problem = shape.problem();
                let causal = shape.mask == crate::case::MaskKind::Causal;
                let case = check::AttentionCase {
                    q,
                    k,
                    v,
                    diagonal: shape.seqlen_kv as i64 - shape.seqlen_q as i64,
                    left: None,
                    right: causal.then_some(0),
                    softmax_scale: problem.softmax_scale,
                    softcap: None,
                };
                check::attention(&case, o, lse, seed, |_| ()).map_err(mismatch)?.to_vec()
            }
            (Self::Bsr { .. }, Host::Bsr { row_ptr, col_idx, values, b }, [c]) => {
                let case = check::BsrCase {
                    row_ptr,
                    col_idx,
                    values,
                    b,
                    c: None,
                    alpha: 1.0,
                    beta: 0.0,
                    bias_per_row: None,
                    bias_per_column: None,
                    activation: check::Activation::None,
                };
                vec![check::bsr_matmul(&case, c, seed, |_| ()).map_err(mismatch)?]
            }
            _ => Vec::new(), // operands and host are made together
        };
        let passed = complete && !comparisons.is_empty() && comparisons.iter().all(|comparison| comparison.passed());
        Ok((passed, comparisons.first().map_or(f64::NAN, |output| output.relative)))
    }

    fn outputs(&mut self) -> Vec<&mut Tensor> {
        match self {
            Self::Attention { o, lse, .. } => vec![o, lse],
            Self::Bsr { c, .. } => vec![c],
        }
    }
}

fn holds_nan(array: &Array) -> bool {
    match array.values() {
        Values::F16(values) => values.par_iter().any(|value| value.is_nan()),
        Values::Bf16(values) => values.par_iter().any(|value| value.is_nan()),
        Values::F32(values) => values.par_iter().any(|value| value.is_nan()),
        Values::I32(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{MaskKind, Pattern};
    use blockflash_ops::Device;

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
            assert!(ours.kernels[0].verified && ours.kernels[0].rel_err < 1e-2, "{case} {}", ours.kernels[0].rel_err);
            assert!(ours.kernels[0].rel_err > 0.0);
            assert!(ours.window(0, 1.0).unwrap().us > 0.0);
            assert!(Ours::new(&case, &stream, 5, Some(&["sm80".to_owned()])).is_err());
        }
    }

    #[test]
    fn an_element_that_is_not_written_is_seen() {
        let stream = Device::cpu().stream().unwrap();
        let mut tensor = Tensor::zeros(&stream, DType::BF16, &[4]).unwrap();
        assert!(!holds_nan(&Array::download(&tensor, &stream).unwrap()));
        tensor.fill_bytes(&stream, 0xFF).unwrap();
        assert!(holds_nan(&Array::download(&tensor, &stream).unwrap()));
    }
}
