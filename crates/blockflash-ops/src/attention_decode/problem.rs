use super::{AttentionDecode, PageListSizes, TailMaskSizes};
use crate::attention::{AttentionProblem, PackedRows, Strides, check_strides, check_strides_by};
use crate::check::Operand;
use crate::kv_append::AppendKvProblem;
use crate::kv_cache::{CacheSizes, KvCache, RotarySizes, token_sizes};
use crate::{Error, Result};
use blockflash_sys::{DType, ElementTypes};
use std::ops::RangeInclusive;

/// A call of attention to a cache reduced to plain numbers: what `select` and
/// `plan` work on.
///
/// [`AttentionDecode::problem`] makes one from tensors, with all checks;
/// [`AttentionDecodeProblem::of`] makes one without tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionDecodeProblem {
    /// Queries, outputs and options. `seqlen_kv` is the capacity, and `k` and `v` have the strides
    /// of the cache, from page to page in place of the batch.
    pub attention: AttentionProblem,
    /// The cache.
    pub cache: CacheSizes,
    /// Set when queries are turned by their positions.
    pub rotary: Option<RotarySizes>,
    /// Set when only listed pages are visited.
    pub pages: Option<PageListSizes>,
    /// Set when queries see the last keys by a mask of their own.
    pub tail_mask: Option<TailMaskSizes>,
    /// Set when the call appends first.
    pub append: Option<AppendKvProblem>,
    /// Whether the bits of a sequence depend on no other sequence.
    pub batch_invariant: bool,
}

impl AttentionDecodeProblem {
    /// Attention of `seqlen_q` queries of each sequence to a cache without any option: the start of
    /// a plan without tensors. Not checked.
    pub fn of(cache: CacheSizes, seqlen_q: usize, num_heads_q: usize) -> Self {
        let CacheSizes { dtype, batch, capacity, num_heads_kv, head_dims, .. } = cache;
        let sizes = [batch, seqlen_q, capacity];
        let (types, heads) = (ElementTypes::all(dtype), [num_heads_q, num_heads_kv]);
        let dense = AttentionProblem::contiguous(types, sizes, heads, head_dims);
        let attention = AttentionProblem { k: cache.k, v: cache.v, ..dense };
        Self {
            attention,
            cache,
            rotary: None,
            pages: None,
            tail_mask: None,
            append: None,
            batch_invariant: false,
        }
    }

    /// The name of the first thing that is added to scores, or hides keys beyond the ordinary mask,
    /// if there is one.
    pub fn terms(&self) -> Option<&'static str> {
        self.attention.scores.added().or(self.tail_mask.map(|_| "tail_mask"))
    }

    /// The same with queries and an output of this type, which need not be that of the cache if
    /// that holds codes.
    pub fn with_queries(mut self, dtype: DType) -> Self {
        self.attention.types = ElementTypes { q: dtype, o: dtype, ..self.attention.types };
        self
    }

    /// Checks the strides of queries, those of outputs and of the cache.
    pub(super) fn check_strides(&self, q: Strides) -> Result<()> {
        let (attention, cache) = (&self.attention, &self.cache);
        let queries = [attention.batch, attention.seqlen_q, attention.num_heads_q];
        let keys = [cache.pages, cache.page_size, cache.num_heads_kv];
        check_strides(&[("q", q, queries), ("o", attention.o, queries)])?;
        let of_chunk = 16 / cache.dtype.size();
        check_strides_by(of_chunk, &[("cache.k", cache.k, keys), ("cache.v", cache.v, keys)])
    }

    /// Whether there is no output element to compute and nothing to append.
    pub fn is_empty(&self) -> bool {
        self.attention.is_empty() && self.append.is_none_or(|append| append.is_empty())
    }
}

/// Room for keys of a sequence where splits of all sequences are even. Shorter sequences would only
/// have more items (`benches/results/nvidia-h200/kv_cache.md`), and kernels add in 32 bits. Items
/// of latent rows end so slowly that no sequence is too short.
const KEYS_OF_EVEN: RangeInclusive<usize> = 2048..=1 << 28;

impl AttentionDecodeProblem {
    /// Whether splits follow from the batch as well as from the sequence, so that they fill the
    /// GPU. The host has to know the lengths.
    pub(super) fn splits_by_batch(&self) -> bool {
        !self.batch_invariant && self.keys_of_each().is_some()
    }

    /// Whether the kernel is the one that is estimated to be the fastest: also where lengths are on
    /// the device, as if all sequences filled the cache.
    pub(super) fn is_estimated(&self) -> bool {
        let attention = &self.attention;
        let given = self.cache.seqused_kv && attention.packed.is_none() && self.pages.is_none();
        self.splits_by_batch() || given && !self.batch_invariant
    }

    /// Whether a kernel that can divides the keys of all sequences evenly among CTAs, since their
    /// lengths are on the device.
    pub(super) fn splits_evenly(&self) -> bool {
        let shortest = if self.is_latent() { 1 } else { *KEYS_OF_EVEN.start() };
        let keys = shortest..=*KEYS_OF_EVEN.end();
        let given = self.cache.seqused_kv && keys.contains(&self.attention.seqlen_kv);
        given && !self.batch_invariant && self.attention.packed.is_none() && self.pages.is_none()
    }

    /// Whether the values are the first columns of keys that are too long for other kernels than
    /// those for latent rows.
    pub(super) fn is_latent(&self) -> bool {
        self.cache.has_latent_rows()
    }

    /// Queries of a sequence times the heads that share a head of keys.
    pub(super) fn group_rows(&self) -> usize {
        self.rows_of(self.attention.seqlen_q)
    }

    pub(super) fn rows_of(&self, queries: usize) -> usize {
        let attention = &self.attention;
        queries.saturating_mul(attention.num_heads_q / attention.num_heads_kv.max(1))
    }
}

impl AttentionDecode<'_> {
    /// Everything that can be checked without reading a tensor, and the result as plain numbers:
    /// for a contiguous `o`, no `lse` and a cache that is only read.
    ///
    /// # Errors
    /// All checks of [`KvCache::sizes`]; [`Error::DType`], [`Error::Shape`], [`Error::Stride`],
    /// [`Error::HeadGroups`], [`Error::InvalidScale`] and [`Error::TooLarge`].
    pub fn problem(&self, cache: &KvCache<'_>) -> Result<AttentionDecodeProblem> {
        let cache = cache.sizes()?;
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
        let mut problem =
            AttentionDecodeProblem::of(cache, rows.tokens, num_heads_q).with_queries(q.dtype);
        let attention = &mut problem.attention;
        attention.q = rows.strides;
        if let Some(total_q) = rows.packed {
            attention.packed = Some(PackedRows { total_q, total_kv: 0 });
            attention.o = Strides { batch: 0, ..attention.o };
        }
        attention.scores = self.scores.problem(attention)?;
        let rotary = self.rotary.as_ref();
        if cache.shared && cache.head_dims.qk > cache.head_dims.v {
            self.not_turned()?;
        }
        let rotary = rotary.map(|r| r.sizes(q.dtype, cache.head_dims.qk, cache.capacity));
        problem.rotary = rotary.transpose()?;
        problem.pages = self.pages.as_ref().map(|pages| pages.sizes(&cache)).transpose()?;
        let tail_mask = self.tail_mask.as_ref().map(|mask| TailMaskSizes::of(mask, &problem));
        problem.tail_mask = tail_mask.transpose()?;
        problem.batch_invariant = self.batch_invariant;
        Ok(problem)
    }

    /// Refuses to turn the queries of a latent cache, of which other columns than the first turn.
    pub(super) fn not_turned(&self) -> Result<()> {
        let Some(rotary) = &self.rotary else { return Ok(()) };
        let cos = Operand::new("rotary.cos", &rotary.cos);
        Err(cos.wrong_shape("none: the queries of a latent cache come turned"))
    }
}
