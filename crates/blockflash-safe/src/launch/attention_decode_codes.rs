//! Attention over a cache of codes.

use super::attention_decode::{AttentionDecodeOperands, DecodeTile};
use super::attention_decode_scalars::{AttentionDecodeScalars, fewest_in_cluster};
use super::checked::Launch;
use super::fit::{Fit, require};
use crate::{DType, Kernel};
use blockflash_sys::ElementTypes;
use blockflash_sys::manifest::{AttentionDecode, Variant};
use blockflash_sys::params::blockflash_attention_decode_scaled_params;

/// The tile of a kernel for a cache of codes beside queries of f16 or bf16. Its launch checks
/// [`KvCacheViews::scales`](crate::KvCacheViews::scales), too.
#[derive(Clone, Copy, Debug)]
pub struct CodesDecode(AttentionDecode);

// SAFETY: as `AttentionDecode`, with a parameter struct that begins with that of kernels without
// score terms. Addresses of scales follow from the strides that `fit_scales` took from the views,
// and from sequences, pages, slots and heads that the kernel has clamped.
unsafe impl Launch for CodesDecode {
    type Operands<'a> = AttentionDecodeOperands<'a>;
    type Plan = AttentionDecodeScalars;
    type Params = blockflash_attention_decode_scaled_params;
    const FAMILY: &'static str = "attention over a cache of codes";

    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel.variant {
            Variant::AttentionDecode(tile) if tile.has_codes() => Some(Self(tile)),
            _ => None,
        }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let AttentionDecode { types, head_dims, rows, .. } = self.0;
        let dtype = operands.queries().dtype();
        require(
            matches!(dtype, DType::F16 | DType::BF16),
            format_args!("q is {dtype}, expected f16 or bf16"),
        )?;
        let types = ElementTypes { q: dtype, o: dtype, ..types };
        let tile = DecodeTile { types, head_dims, rows, run: 1, is_even: false };
        let items = operands.fit_items(&tile, plan, &mut params.decode)?;
        operands.refuse_terms_and_tail_mask()?;
        let decode = &params.decode;
        operands.cache.fit_scales(decode.batch.into(), &decode.cache, &mut params.scales)?;
        params.q_dtype = dtype as i32;
        Ok(items)
    }

    /// A CTA reads the shared memory of one for each split of a group.
    fn fewest_in_cluster(&self, _: &Self::Plan, params: &Self::Params) -> u32 {
        fewest_in_cluster(&params.decode)
    }

    fn set_counter(params: &mut Self::Params, counter: *mut u32) {
        params.decode.tile_counter = counter;
    }
}
