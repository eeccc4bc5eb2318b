//! What a call has besides q, k and v.

use super::candle_core::{Layout, Result, Storage, Tensor};
use super::held::Reading;
use super::memory::{Operand, Place};
use blockflash_ops::{BlockMask, CuSeqlens, OperandScales, Scores};
use std::ops::Deref;
use std::sync::Arc;

/// The options of a call, owned: the backward pass needs them later.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) scores: Scores<Tensor>,
    /// Offsets of queries and of keys, and the longest sequences.
    pub(crate) cu_seqlens: Option<([Tensor; 2], [usize; 2])>,
    pub(crate) block_mask: Option<Arc<BlockMask>>,
    /// Of q, k and v.
    pub(crate) scales: [Option<Tensor>; 3],
}

/// The fields of the scales.
pub(crate) const SCALES: [&str; 3] = ["scales.q", "scales.k", "scales.v"];

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
        let locked = self.scores.as_ref().map(Tensor::storage_and_layout);
        let scores = read_scores(&locked, place)?;
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
        let scales = self.scales.each_ref().map(|scale| scale.as_ref());
        let scales = scales.map(|scale| scale.map(Tensor::storage_and_layout));
        let mut read = [None, None, None];
        for ((read, scale), what) in read.iter_mut().zip(&scales).zip(SCALES) {
            if let Some(scale) = scale {
                *read = Some(place.read(&Operand::of(what, scale)?)?);
            }
        }
        let [of_q, of_k, of_v] = read.each_ref().map(|scale| scale.as_ref().map(|of| of.view));
        self.block_mask.iter().for_each(|mask| place.keep(mask));
        work(&blockflash_ops::Attention {
            scores: scores.as_ref().map(|tensor| tensor.view),
            cu_seqlens,
            block_mask: self.block_mask.as_deref(),
            scales: OperandScales { q: of_q, k: of_k, v: of_v },
            ..blockflash_ops::Attention::new(q.view, k.view, v.view)
        })
    }
}

/// Scores over views.
pub(crate) fn read_scores<'a>(
    locked: &'a Scores<(impl Deref<Target = Storage>, &Layout)>,
    place: &'a Place,
) -> Result<Scores<Reading<'a>>> {
    locked.as_ref().try_map(|name, tensor| place.read(&Operand::of(name, tensor)?))
}
