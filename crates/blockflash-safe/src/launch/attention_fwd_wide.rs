//! Attention forward for Hopper at head dimensions beyond 256.

use super::attention_fwd::{AttentionFwdOperands, AttentionFwdPlan};
use super::attention_fwd_tma::{BOX_ROWS_Q, encode, fit_output, fit_sections};
use super::checked::Launch;
use super::fit::Fit;
use crate::{Kernel, Result};
use blockflash_sys::manifest::{AttentionFwdWide, Variant};
use blockflash_sys::params::blockflash_attention_fwd_tma_params;

// SAFETY:
// 1. This is the parameter struct of these kernels, which read no map of o and no tile counter.
// 2. Queries, keys and values are read through tensor maps, and so are inside the views that the
//    maps were encoded from. All other addresses follow from the sizes and strides in the struct,
//    which `fit` wrote from the views, and from offsets, which the kernel clamps to the packed
//    rows. One warp of a CTA reads them, so all warps have the same tiles.
// 3. `o` and `lse` are `ViewMut`.
unsafe impl Launch for AttentionFwdWide {
    type Operands<'a> = AttentionFwdOperands<'a>;
    type Plan = AttentionFwdPlan;
    type Params = blockflash_attention_fwd_tma_params;
    const FAMILY: &'static str = "attention forward of wide heads for Hopper";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionFwdWide(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let tiles = operands.fit(&self.tile(), &plan.scalars, &mut params.base)?;
        let sequences = if operands.cu_seqlens.is_some() { 1 } else { params.base.batch };
        fit_sections(plan.heads_per_section, sequences, params)?;
        fit_output(operands, &params.base)?;
        Ok(tiles)
    }

    fn encode(&self, operands: &Self::Operands<'_>, params: &mut Self::Params) -> Result<()> {
        params.q = encode(&operands.q, BOX_ROWS_Q)?;
        params.k = encode(&operands.k, Self::ROWS)?;
        params.v = encode(&operands.v, Self::ROWS)?;
        Ok(())
    }
}
