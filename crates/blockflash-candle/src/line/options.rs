//! What a call has besides q, k and v.

use super::candle_core::{Result, Tensor};
use super::held::Reading;
use super::memory::{Operand, Place};
use blockflash_ops::{BlockMask, CuSeqlens, Mask};
use std::sync::Arc;

/// The options of a call, owned: the backward pass needs them later.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) mask: Mask,
    pub(crate) softmax_scale: Option<f32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) sink: Option<Tensor>,
    /// Offsets of queries and of keys, and the longest sequences.
    pub(crate) cu_seqlens: Option<([Tensor; 2], [usize; 2])>,
    pub(crate) block_mask: Option<Arc<BlockMask>>,
}

impl Options {
    pub(crate) fn is_packed(&self) -> bool {
        self.cu_seqlens.is_some()
    }

    /// Runs with the call over views.
    pub(crate) fn with_views<R>(
        &self,
        place: &Place,
        [q, k, v]: [&Reading<'_>; 3],
        work: impl FnOnce(&blockflash_ops::Attention<'_>) -> Result<R>,
    ) -> Result<R> {
        let sink = self.sink.as_ref().map(Tensor::storage_and_layout);
        let sink = sink.as_ref().map(|sink| place.read(&Operand::of("sink", sink)?)).transpose()?;
        let offsets = self.cu_seqlens.as_ref().map(|(offsets, _)| offsets.each_ref());
        let offsets = offsets.map(|offsets| offsets.map(Tensor::storage_and_layout));
        let offsets = match &offsets {
            None => None,
            Some([q, kv]) => {
                let q = place.read(&Operand::of("cu_seqlens.q", q)?)?;
                Some([q, place.read(&Operand::of("cu_seqlens.kv", kv)?)?])
            }
        };
        let cu_seqlens = offsets.as_ref().zip(self.cu_seqlens.as_ref());
        let cu_seqlens =
            cu_seqlens.map(|([q, kv], (_, [max_seqlen_q, max_seqlen_kv]))| CuSeqlens {
                q: q.view,
                kv: kv.view,
                max_seqlen_q: *max_seqlen_q,
                max_seqlen_kv: *max_seqlen_kv,
            });
        self.block_mask.iter().for_each(|mask| place.keep(mask));
        work(&blockflash_ops::Attention {
            mask: self.mask,
            softmax_scale: self.softmax_scale,
            softcap: self.softcap,
            sink: sink.as_ref().map(|sink| sink.view),
            cu_seqlens,
            block_mask: self.block_mask.as_deref(),
            ..blockflash_ops::Attention::new(q.view, k.view, v.view)
        })
    }
}
