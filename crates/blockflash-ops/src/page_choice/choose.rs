use super::SummarySizes;
use crate::attention::Strides;
use crate::attention_decode::AttentionDecodeWorkspace;
use crate::check::{Operand, contiguous, to_i32};
use crate::kv_cache::{KvCache, PackedTokens, token_sizes};
use crate::operation::Operation;
use crate::{Error, Result};
use blockflash_safe::{Device, Stream, View, ViewMut};
use blockflash_sys::DType;

/// Chooses the pages that the queries of each sequence visit, for each head of keys: the lists of
/// [`AttentionDecode::pages`](crate::AttentionDecode::pages).
///
/// ```
/// # use blockflash_ops::{
/// #     AttentionDecode, ChoosePages, DType, Device, KvCache, PageLists, SummarizePages, Tensor,
/// # };
/// # let stream = Device::cpu().stream()?;
/// # let k = Tensor::zeros(&stream, DType::F32, &[64, 16, 2, 8])?;
/// # let block_table =
/// #     Tensor::from_slice(&stream, &(0..64).collect::<Vec<i32>>(), &[1, 64])?;
/// # let cache = KvCache {
/// #     block_table: Some(block_table.view()), ..KvCache::new(k.view(), k.view())
/// # };
/// # let q = Tensor::zeros(&stream, DType::F32, &[1, 1, 4, 8])?;
/// // Once for the prompt, and then with every token.
/// let mut summaries = Tensor::zeros(&stream, DType::F32, &[64, 1, 2, 8])?;
/// SummarizePages { cache, tokens: 1024 }.summarize_into(summaries.view_mut(), &stream)?;
///
/// let mut lists = Tensor::zeros(&stream, DType::I32, &[1, 2, 8])?; // 8 pages of 64
/// let mut counts = Tensor::zeros(&stream, DType::I32, &[1])?;
/// ChoosePages::new(q.view(), cache, summaries.view())
///     .choose_into(lists.view_mut(), counts.view_mut(), &stream)?;
///
/// let pages = Some(PageLists { lists: lists.view(), counts: counts.view() });
/// let decode = AttentionDecode { pages, ..AttentionDecode::new(q.view()) };
/// let output = decode.forward(cache, &stream)?;
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
///
/// The first and the last page of a sequence are always chosen, and then those with the largest
/// scores, of equal scores the first ones, until the list is full. The score of a page for a head
/// of keys is the largest of the scores of all queries of the sequence in all heads that share it:
/// q · mean, or `Σ max(q · minimum, q · maximum)`, which is an upper bound of q·k; in f32. A score
/// that is NaN counts as −∞. Elements of a list beyond the count are 0.
///
/// A GPU takes what it takes for [`AttentionDecode`](crate::AttentionDecode). Sums have another
/// order there, so where scores differ by rounding alone, it may choose another page.
#[derive(Clone, Copy, Debug)]
pub struct ChoosePages<'a> {
    /// Queries, `[batch, seqlen_q, num_heads_q, head_dim]`, or packed
    /// `[total_q, num_heads_q, head_dim]`, turned by their positions if the keys are.
    pub q: View<'a>,
    /// Set when the sequences have unequal numbers of queries.
    pub packed: Option<PackedTokens<'a>>,
    /// The cache, with a block table. Keys and values are not read.
    pub cache: KvCache<'a>,
    /// Written by [`SummarizePages`](super::SummarizePages).
    pub summaries: View<'a>,
    /// Memory for scores, of at least [`workspace_bytes`](Self::workspace_bytes): for example that
    /// of the attention that follows. The same for any number of calls.
    pub workspace: Option<&'a AttentionDecodeWorkspace>,
}

/// A call of [`ChoosePages`] reduced to plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChoosePagesProblem {
    /// The cache and the summaries.
    pub summaries: SummarySizes,
    /// Queries of each sequence; at most this many when packed.
    pub seqlen_q: usize,
    /// Rows of packed queries.
    pub total_q: Option<usize>,
    /// Heads of q.
    pub num_heads_q: usize,
    /// Strides of q.
    pub q: Strides,
    /// Room of a list, at least 2.
    pub capacity: usize,
}

impl<'a> ChoosePages<'a> {
    /// Equally many queries for every sequence, without a workspace.
    pub const fn new(q: View<'a>, cache: KvCache<'a>, summaries: View<'a>) -> Self {
        Self { q, packed: None, cache, summaries, workspace: None }
    }

    /// Bytes of workspace that a call needs on a device; 0 on the CPU. They follow from the
    /// capacity of the cache, not from the lengths.
    ///
    /// # Errors
    /// All checks of [`KvCache::sizes`], and those for the summaries; [`Error::TooLarge`] beyond
    /// the address space.
    pub fn workspace_bytes(&self, device: &Device) -> Result<usize> {
        let summaries = SummarySizes::of(&self.cache, &Operand::new("summaries", &self.summaries))?;
        if device.is_cpu() { Ok(0) } else { workspace_bytes(&summaries) }
    }

    /// Writes the lists, i32 `[batch, num_heads_kv, capacity]` with a capacity of at least 2, and
    /// the counts, i32 `[batch]`. On a GPU nothing is allocated and the stream is not synchronised,
    /// so a graph can capture the call. On the CPU it returns when the result is there.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem); [`Error::DeviceMismatch`] if an operand is not on
    /// the stream's device; on the CPU [`Error::InvalidCuSeqlens`]; on a GPU
    /// [`Error::Unsupported`] for what no kernel takes, [`Error::Misaligned`], and
    /// [`Error::Shape`] for a workspace that is too small.
    pub fn choose_into(
        &self,
        lists: ViewMut<'_>,
        counts: ViewMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        self.run((lists, counts), stream)
    }

    /// Everything that can be checked without reading a tensor, and the result as plain numbers.
    ///
    /// # Errors
    /// All checks of [`KvCache::sizes`]; [`Error::DType`], [`Error::Shape`], [`Error::Stride`] and
    /// [`Error::HeadGroups`] for tensors that do not fit.
    pub fn problem(&self, lists: &ViewMut<'_>, counts: &ViewMut<'_>) -> Result<ChoosePagesProblem> {
        let summaries = SummarySizes::of(&self.cache, &Operand::new("summaries", &self.summaries))?;
        let (cache, q) = (summaries.cache, Operand::new("q", &self.q));
        q.dtype_in(&[cache.dtype])?;
        let rows = token_sizes(&q, self.packed.as_ref())?;
        if [rows.batch, rows.head_dim] != [cache.batch, cache.head_dims.qk] {
            let (batch, head_dim) = (cache.batch, cache.head_dims.qk);
            return Err(q.wrong_shape(match rows.packed {
                None => format!("[{batch}, seqlen_q, num_heads_q, {head_dim}]"),
                Some(_) => format!("[total_q, num_heads_q, {head_dim}] of {batch} sequences"),
            }));
        }
        let (num_heads_q, num_heads_kv) = (rows.heads, cache.num_heads_kv);
        if num_heads_kv == 0 || num_heads_q % num_heads_kv != 0 {
            return Err(Error::HeadGroups { num_heads_q, num_heads_kv });
        }
        let operand = Operand::of_mut("lists", lists);
        let &[_, _, capacity @ 2..=usize::MAX] = operand.shape else {
            return Err(operand.wrong_shape("[batch, num_heads_kv, at least 2]"));
        };
        to_i32("lists", capacity)?;
        let shape = [cache.batch, num_heads_kv, capacity];
        contiguous("lists", &lists.as_view(), DType::I32, &shape)?;
        contiguous("counts", &counts.as_view(), DType::I32, &[cache.batch])?;
        let (seqlen_q, total_q, q) = (rows.tokens, rows.packed, rows.strides);
        Ok(ChoosePagesProblem { summaries, seqlen_q, total_q, num_heads_q, q, capacity })
    }
}

/// See [`ChoosePages::workspace_bytes`].
pub(super) fn workspace_bytes(summaries: &SummarySizes) -> Result<usize> {
    let bytes = summaries.room().and_then(|[sums, words]| {
        AttentionDecodeWorkspace::bytes_for(sums, words).filter(|&b| isize::try_from(b).is_ok())
    });
    let limit = isize::MAX as usize;
    bytes.ok_or(Error::TooLarge { what: "workspace", value: usize::MAX, limit })
}
