//! Score terms of the attention backward: what is added to scores, the bits of a mask and of its
//! transpose, and the gradient of the bias.

use super::attention_bwd::AttentionBwdOperands;
use super::fit::{Fit, given, narrow, pointer_mut, require};
use super::score_terms::{BitArrays, broadcast};
use blockflash_sys::params::{
    blockflash_attention_bwd_bias_params, blockflash_attention_bwd_params, blockflash_score_terms,
};

impl AttentionBwdOperands<'_> {
    /// Extents and strides of the gradient of the bias, for scores of this shape.
    pub(super) fn fit_dbias(&self, full: [i64; 4]) -> Fit<([i64; 4], [i64; 4])> {
        let Some(dbias) = &self.dbias else {
            return Err("dbias is not given, and the kernel computes it".into());
        };
        broadcast("dbias", &dbias.as_view(), full)
    }

    /// Writes the gradient of the bias, for what `fit` has written.
    pub(super) fn write_dbias(&self, p: &mut blockflash_attention_bwd_bias_params) -> Fit {
        let base = &p.base.bwd.base;
        let full = [base.batch, base.num_heads_q, base.seqlen_q, base.seqlen_kv];
        let (extents, strides) = self.fit_dbias(full.map(i64::from))?;
        let extent = |dim: usize| narrow("an extent of dbias", extents[dim]);
        (p.batch, p.heads, p.rows, p.cols) = (extent(0)?, extent(1)?, extent(2)?, extent(3)?);
        [p.d_bias_stride_batch, p.d_bias_stride_head, p.d_bias_stride_q, p.d_bias_stride_kv] =
            strides;
        if let Some(dbias) = &self.dbias {
            (p.d_bias, p.d_bias_type) = (pointer_mut(dbias), dbias.dtype() as i32);
        }
        Ok(())
    }

    /// Writes the score terms, for what `fit` has written, and returns the transposed bits.
    pub(super) fn fit_terms(
        &self,
        bwd: &blockflash_attention_bwd_params,
        terms: &mut blockflash_score_terms,
    ) -> Fit<BitArrays> {
        let [mask, transposed] = self.block_mask.map_or([None; 2], |both| both.map(Some));
        self.terms.fit(&bwd.base, mask, terms)?;
        let bits_t = BitArrays::of(transposed, &bwd.block_mask_t)?;
        let bits = terms.bit_tiles > 0;
        require(
            bits == bits_t.is_some(),
            format_args!(
                "bits of the mask and of its transpose: {} and {}, expected both or none",
                given(bits),
                given(bits_t.is_some())
            ),
        )?;
        Ok(bits_t.unwrap_or(BitArrays::NONE))
    }
}
