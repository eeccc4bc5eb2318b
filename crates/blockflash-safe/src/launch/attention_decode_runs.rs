//! Attention of several queries over a cache for Hopper.

use super::attention_decode::{AttentionDecodeOperands, DecodeTile};
use super::attention_decode_scalars::AttentionDecodeScalars;
use super::checked::Launch;
use super::fit::{Fit, absent, require};
use crate::Kernel;
use blockflash_sys::manifest::{AttentionDecodeHopper, Variant};
use blockflash_sys::params::blockflash_attention_decode_runs_params;

// SAFETY:
// 1. This is the parameter struct of these kernels.
// 2. and 3. as for `AttentionDecode`. What the words of the workspace hold decides only which CTA
//    combines which rows and when. A CTA looks at a word a fixed number of times.
unsafe impl Launch for AttentionDecodeHopper {
    type Operands<'a> = AttentionDecodeOperands<'a>;
    type Plan = AttentionDecodeScalars;
    type Params = blockflash_attention_decode_runs_params;
    const FAMILY: &'static str = "attention of several queries over a cache for Hopper";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionDecodeHopper(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let run = u32::try_from(plan.run).unwrap_or(0);
        require(
            Self::RUNS.contains(&run),
            format_args!("a run has {run} splits, expected one of {:?}", Self::RUNS),
        )?;
        require(plan.run_log2 == 0, format_args!("run_log2 is {}, expected 0", plan.run_log2))?;
        absent("pages", operands.pages.is_some(), "the kernel visits all pages")?;
        let even_ctas = plan.even_ctas;
        require(
            even_ctas == 0 || even_ctas > 0 && operands.has_lengths_alone(),
            format_args!("even_ctas is {even_ctas}, expected 0, or more with lengths alone"),
        )?;
        let Self { types, head_dims, .. } = *self;
        let (rows, is_even) = (Self::ROWS, even_ctas > 0);
        let tile = DecodeTile { types, head_dims, rows, run, is_even };
        (params.run, params.even_ctas) = (plan.run, even_ctas);
        let items = operands.fit_items(&tile, plan, &mut params.base)?;
        operands.refuse_terms()?;
        operands.fit_tail_mask(&params.base, &mut params.tail_mask)?;
        Ok(items)
    }

    fn set_counter(params: &mut Self::Params, counter: *mut u32) {
        params.base.tile_counter = counter;
    }
}
