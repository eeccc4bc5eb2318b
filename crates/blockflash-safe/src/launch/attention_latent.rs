//! Attention over a cache whose values are the first columns of its keys.

use super::attention_decode::{AttentionDecodeOperands, DecodeTile};
use super::attention_decode_scalars::AttentionDecodeScalars;
use super::checked::Launch;
use super::fit::{Fit, absent, require};
use super::kv_cache::KvCacheViews;
use crate::{DType, Kernel, View};
use blockflash_sys::HeadDims;
use blockflash_sys::manifest::{AttentionLatent, Variant};
use blockflash_sys::params::blockflash_attention_decode_params;

impl KvCacheViews<'_> {
    /// Checks that the values are the first columns of the keys, which have been found to fit each
    /// other.
    pub(super) fn fit_latent(&self) -> Fit {
        let (k, v) = (&self.k, &self.v);
        let mut dims = k.shape().iter().zip(k.strides().iter().zip(v.strides()));
        require(
            v.starts_with(k) && dims.all(|(&extent, (of_k, of_v))| extent == 1 || of_k == of_v),
            format_args!("v does not hold the first columns of k"),
        )
    }
}

impl KvCacheViews<'_> {
    /// Elements of a row of the keys, and of the values.
    fn columns(&self) -> HeadDims {
        let columns = |view: &View<'_>| view.shape().last().copied().unwrap_or(0);
        HeadDims { qk: columns(&self.k), v: columns(&self.v) }
    }

    /// Checks that keys and values are whole rows of codes.
    pub(super) fn fit_code_rows(&self) -> Fit {
        let (found, bytes) = (self.columns(), AttentionLatent::CODE_ROW_BYTES);
        require(
            found == HeadDims::all(bytes),
            format_args!("rows of codes have {found} bytes, expected {bytes}"),
        )
    }
}

impl AttentionDecodeOperands<'_> {
    /// Checks what kernels for latent rows take beside what [`fit_items`](Self::fit_items) checks
    /// against the largest head dimensions, of which they take no others.
    pub(super) fn fit_latent(&self, head_dims: HeadDims) -> Fit {
        if self.cache.k.dtype() != DType::U8 {
            let found = self.cache.columns();
            require(
                found == head_dims,
                format_args!("head dimensions are {found}, expected exactly {head_dims}"),
            )?;
        }
        self.cache.fit_latent()?;
        absent("pages", self.pages.is_some(), "the kernel visits all pages")?;
        self.refuse_terms_and_tail_mask()
    }
}

// SAFETY: as for `AttentionDecode`, with the parameter struct of its kernels without score terms.
// The kernel reads as many columns of q and k as its tile has, and writes as many of o:
// `fit_latent` has found that the tensors have exactly these; of rows of codes it reads the bytes
// that `fit_code_rows` has found. It reads no address of v.
unsafe impl Launch for AttentionLatent {
    type Operands<'a> = AttentionDecodeOperands<'a>;
    type Plan = AttentionDecodeScalars;
    type Params = blockflash_attention_decode_params;
    const FAMILY: &'static str = "attention over a cache of latent rows";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionLatent(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let Self { types, head_dims, .. } = *self;
        let run_log2 = plan.run_log2;
        require(run_log2 == 0, format_args!("run_log2 is {run_log2}, expected 0"))?;
        let tile = DecodeTile { types, head_dims, rows: Self::ROWS, run: 1, is_even: false };
        let items = operands.fit_items(&tile, plan, params)?;
        operands.fit_latent(head_dims)?;
        Ok(items)
    }

    fn set_counter(params: &mut Self::Params, counter: *mut u32) {
        params.tile_counter = counter;
    }
}

#[cfg(test)]
#[path = "attention_latent_tests.rs"]
mod tests;
