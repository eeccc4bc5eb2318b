use super::{IndexAttention, IndexListSizes, plan, select};
use crate::attention::{AttentionProblem, PackedRows, Strides};
use crate::check::{Operand, to_i32};
use crate::kv_cache::{CacheSizes, KvCache, packed_keys, token_sizes};
use crate::{Error, Result};
use blockflash_safe::Device;
use blockflash_sys::{DType, ElementTypes};

/// A call of attention by an index reduced to plain numbers: what `select` and `plan` work on.
///
/// [`IndexAttention::problem`] makes one from tensors, with all checks;
/// [`IndexAttentionProblem::of`] makes one without tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexAttentionProblem {
    /// Queries, outputs and options. `seqlen_kv` is the capacity of a sequence, and `k` and `v`
    /// have the strides of the cache, from page to page in place of the batch.
    pub attention: AttentionProblem,
    /// The cache. Packed keys are one page for all sequences.
    pub cache: CacheSizes,
    /// The lists.
    pub lists: IndexListSizes,
    /// Whether keys are packed.
    pub packed_kv: bool,
    /// Whether the bits of a query depend on no other query.
    pub batch_invariant: bool,
}

impl IndexAttentionProblem {
    /// Attention of `seqlen_q` queries of each sequence to a cache without any option: the start of
    /// a plan without tensors. Not checked.
    pub fn of(
        cache: CacheSizes,
        [seqlen_q, num_heads_q]: [usize; 2],
        lists: IndexListSizes,
    ) -> Self {
        let CacheSizes { dtype, batch, capacity, num_heads_kv, head_dims, .. } = cache;
        let sizes = [batch, seqlen_q, capacity];
        let (types, heads) = (ElementTypes::all(dtype), [num_heads_q, num_heads_kv]);
        let dense = AttentionProblem::contiguous(types, sizes, heads, head_dims);
        let attention = AttentionProblem { k: cache.k, v: cache.v, ..dense };
        Self { attention, cache, lists, packed_kv: false, batch_invariant: false }
    }

    /// The same with queries and an output of this type, which need not be that of the cache if
    /// that holds codes.
    pub fn with_queries(mut self, dtype: DType) -> Self {
        self.attention.types = ElementTypes { q: dtype, o: dtype, ..self.attention.types };
        self
    }

    /// Whether the values are the first columns of keys that are too long for other kernels than
    /// those for latent rows.
    pub(super) fn is_latent(&self) -> bool {
        self.cache.has_latent_rows()
    }

    /// Queries of all sequences, as the lists count them.
    pub fn total_q(&self) -> usize {
        let AttentionProblem { batch, seqlen_q, packed, .. } = self.attention;
        packed.map_or(batch.saturating_mul(seqlen_q), |packed| packed.total_q)
    }

    /// Bytes of workspace on a device.
    pub(super) fn workspace_bytes(&self, device: &Device) -> Result<usize> {
        match device.cuda_properties() {
            Some(gpu) if !self.attention.is_empty() => {
                Ok(plan(select(self, gpu)?, self, gpu)?.workspace_bytes)
            }
            _ => Ok(0),
        }
    }

    /// Pairs of a list and a head of keys.
    pub fn units(&self) -> usize {
        self.lists.units(self.cache.num_heads_kv)
    }

    /// Whether there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.attention.is_empty()
    }

    /// Heads of queries that share a list and a head of keys.
    pub fn group(&self) -> usize {
        self.attention.num_heads_q / self.units().max(1)
    }
}

impl IndexAttention<'_> {
    /// Everything that can be checked without reading a tensor, and the result as plain numbers:
    /// for a contiguous `o` and no `lse`.
    ///
    /// # Errors
    /// All checks of [`KvCache::sizes`]; [`Error::DType`], [`Error::Shape`], [`Error::Stride`],
    /// [`Error::HeadGroups`], [`Error::InvalidScale`], [`Error::MaxSeqlen`] and
    /// [`Error::TooLarge`].
    pub fn problem(&self, cache: &KvCache<'_>) -> Result<IndexAttentionProblem> {
        let sizes = cache.sizes()?;
        let cache = match &self.packed_kv {
            None => sizes,
            Some(packed) => packed_keys(cache, sizes, packed)?,
        };
        let q = Operand::new("q", &self.q);
        cache.takes(&q)?;
        let rows = token_sizes(&q, self.packed.as_ref())?;
        if [rows.batch, rows.head_dim] != [cache.batch, cache.head_dims.qk] {
            let (batch, head_dim) = (cache.batch, cache.head_dims.qk);
            return Err(q.wrong_shape(match rows.packed {
                None => format!("[{batch}, seqlen_q, num_heads_q, {head_dim}]"),
                Some(_) => format!("[total_q, num_heads_q, {head_dim}] of {batch} sequences"),
            }));
        }
        let (num_heads_q, num_heads_kv) = (rows.heads, cache.num_heads_kv);
        if num_heads_q > 0 && (num_heads_kv == 0 || num_heads_q % num_heads_kv != 0) {
            return Err(Error::HeadGroups { num_heads_q, num_heads_kv });
        }
        let total_q = rows.packed.unwrap_or(rows.batch.saturating_mul(rows.tokens));
        // Kernels count queries in 32 bits.
        to_i32("total_q", total_q)?;
        let lists = self.lists.sizes(total_q, [num_heads_q, num_heads_kv])?;
        let problem = IndexAttentionProblem::of(cache, [rows.tokens, num_heads_q], lists);
        let mut problem = problem.with_queries(q.dtype);
        let attention = &mut problem.attention;
        attention.q = rows.strides;
        if let Some(total_q) = rows.packed {
            attention.packed = Some(PackedRows { total_q, total_kv: 0 });
            attention.o = Strides { batch: 0, ..attention.o };
        }
        attention.scores = self.scores.problem(attention)?;
        problem.packed_kv = self.packed_kv.is_some();
        problem.batch_invariant = self.batch_invariant;
        Ok(problem)
    }
}
