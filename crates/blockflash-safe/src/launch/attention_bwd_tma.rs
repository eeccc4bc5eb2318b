//! Attention backward for Hopper: tiles are loaded with TMA.

use super::attention_bwd::{AttentionBwdOperands, AttentionBwdPlan};
use super::attention_fwd_tma::encode;
use super::checked::Launch;
use super::fit::{Fit, absent};
use crate::{Kernel, Result};
use blockflash_sys::manifest::{AttentionBwdHopper, AttentionBwdStep as Step, Variant};
use blockflash_sys::params::{
    blockflash_attention_bwd_tma_params, blockflash_attention_bwd_tma_terms_params,
};

/// Rows of a box of q or d_o.
const BOX_ROWS_Q: u32 = 64;

// SAFETY:
// 1. This is the parameter struct of the Hopper kernels of the attention backward with score terms;
//    those without take its first member.
// 2. As for the portable kernels. Whatever is read through a tensor map is inside the view that
//    the map was encoded from. The kernel that sums dq waits for words in the workspace, which
//    another launch may change; it gives up after a fixed number of polls, and adds to the same
//    sums then. Which tile it adds to follows from the sizes alone, and so does the place of parts
//    of dk and dv.
// 3. Gradients and workspace are `ViewMut`.
unsafe impl Launch for AttentionBwdHopper {
    type Operands<'a> = AttentionBwdOperands<'a>;
    type Plan = AttentionBwdPlan;
    type Params = blockflash_attention_bwd_tma_terms_params;
    const FAMILY: &'static str = "attention backward for Hopper";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionBwdHopper(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn param_bytes(&self) -> usize {
        match self.terms {
            true => size_of::<blockflash_attention_bwd_tma_terms_params>(),
            false => size_of::<blockflash_attention_bwd_tma_params>(),
        }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        all: &mut Self::Params,
    ) -> Fit<i128> {
        let params = &mut all.bwd;
        let (blocks, sums) = operands.fit(&self.tile(), plan, &mut params.base)?;
        if self.terms {
            absent("bias", operands.terms.bias.is_some(), "the kernel takes none")?;
            let bits = operands.fit_terms(&params.base, &mut all.terms)?;
            (all.block_bits_t, all.bits_t) = (bits.block_bits, bits.bits);
            all.bit_tiles_t = bits.tiles;
        }
        (params.dq_sums, params.key_parts) = (sums.dq, sums.key_parts);
        params.heads_per_section = plan.heads_per_section;
        params.head_parts = plan.parts.map_or(1, |parts| parts.count);
        Ok(blocks)
    }

    fn encode(&self, operands: &Self::Operands<'_>, all: &mut Self::Params) -> Result<()> {
        let params = &mut all.bwd;
        // That step reads no tiles.
        if self.step != Step::Sums {
            let block_kv = self.tile().block_kv;
            params.q = encode(&operands.q, BOX_ROWS_Q)?;
            params.d_o = encode(&operands.d_o, BOX_ROWS_Q)?;
            params.k = encode(&operands.k, block_kv)?;
            params.v = encode(&operands.v, block_kv)?;
        }
        Ok(())
    }

    fn set_counter(params: &mut Self::Params, counter: *mut u32) {
        params.bwd.tile_counter = counter;
    }
}
