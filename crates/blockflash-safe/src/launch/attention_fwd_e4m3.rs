//! Attention forward for Hopper of queries, keys and values in e4m3.

use super::attention_fwd::{AttentionFwdOperands, AttentionFwdPlan};
use super::attention_fwd_tma::{BOX_ROWS_Q, encode_boxes, fit_output, fit_sections};
use super::checked::Launch;
use super::fit::Fit;
use super::operand_scales;
use crate::{Kernel, Result};
use blockflash_sys::manifest::{AttentionFwdE4m3, Variant};
use blockflash_sys::params::blockflash_attention_fwd_e4m3_params;

// SAFETY:
// 1. This is the parameter struct of these kernels.
// 2. Queries, keys and values are read through tensor maps, and so are inside the views that the
//    maps were encoded from. All other addresses follow from the sizes and strides in the struct,
//    which `fit` wrote from the views, and from offsets, which the kernel clamps to the packed
//    rows, or from a block mask, whose entries `BlockLists` has checked. Scales decide about no
//    address.
// 3. `o` and `lse` are `ViewMut`.
unsafe impl Launch for AttentionFwdE4m3 {
    type Operands<'a> = AttentionFwdOperands<'a>;
    type Plan = AttentionFwdPlan;
    type Params = blockflash_attention_fwd_e4m3_params;
    const FAMILY: &'static str = "attention forward of 8 bits for Hopper";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionFwdE4m3(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let fwd = &mut params.fwd;
        let tiles = operands.fit(&self.tile(), &plan.scalars, &mut fwd.base)?;
        let packed = operands.cu_seqlens.is_some();
        fit_sections(plan.heads_per_section, if packed { 1 } else { fwd.base.batch }, fwd)?;
        fit_output(operands, &fwd.base)?;
        operand_scales::fit(&operands.scales, &fwd.base, &mut params.scales)?;
        Ok(tiles)
    }

    fn encode(&self, operands: &Self::Operands<'_>, params: &mut Self::Params) -> Result<()> {
        let (fwd, columns) = (&mut params.fwd, self.box_columns());
        fwd.q = encode_boxes(&operands.q, [columns, BOX_ROWS_Q, 1])?;
        fwd.k = encode_boxes(&operands.k, [columns, self.block_kv, 1])?;
        fwd.v = encode_boxes(&operands.v, [columns, self.block_kv, 1])?;
        Ok(())
    }

    fn set_counter(params: &mut Self::Params, counter: *mut u32) {
        params.fwd.tile_counter = counter;
    }
}

#[cfg(test)]
#[path = "attention_fwd_e4m3_tests.rs"]
mod tests;
