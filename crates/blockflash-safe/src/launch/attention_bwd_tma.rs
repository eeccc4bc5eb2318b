//! Attention backward for Hopper: tiles are loaded with TMA.

use super::attention_bwd::{AttentionBwdOperands, AttentionBwdPlan};
use super::attention_fwd_tma::encode;
use super::checked::Launch;
use super::fit::Fit;
use crate::{Kernel, Result};
use blockflash_sys::manifest::{AttentionBwdHopper, AttentionBwdStep as Step, Variant};
use blockflash_sys::params::{blockflash_attention_bwd_tma_params, blockflash_tensor_map};
use std::ptr::null_mut;

/// Rows of a box of q or d_o.
const BOX_ROWS_Q: u32 = 64;

// SAFETY:
// 1. This is the parameter struct of the Hopper kernels of the attention backward.
// 2. As for the portable kernels. Whatever is read through a tensor map is inside the view that
//    the map was encoded from. The kernel that sums dq waits for words in the workspace, which
//    another launch may change; it gives up after a fixed number of polls, and adds to the same
//    sums then. Which tile it adds to follows from the sizes alone, and so does the place of parts of
//    dk and dv.
// 3. Gradients and workspace are `ViewMut`.
unsafe impl Launch for AttentionBwdHopper {
    type Operands<'a> = AttentionBwdOperands<'a>;
    type Plan = AttentionBwdPlan;
    type Params = blockflash_attention_bwd_tma_params;
    const FAMILY: &'static str = "attention backward for Hopper";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionBwdHopper(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(&self, plan: &Self::Plan, operands: &Self::Operands<'_>) -> Fit<i128> {
        operands.fit(&self.tile(), plan)
    }

    fn params(&self, plan: &Self::Plan, operands: &Self::Operands<'_>) -> Result<Self::Params> {
        let tile = self.tile();
        let map = |view, rows| match self.step {
            // It reads no tiles.
            Step::Sums => Ok(blockflash_tensor_map { opaque: [0; 16] }),
            _ => encode(view, rows),
        };
        let [.., sums, key_parts] = operands.places(plan);
        Ok(blockflash_attention_bwd_tma_params {
            q: map(&operands.q, BOX_ROWS_Q)?,
            d_o: map(&operands.d_o, BOX_ROWS_Q)?,
            k: map(&operands.k, tile.block_kv)?,
            v: map(&operands.v, tile.block_kv)?,
            base: operands.pointers(plan),
            dq_sums: if plan.sums_head_dim.is_some() { sums.cast() } else { null_mut() },
            tile_counter: null_mut(),
            heads_per_section: plan.heads_per_section,
            head_parts: plan.parts.map_or(1, |parts| parts.count),
            key_parts: if plan.parts.is_some() { key_parts.cast() } else { null_mut() },
        })
    }

    fn set_counter(params: &mut Self::Params, counter: *mut u32) {
        params.tile_counter = counter;
    }
}
