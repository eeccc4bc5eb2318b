//! Attention over a cache whose values are the first columns of its keys, for Hopper.

use super::attention_decode::{AttentionDecodeOperands, DecodeTile};
use super::attention_decode_scalars::AttentionDecodeScalars;
use super::attention_fwd_tma::encode;
use super::checked::Launch;
use super::fit::{Fit, require};
use crate::{Kernel, Result};
use blockflash_sys::manifest::{AttentionLatentHopper, Variant};
use blockflash_sys::params::blockflash_attention_latent_params;

// SAFETY:
// 1. This is the parameter struct of these kernels.
// 2. Keys are read through a tensor map, and so are inside the view that it was encoded from,
//    whatever pages and lengths the device holds. All other addresses follow as for
//    `AttentionDecodeHopper`, with as many columns of q and o as the tile has: `fit_latent` has
//    found that the tensors have exactly these. The kernel reads no address of k and v.
// 3. As for `AttentionDecodeHopper`. Which items there are is found by one warp for all.
unsafe impl Launch for AttentionLatentHopper {
    type Operands<'a> = AttentionDecodeOperands<'a>;
    type Plan = AttentionDecodeScalars;
    type Params = blockflash_attention_latent_params;
    const FAMILY: &'static str = "attention over a cache of latent rows for Hopper";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionLatentHopper(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        require(plan.run == 1, format_args!("a run has {} splits, expected 1", plan.run))?;
        require(plan.run_log2 == 0, format_args!("run_log2 is {}, expected 0", plan.run_log2))?;
        let even_ctas = plan.even_ctas;
        require(
            even_ctas == 0 || even_ctas > 0 && operands.has_lengths_alone(),
            format_args!("even_ctas is {even_ctas}, expected 0, or more with lengths alone"),
        )?;
        let Self { types, head_dims, .. } = *self;
        let (rows, is_even) = (Self::ROWS, even_ctas > 0);
        let tile = DecodeTile { types, head_dims, rows, run: 1, is_even };
        let runs = &mut params.runs;
        (runs.run, runs.even_ctas) = (plan.run, even_ctas);
        let items = operands.fit_items(&tile, plan, &mut runs.base)?;
        operands.fit_latent(head_dims)?;
        // Boxes are in one page.
        let cache = &runs.base.cache;
        let one_page = cache.capacity <= cache.page_size;
        let sizes = [Self::TILE_KEYS, Self::TILE_KEYS / 2, Self::TILE_KEYS / 4].map(|s| s as i32);
        let fits = |&rows: &i32| one_page || cache.page_size % rows == 0;
        params.box_rows = sizes.into_iter().find(fits).unwrap_or(sizes[2]);
        Ok(items)
    }

    fn encode(&self, operands: &Self::Operands<'_>, params: &mut Self::Params) -> Result<()> {
        params.keys = encode(&operands.cache.k, params.box_rows as u32)?;
        Ok(())
    }

    fn set_counter(params: &mut Self::Params, counter: *mut u32) {
        params.runs.base.tile_counter = counter;
    }
}
