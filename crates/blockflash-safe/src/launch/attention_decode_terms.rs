//! What is added to the scores of attention over a cache, and the mask of the last keys.

use super::attention_decode::AttentionDecodeOperands;
use super::fit::{Fit, absent, fits, narrow, pointer, require};
use crate::DType;
use blockflash_sys::params::{
    blockflash_attention_decode_params, blockflash_score_terms, blockflash_tail_mask,
};

impl AttentionDecodeOperands<'_> {
    /// Writes what is added to scores, for sizes that `fit_items` has written.
    pub(super) fn fit_terms(
        &self,
        base: &blockflash_attention_decode_params,
        terms: &mut blockflash_score_terms,
    ) -> Fit {
        let sizes = [base.batch, base.num_heads_q, base.seqlen_q, base.cache.capacity];
        self.terms.fit_added(self.cu_seqlens_q.is_some(), sizes.map(i64::from), terms)
    }

    /// Writes the mask of the last keys, for sizes that `fit_items` has written.
    pub(super) fn fit_tail_mask(
        &self,
        base: &blockflash_attention_decode_params,
        p: &mut blockflash_tail_mask,
    ) -> Fit {
        let Some(view) = &self.tail_mask else { return Ok(()) };
        let tail = view.shape().last().map_or(0, |&tail| tail as i64);
        require(
            tail >= 1 && tail <= base.cache.capacity.into(),
            format_args!("tail_mask has {tail} keys, expected 1 to {}", base.cache.capacity),
        )?;
        let stride = |dim: usize| view.strides().get(dim).map_or(0, |&stride| stride as i64);
        if self.cu_seqlens_q.is_some() {
            p.stride_q = stride(0);
            let rows = (base.total_q.into(), p.stride_q);
            fits("tail_mask", view, DType::U8, [rows, (tail, 1)])?;
        } else {
            let entries = view.shape().first().map_or(0, |&entries| entries as i64);
            let entries = if entries == 1 { 1 } else { base.batch.into() };
            p.stride_batch = if entries == 1 { 0 } else { stride(0) };
            p.stride_q = stride(1);
            let (sequences, rows) = ((entries, stride(0)), (base.seqlen_q.into(), p.stride_q));
            fits("tail_mask", view, DType::U8, [sequences, rows, (tail, 1)])?;
        }
        (p.visible, p.tail) = (pointer(view).cast(), narrow("tail_mask", tail)?);
        Ok(())
    }

    /// Checks that nothing is added to scores, for a kernel that reads no bias and no slopes.
    pub(super) fn refuse_terms(&self) -> Fit {
        self.terms.refuse(None)
    }

    /// The same, and that there is no mask of the last keys.
    pub(super) fn refuse_terms_and_tail_mask(&self) -> Fit {
        self.refuse_terms()?;
        absent("tail_mask", self.tail_mask.is_some(), "the kernel has no score terms")
    }
}
