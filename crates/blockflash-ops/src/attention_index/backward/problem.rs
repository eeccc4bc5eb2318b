use super::IndexAttentionBackward;
use crate::attention::cpu::sequence::{Sequence, sequences};
use crate::attention::{Attention, CuSeqlens};
use crate::attention_bwd::{AttentionBackward, AttentionBackwardProblem, statistics_bytes};
use crate::attention_index::IndexListSizes;
use crate::check::Operand;
use crate::{Error, Result};
use blockflash_safe::{
    AttentionIndexBwdSizes, CudaProperties, Stream, View, attention_index_bwd_workspace,
};
use blockflash_sys::manifest::AttentionIndexBwdTile;

/// Rows of an item, of few and of many queries: more items fill the GPU, longer ones have fewer
/// sums to leave. On an H200 8192 queries take 1.00 ms with items of 2048 rows, 1.23 ms with 8192;
/// with 65,536 queries 4096 to 16,384 are alike.
const ITEM_ROWS: [usize; 2] = [2048, 8192];
/// Queries from which on there are many.
const MANY_QUERIES: usize = 32_768;
/// Part of the memory of a GPU that a workspace takes where the caller does not say how much.
const MEMORY_PARTS: usize = 16;
/// Queries of a pass are a multiple of this, if there are several passes.
const PASS_STEP: usize = 256;

/// A call reduced to plain numbers: what `select` and `plan` work on.
///
/// [`IndexAttentionBackward::problem`] makes one from tensors, with all checks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexAttentionBackwardProblem {
    /// The gradients of attention to all keys, with the same tensors.
    pub dense: AttentionBackwardProblem,
    /// The lists.
    pub lists: IndexListSizes,
}

impl IndexAttentionBackwardProblem {
    /// The same problem with a workspace of this many bytes.
    pub fn with_workspace(self, bytes: usize) -> Self {
        Self { dense: self.dense.with_workspace(bytes), ..self }
    }

    /// Queries of all sequences, as the lists count them.
    pub(super) fn total_q(&self) -> usize {
        let forward = &self.dense.forward;
        let all = forward.batch.saturating_mul(forward.seqlen_q);
        forward.packed.map_or(all, |packed| packed.total_q)
    }

    /// The place of the first query of a sequence in the lists.
    pub(super) fn first_query(&self, sequence: &Sequence) -> usize {
        match self.dense.forward.packed {
            Some(_) => sequence.first_q,
            None => sequence.entry * self.dense.forward.seqlen_q,
        }
    }

    /// Bytes of workspace where the caller does not say how many: a part of the memory.
    pub(super) fn usual_workspace(&self, gpu: &CudaProperties) -> usize {
        gpu.memory_bytes as usize / MEMORY_PARTS
    }

    /// Visits of an item.
    fn item_visits(&self) -> usize {
        let group = self.dense.forward.num_heads_q
            / self.lists.units(self.dense.forward.num_heads_kv).max(1);
        let many = usize::from(self.total_q() >= MANY_QUERIES);
        (ITEM_ROWS[many] / group.max(1)).max(1)
    }

    /// Sizes for a kernel, with passes of this many queries.
    fn sizes_of(
        &self,
        tile: &AttentionIndexBwdTile,
        pass_queries: usize,
    ) -> AttentionIndexBwdSizes {
        let forward = &self.dense.forward;
        AttentionIndexBwdSizes {
            heads: [forward.num_heads_q, forward.num_heads_kv],
            head_dim_qk: forward.head_dims.qk,
            groups: self.lists.groups,
            capacity: self.lists.capacity,
            granularity: self.lists.granularity,
            total_q: self.total_q(),
            batch: forward.batch,
            keys: forward.packed.map_or(forward.seqlen_kv, |packed| packed.total_kv),
            packed: forward.packed.is_some(),
            tile_keys: tile.keys as usize,
            tile_head_dim: tile.head_dims.max(),
            dq_columns: tile.dq_columns() as usize,
            pass_queries: pass_queries.max(1),
            item_visits: self.item_visits(),
        }
    }

    /// Sizes for a kernel with the fewest passes whose workspace fits into the one that is lent,
    /// else with as many passes as there may be, and the bytes of their workspace.
    pub(super) fn sizes(
        &self,
        tile: &AttentionIndexBwdTile,
    ) -> Result<(AttentionIndexBwdSizes, usize)> {
        let limit = isize::MAX as usize;
        let too_large = Error::TooLarge { what: "workspace", value: usize::MAX, limit };
        let Some(statistics) = statistics_bytes(&self.dense) else { return Err(too_large) };
        let total = self.total_q();
        let mut passes = 1;
        loop {
            let queries = match passes {
                1 => total,
                _ => total.div_ceil(passes).next_multiple_of(PASS_STEP),
            };
            let sizes = self.sizes_of(tile, queries);
            let bytes = attention_index_bwd_workspace(statistics, &sizes);
            let fits = bytes.filter(|&bytes| bytes <= self.dense.workspace && sizes.is_counted());
            let is_last = queries <= PASS_STEP;
            match (fits, is_last, bytes) {
                (Some(bytes), ..) | (None, true, Some(bytes)) => return Ok((sizes, bytes)),
                (None, true, None) => return Err(too_large),
                // The next number of passes whose length differs.
                _ => passes = total.div_ceil((queries - 1) / PASS_STEP * PASS_STEP),
            }
        }
    }
}

impl<'a> IndexAttentionBackward<'a> {
    /// The gradients of attention to all keys, with the same tensors.
    pub(super) fn dense(&self) -> Result<AttentionBackward<'a>> {
        let Self { attention: call, cache, o, lse, d_o } = *self;
        let why = "none, since gradients are asked for";
        for (what, view) in [
            ("cache.block_table", cache.block_table.as_ref()),
            ("cache.seqused_kv", cache.seqused_kv.as_ref()),
            ("cache.k_scale", cache.k_scale.as_ref()),
            ("cache.v_scale", cache.v_scale.as_ref()),
        ] {
            if let Some(view) = view {
                return Err(Operand::new(what, view).wrong_shape(why));
            }
        }
        let (mut k, mut v) = (cache.k, cache.v);
        let mut cu_seqlens = None;
        match (call.packed, call.packed_kv) {
            (None, None) => {}
            (Some(q), Some(kv)) => {
                (k, v) = (k.flatten(0..2)?, v.flatten(0..2)?);
                cu_seqlens = Some(CuSeqlens {
                    q: q.cu_seqlens,
                    kv: kv.cu_seqlens,
                    max_seqlen_q: q.max_seqlen,
                    max_seqlen_kv: kv.max_seqlen,
                });
            }
            (Some(only), None) => {
                let expected = "none without packed_kv, since gradients are asked for";
                return Err(
                    Operand::new("packed.cu_seqlens", &only.cu_seqlens).wrong_shape(expected)
                );
            }
            (None, Some(only)) => {
                let expected = "none beside queries that are not packed, since gradients are asked \
                                for";
                return Err(
                    Operand::new("packed_kv.cu_seqlens", &only.cu_seqlens).wrong_shape(expected)
                );
            }
        }
        let terms: [(&str, Option<View<'_>>); 2] =
            [("scores.bias", call.scores.bias), ("scores.alibi", call.scores.alibi)];
        for (what, view) in terms {
            if let Some(view) = &view {
                return Err(Operand::new(what, view).wrong_shape(why));
            }
        }
        let attention =
            Attention { scores: call.scores, cu_seqlens, ..Attention::new(call.q, k, v) };
        Ok(AttentionBackward { attention, o, lse, d_o })
    }

    /// Everything that can be checked without reading a tensor, and the result as plain numbers.
    ///
    /// # Errors
    /// All checks of [`IndexAttention::problem`](super::IndexAttention::problem) and of
    /// [`AttentionBackward::problem`]; [`Error::Shape`] for a block table, lengths, scales or terms
    /// of scores, and where only queries or only keys are packed.
    pub fn problem(&self) -> Result<IndexAttentionBackwardProblem> {
        let dense = self.dense()?;
        let lists = self.attention.problem(&self.cache)?.lists;
        Ok(IndexAttentionBackwardProblem { dense: dense.problem()?, lists })
    }

    /// The sequences. Packed ones are verified.
    pub(super) fn sequences(
        &self,
        problem: &IndexAttentionBackwardProblem,
        stream: &Stream,
    ) -> Result<Vec<Sequence>> {
        sequences(&self.dense()?.attention, &problem.dense.forward, stream)
    }
}
