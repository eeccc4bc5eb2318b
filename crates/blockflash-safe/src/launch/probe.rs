//! Probes: no operation, but one unit of the GPU at its highest rate.

use super::LaunchConfig;
use super::checked::{Launch, Operands};
use super::fit::{Fit, fits, pointer, pointer_mut, require, starts_at};
use crate::view::Used;
use crate::{DType, Kernel, Result, Stream, View, ViewMut};
use blockflash_sys::Probe;
use blockflash_sys::manifest::Variant;
use blockflash_sys::params::blockflash_probe_params;

/// The input of a probe holds a multiple of this many bytes, at least four of them.
pub const PROBE_CHUNK_BYTES: usize = 16384;

/// A probe and the threads of its CTA.
#[derive(Clone, Copy)]
pub(super) struct ProbeTile(Probe, u32);

/// CTAs and iterations of a probe.
pub(super) struct ProbePlan {
    blocks: u32,
    iterations: u32,
}

/// Contiguous i32 tensors of one dimension.
pub(super) struct ProbeOperands<'a> {
    input: View<'a>,
    output: ViewMut<'a>,
}

impl ProbeOperands<'_> {
    fn words(&self) -> i64 {
        self.input.shape().first().map_or(0, |&words| words as i64)
    }
}

impl Operands for ProbeOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        [Some(self.input.used()), Some(self.output.used())]
    }
}

// SAFETY:
// 1. This is the parameter struct of the probes.
// 2. A probe reads `bytes` from the input, of which `fit` found enough, and writes a word per
//    thread, or `bytes`, to the output, whose length `fit` found to be the same.
// 3. The output is a `ViewMut`.
unsafe impl Launch for ProbeTile {
    type Operands<'a> = ProbeOperands<'a>;
    type Plan = ProbePlan;
    type Params = blockflash_probe_params;
    const FAMILY: &'static str = "probes";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::Probe(probe) = kernel.variant {
            Some(Self(probe, kernel.threads()))
        } else {
            None
        }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let Self(probe, threads) = *self;
        let (words, output) = (operands.words(), operands.output.as_view());
        fits("input", &operands.input, DType::I32, [(words, 1)])?;
        let chunk = PROBE_CHUNK_BYTES as i64 / 4;
        require(
            words % chunk == 0 && words >= 4 * chunk,
            format_args!(
                "the input has {} bytes, expected a multiple of {PROBE_CHUNK_BYTES} from {} on",
                4 * words,
                16 * chunk
            ),
        )?;
        require(
            plan.blocks > 0,
            format_args!("a grid of {} blocks, expected at least 1", plan.blocks),
        )?;
        require(
            i32::try_from(plan.iterations).is_ok(),
            format_args!("{} iterations, the limit is {}", plan.iterations, i32::MAX),
        )?;
        starts_at(16, "input", &operands.input)?;
        starts_at(16, "output", &output)?;
        let threads = i64::from(plan.blocks) * i64::from(threads);
        let written = if probe == Probe::Copy { words } else { threads };
        fits("output", &output, DType::I32, [(written, 1)])?;
        *params = blockflash_probe_params {
            input: pointer(&operands.input),
            output: pointer_mut(&operands.output),
            bytes: 4 * words,
            iterations: plan.iterations as i32,
        };
        Ok(plan.blocks.into())
    }
}

impl Stream {
    /// Launches a probe with `blocks` CTAs. The input is i32 `[words]`, the output i32 with a word
    /// per thread, or for a copy as many as the input; both are contiguous. `iterations` is how
    /// often the inner loop runs.
    ///
    /// # Errors
    /// As [`launch`](Stream::launch).
    #[doc(hidden)]
    pub fn launch_probe(
        &self,
        kernel: &Kernel,
        blocks: u32,
        iterations: u32,
        input: View<'_>,
        output: ViewMut<'_>,
    ) -> Result<()> {
        let config = LaunchConfig::of(kernel, blocks, false);
        let plan = ProbePlan { blocks, iterations };
        self.launch::<ProbeTile>(kernel, &config, &plan, ProbeOperands { input, output })
    }
}
