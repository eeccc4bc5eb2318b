use super::QuantizeProblem;
use super::problem::ScaleOf;
use crate::Result;
use crate::attention::check_strides_by;
use crate::check::{grid_x, to_i32};
use crate::selection::fits;
use blockflash_safe::{CudaProperties, LaunchConfig, QuantizePlan, QuantizeSizes};
use blockflash_sys::Kernel;
use blockflash_sys::params::{
    BLOCKFLASH_QUANTIZE_CODES, BLOCKFLASH_QUANTIZE_GREATEST, BLOCKFLASH_QUANTIZE_MEANS,
    BLOCKFLASH_QUANTIZE_SUMS,
};

/// The most rows of a thread: enough that the beginning of a CTA is a small part of it.
const MOST_ROWS: usize = 32;
/// CTAs for each multiprocessor, below which threads have fewer rows.
const FEWEST_CTAS: usize = 4;

/// The launches of a call as plain data, one after another.
#[derive(Clone, Debug)]
pub struct QuantizeLaunches {
    /// What the tensors do not say; grid, block and shared memory.
    pub steps: Vec<(QuantizePlan, LaunchConfig)>,
}

impl QuantizeProblem {
    fn sizes(&self) -> QuantizeSizes {
        QuantizeSizes {
            batch: self.batch,
            seqlen: self.tokens,
            packed: self.packed,
            num_heads: self.num_heads,
            head_dim: self.head_dim,
            subtracts: self.subtract_mean,
            is_tensor: self.scale == ScaleOf::Tensor,
        }
    }

    /// The steps of the kernel that a call consists of.
    fn steps(&self) -> impl Iterator<Item = i32> {
        let shares = matches!(self.scale, ScaleOf::Tensor | ScaleOf::Head);
        let steps = [
            (self.subtract_mean, BLOCKFLASH_QUANTIZE_SUMS),
            (self.subtract_mean || shares, BLOCKFLASH_QUANTIZE_MEANS),
            (shares, BLOCKFLASH_QUANTIZE_GREATEST),
            (true, BLOCKFLASH_QUANTIZE_CODES),
        ];
        steps.into_iter().filter_map(|(needed, step)| needed.then_some(step))
    }
}

/// Plans the launches of `kernel` for a problem that it accepts on this GPU: one where scales are
/// given or of tokens, three where they are shared or where a mean is subtracted, four for both.
///
/// # Errors
/// [`Error::Misaligned`](crate::Error::Misaligned) for a stride of x that is not a multiple of 16
/// bytes, [`Error::TooLarge`](crate::Error::TooLarge) for more CTAs or heads than 32 bits count,
/// [`Error::Unsupported`](crate::Error::Unsupported) if the kernel does not take the problem.
pub fn plan(
    kernel: &Kernel,
    problem: &QuantizeProblem,
    gpu: &CudaProperties,
) -> Result<QuantizeLaunches> {
    fits(kernel, problem, gpu)?;
    let QuantizeProblem { batch, tokens, packed, num_heads, .. } = *problem;
    if !problem.is_empty() {
        let [entries, rows] = packed.map_or([batch, tokens], |total| [1, total]);
        let dims = [entries, rows, num_heads];
        check_strides_by(16 / problem.dtype.size(), &[("x", problem.x, dims)])?;
    }
    // The kernel counts them in 32 bits, with those that the last CTA has too many.
    to_i32("batch · num_heads", batch.saturating_mul(num_heads).saturating_add(256))?;
    let (sizes, longest) = (problem.sizes(), to_i32("tokens", tokens)?);
    let enough = FEWEST_CTAS * gpu.multiprocessors.max(1) as usize;
    let mut of_cta = sizes.tokens_at_once() * MOST_ROWS;
    while of_cta > sizes.tokens_at_once()
        && sizes.blocks(BLOCKFLASH_QUANTIZE_CODES, of_cta) < enough
    {
        of_cta /= 2;
    }
    let steps: Vec<i32> = problem.steps().collect();
    let passes = |steps: &[i32]| steps.iter().filter(|&&s| s != BLOCKFLASH_QUANTIZE_MEANS).count();
    let plan = |(at, &step): (usize, &i32)| {
        // Each pass over x begins where the one before it ended: that is in L2.
        let descends = step != BLOCKFLASH_QUANTIZE_MEANS && passes(&steps[at..]).is_multiple_of(2);
        let of_cta = to_i32("tokens", of_cta)?;
        let blocks = grid_x(&[sizes.blocks(step, of_cta as usize)])?;
        let rotates = problem.rotate;
        let plan = QuantizePlan { step, longest, tokens: of_cta, rotates, descends };
        Ok((plan, LaunchConfig::of(kernel, blocks, kernel.waits_for_predecessor())))
    };
    let steps = steps.iter().enumerate().map(plan).collect::<Result<_>>()?;
    Ok(QuantizeLaunches { steps })
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
