//! The steps of a call: what is verified, planned, launched and computed.

use super::plan::{QuantizeLaunches, plan};
use super::problem::{ScaleOf, given};
use super::{Quantize, QuantizeOutputMut, QuantizeProblem, QuantizeScale, cpu};
use crate::attention::{Strides, check_strides_by};
use crate::check::{Operand, aligned};
use crate::kv_cache::{HostScale, token_ranges};
use crate::operation::Steps;
use crate::selection::Problem as _;
use crate::{Error, Result};
use blockflash_safe::{CudaProperties, QuantizeOperands, QuantizeScales, Stream, ViewMut};
use blockflash_sys::{Kernel, manifest};

impl Quantize<'_> {
    /// The scales that are given, in host memory.
    pub(super) fn host_scale<'s>(
        &'s self,
        problem: &QuantizeProblem,
        stream: &Stream,
    ) -> Result<Option<HostScale<'s>>> {
        let sizes = [problem.batch, problem.num_heads];
        let by = |scale: &Operand<'_>, strides: &[usize]| given(scale, strides, sizes);
        let scale = match self.scale {
            QuantizeScale::Given(scale) => Some(scale),
            _ => None,
        };
        HostScale::new("scale", scale, by, stream)
    }
}

/// Checks addresses and strides of the outputs for a kernel.
fn check_layouts(out: &QuantizeOutputMut<'_>) -> Result<()> {
    let codes = &out.codes;
    let (&[ref rows @ .., _], &[ref strides @ .., _]) = (codes.shape(), codes.strides()) else {
        return Ok(());
    };
    let [batch, seq, head] = match *strides {
        [batch, seq, head] => [batch, seq, head],
        [seq, head] => [0, seq, head],
        _ => [0; 3],
    };
    let dims = match *rows {
        [batch, seqlen, heads] => [batch, seqlen, heads],
        [total, heads] => [1, total, heads],
        _ => [1; 3],
    };
    check_strides_by(8, &[("codes", Strides { batch, seq, head }, dims)])?;
    if !codes.is_aligned(8) {
        let address = codes.device_ptr().unwrap_or(0);
        let problem = format!("the address {address:#x} is not a multiple of 8");
        return Err(Error::Misaligned { what: "codes", problem });
    }
    if let Some(mean) = &out.mean {
        if let (&[batch, heads, _], &[of_batch, of_head, _]) = (mean.shape(), mean.strides()) {
            let strides = Strides { batch: of_batch, seq: 0, head: of_head };
            check_strides_by(4, &[("mean", strides, [batch, 1, heads])])?;
        }
        aligned("mean", &mean.as_view())?;
    }
    Ok(())
}

impl Steps for Quantize<'_> {
    type Problem = QuantizeProblem;
    type Plan = QuantizeLaunches;
    type Out<'o> = QuantizeOutputMut<'o>;

    fn is_empty(problem: &QuantizeProblem) -> bool {
        problem.writes_nothing()
    }

    fn checked(&self, out: &QuantizeOutputMut<'_>, stream: &Stream) -> Result<QuantizeProblem> {
        let problem = self.problem(out.codes.dtype())?;
        problem.check_outputs(out)?;
        self.on(out, stream.device())?;
        Ok(problem)
    }

    fn has_data(problem: &QuantizeProblem) -> bool {
        problem.packed.is_some() || matches!(problem.scale, ScaleOf::Given(_))
    }

    fn verify(
        &self,
        problem: &QuantizeProblem,
        _: &QuantizeOutputMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let QuantizeProblem { batch, tokens, packed, num_heads, .. } = *problem;
        if self.packed.is_some() {
            token_ranges(self.packed.as_ref(), [batch, tokens], packed, stream)?;
        }
        let given = self.host_scale(problem, stream)?;
        given.map_or(Ok(()), |given| given.verify_all([batch, num_heads]))
    }

    fn plan(
        kernel: &'static Kernel,
        problem: &QuantizeProblem,
        gpu: &CudaProperties,
    ) -> Result<QuantizeLaunches> {
        plan(kernel, problem, gpu)
    }

    fn launch(
        &self,
        kernel: &Kernel,
        launches: &QuantizeLaunches,
        problem: &QuantizeProblem,
        mut out: QuantizeOutputMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let left_out = |what: &str| Error::Unsupported {
            op: QuantizeProblem::OP,
            arch: kernel.target.to_string(),
            what: format!("the output {what} is left out, but a GPU keeps what it finds there"),
        };
        if !problem.is_empty() {
            aligned("x", &self.x)?;
            check_layouts(&out)?;
        }
        if problem.subtract_mean && out.mean.is_none() {
            return Err(left_out("mean"));
        }
        for (plan, config) in &launches.steps {
            let scale = out.scale.as_mut().map(ViewMut::reborrow);
            let scale = match (&self.scale, scale) {
                (QuantizeScale::Given(scale), _) => QuantizeScales::Given(*scale),
                (QuantizeScale::Tensor, Some(scale)) => QuantizeScales::Tensor(scale),
                (QuantizeScale::Head, Some(scale)) => QuantizeScales::Head(scale),
                (QuantizeScale::Token, scale) => QuantizeScales::Token(scale),
                (QuantizeScale::Tensor | QuantizeScale::Head, None) => {
                    return Err(left_out("scale"));
                }
            };
            let operands = QuantizeOperands {
                x: self.x,
                cu_seqlens: self.packed.map(|packed| packed.cu_seqlens),
                codes: out.codes.reborrow(),
                scale,
                mean: out.mean.as_mut().map(ViewMut::reborrow),
            };
            stream.launch::<manifest::Quantize>(kernel, config, plan, operands)?;
        }
        Ok(())
    }

    fn compute(
        &self,
        problem: &QuantizeProblem,
        out: QuantizeOutputMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        cpu::quantize(self, problem, out, stream)
    }
}
