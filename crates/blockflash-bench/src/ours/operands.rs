use super::attention_operands::AttentionOperands;
use super::bsr_operands::BsrOperands;
use super::mask_operands::MaskOperands;
use super::sddmm_operands::SddmmOperands;
use crate::case::{BsrShape, Case};
use crate::error::{Error, Result};
use crate::io::{Array, Values};
use crate::random;
use blockflash_ops::bsr_matmul::BsrMatrix;
use blockflash_ops::{
    CudaProperties, DType, PreparedAttention, PreparedBsrMatmul, PreparedBsrSddmm, Row, Stream,
    Tensor, attention, bsr_sddmm,
};
use blockflash_oracle as oracle;
use rayon::prelude::*;

/// Inputs and outputs on the device.
#[derive(Debug)]
pub(super) enum Operands {
    Attention(Box<AttentionOperands>),
    Mask(MaskOperands),
    Bsr(Box<BsrOperands>),
    Sddmm(Box<SddmmOperands>),
}

/// A call whose kernel is decided.
pub(super) enum Prepared {
    Attention(PreparedAttention),
    Bsr(PreparedBsrMatmul),
    Sddmm(PreparedBsrSddmm),
}

/// What the reference is computed from.
pub(super) enum Host {
    Attention {
        q: Array,
        k: Array,
        v: Array,
    },
    /// The operands keep it.
    Kept,
    Bsr {
        row_ptr: Vec<i32>,
        col_idx: Vec<i32>,
        values: Array,
        b: Array,
    },
}

impl Operands {
    pub(super) fn new(case: &Case, stream: &Stream, seed: u64) -> Result<(Self, Host)> {
        let normal = |shape: &[usize], dtype: DType, lane: u64| {
            random::normal(dtype, shape, seed, lane, |_| ()).map_err(|bytes| {
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                Error::Device(blockflash_safe::Error::OutOfMemory { bytes })
            })
        };
        match case {
            Case::AttentionFwd(_) | Case::VarlenFwd(_) | Case::BlockSparseFwd(_) => {
                let (operands, [q, k, v]) = AttentionOperands::new(case, stream, seed, normal)?;
                Ok((Self::Attention(Box::new(operands)), Host::Attention { q, k, v }))
            }
            Case::BlockMaskBuild(shape) => {
                Ok((Self::Mask(MaskOperands::new(shape, stream, normal)?), Host::Kept))
            }
            Case::BsrMatmul(shape) => {
                let BsrShape { m, n, k, block_size, dtype, .. } = *shape;
                let (row_ptr, col_idx) = shape.pattern(seed);
                let values = normal(&[col_idx.len(), block_size, block_size], dtype, 0)?;
                let b = normal(&[k, n], dtype, 1)?;
                let a =
                    BsrMatrix::from_parts(m, k, block_size, &row_ptr, &col_idx, values.view()?)?;
                let c = Tensor::empty(stream, dtype, &[m, n])?;
                let operands = BsrOperands::new(&a, b.upload(stream)?, c, stream)?;
                Ok((Self::Bsr(Box::new(operands)), Host::Bsr { row_ptr, col_idx, values, b }))
            }
            Case::BsrSddmm(shape) => {
                let operands = SddmmOperands::new(shape, stream, seed, normal)?;
                Ok((Self::Sddmm(Box::new(operands)), Host::Kept))
            }
        }
    }

    /// Whether the kernel was loaded when memory was made for it: then nobody has timed that.
    pub(super) fn is_loaded(&self) -> bool {
        matches!(self, Self::Mask(_))
    }

    /// The kernel that the library selects on this GPU.
    pub(super) fn select(&mut self, gpu: &CudaProperties) -> Result<&'static Row> {
        Ok(match self {
            Self::Attention(operands) => attention::select(&operands.problem_for(None)?, gpu)?,
            Self::Mask(operands) => operands
                .kernel()
                .ok_or_else(|| Error::Option("this mask needs no kernel".to_owned()))?,
            Self::Bsr(operands) => operands.select(gpu)?,
            Self::Sddmm(operands) => bsr_sddmm::select(&operands.problem()?, gpu)?,
        })
    }

    /// Whether this very kernel computes them on this GPU.
    pub(super) fn accepts(&mut self, row: &Row, gpu: &CudaProperties) -> Result<bool> {
        Ok(match self {
            Self::Attention(operands) => {
                attention::accepts(row, &operands.problem_for(Some(row))?, gpu).is_ok()
            }
            // Its memory is that of the selected kernel.
            Self::Mask(operands) => {
                operands.kernel().is_some_and(|kernel| kernel.variant == row.variant)
            }
            Self::Bsr(operands) => operands.accepts(row, gpu)?,
            Self::Sddmm(operands) => bsr_sddmm::accepts(row, &operands.problem()?, gpu).is_ok(),
        })
    }

    pub(super) fn launch(&mut self, row: Option<&'static Row>, stream: &Stream) -> Result<()> {
        match self {
            Self::Attention(operands) => operands.launch(row, stream)?,
            Self::Mask(operands) => operands.launch(row, stream)?,
            Self::Bsr(operands) => operands.launch(row, stream)?,
            Self::Sddmm(operands) => operands.launch(row, stream)?,
        }
        Ok(())
    }

    /// Decides on the kernel for [`launch_prepared`](Self::launch_prepared). `None` for what has
    /// decided when its memory was made.
    pub(super) fn prepare(&mut self, stream: &Stream) -> Result<Option<Prepared>> {
        Ok(match self {
            Self::Attention(operands) => Some(Prepared::Attention(operands.prepare(stream)?)),
            Self::Mask(_) => None,
            Self::Bsr(operands) => Some(Prepared::Bsr(operands.prepare(stream)?)),
            Self::Sddmm(operands) => Some(Prepared::Sddmm(operands.prepare(stream)?)),
        })
    }

    pub(super) fn launch_prepared(&mut self, prepared: &Prepared, stream: &Stream) -> Result<()> {
        match (self, prepared) {
            (Self::Attention(operands), Prepared::Attention(prepared)) => {
                operands.launch_prepared(prepared, stream)?;
            }
            (Self::Bsr(operands), Prepared::Bsr(prepared)) => {
                operands.launch_prepared(prepared, stream)?
            }
            (Self::Sddmm(operands), Prepared::Sddmm(prepared)) => {
                operands.launch_prepared(prepared, stream)?;
            }
            _ => return Err(Error::Option("prepared for another operation".to_owned())),
        }
        Ok(())
    }

    /// Launches once into NaN, the selected kernel unless a row is named. Every element must be
    /// written; a sample is compared with the f64 reference.
    pub(super) fn verify(
        &mut self,
        host: &Host,
        row: Option<&'static Row>,
        stream: &Stream,
        seed: u64,
    ) -> Result<(bool, f64)> {
        if let Self::Mask(operands) = self {
            return operands.verify(row, stream);
        }
        for output in self.outputs(row) {
            output.fill_bytes(stream, 0xFF)?;
        }
        self.launch(row, stream)?;
        let outputs = self.outputs(row).into_iter().map(|output| Array::download(output, stream));
        let outputs = outputs.collect::<blockflash_safe::Result<Vec<_>>>()?;
        let complete = !outputs.iter().any(holds_nan);
        let mismatch = |mismatch: oracle::Mismatch| Error::Option(mismatch.to_string());
        let comparisons = match (&*self, host, outputs.as_slice()) {
            (Self::Attention(operands), Host::Attention { q, k, v }, [o, lse @ ..]) => {
                let case = operands.check_case([q, k, v]);
                match lse {
                    [lse] => {
                        oracle::attention(&case, o, lse, seed, |_| ()).map_err(mismatch)?.to_vec()
                    }
                    _ => vec![oracle::attention_output(&case, o, seed, |_| ()).map_err(mismatch)?],
                }
            }
            (Self::Bsr(_), Host::Bsr { row_ptr, col_idx, values, b }, [c]) => {
                let case = oracle::BsrCase {
                    row_ptr,
                    col_idx,
                    values,
                    b,
                    c: None,
                    alpha: 1.0,
                    beta: 0.0,
                    bias_per_row: None,
                    bias_per_column: None,
                    activation: oracle::Activation::None,
                };
                vec![oracle::bsr_matmul(&case, c, seed, |_| ()).map_err(mismatch)?]
            }
            (Self::Sddmm(operands), Host::Kept, [values]) => vec![operands.compare(values, seed)?],
            _ => Vec::new(), // operands and host are made together
        };
        let passed = complete
            && !comparisons.is_empty()
            && comparisons.iter().all(|comparison| comparison.passed());
        Ok((passed, comparisons.first().map_or(f64::NAN, |output| output.relative)))
    }

    /// What a launch of this row writes, or of the selected kernel.
    fn outputs(&mut self, row: Option<&Row>) -> Vec<&mut Tensor> {
        match self {
            Self::Attention(operands) => operands.outputs(row),
            Self::Mask(_) => Vec::new(), // it verifies itself
            Self::Bsr(operands) => vec![operands.output()],
            Self::Sddmm(operands) => vec![operands.values()],
        }
    }
}

fn holds_nan(array: &Array) -> bool {
    match array.values() {
        Values::F16(values) => values.par_iter().any(|value| value.is_nan()),
        Values::Bf16(values) => values.par_iter().any(|value| value.is_nan()),
        Values::F32(values) => values.par_iter().any(|value| value.is_nan()),
        Values::I32(_) | Values::U8(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockflash_ops::Device;

    #[test]
    fn an_element_that_is_not_written_is_seen() {
        let stream = Device::cpu().stream().unwrap();
        let mut tensor = Tensor::zeros(&stream, DType::BF16, &[4]).unwrap();
        assert!(!holds_nan(&Array::download(&tensor, &stream).unwrap()));
        tensor.fill_bytes(&stream, 0xFF).unwrap();
        assert!(holds_nan(&Array::download(&tensor, &stream).unwrap()));
    }
}
