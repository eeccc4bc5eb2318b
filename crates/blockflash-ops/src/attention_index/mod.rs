//! Attention of queries to the blocks of keys that a list names for each of them.

pub mod backward;
mod cpu;
mod division;
mod latent;
mod lists;
mod plan;
mod problem;
mod select;
mod steps;
mod support;
mod tile;
mod united;

pub use backward::{
    IndexAttentionBackward, IndexAttentionBackwardPlan, IndexAttentionBackwardProblem,
    PreparedIndexAttentionBackward,
};
pub use lists::{IndexListSizes, IndexLists};
pub use plan::{IndexAttentionPlan, plan};
pub use problem::IndexAttentionProblem;
pub use select::{accepts, select};
pub use tile::{IndexTile, LatentIndexTile, LatentScheme, tile};

pub(crate) use support::support;

use crate::Result;
use crate::attention::{AttentionOutput, Mask, Scores};
use crate::attention_decode::AttentionDecodeWorkspace;
use crate::kv_cache::{KvCache, PackedTokens};
use crate::operation::{Operation, Prepared};
use blockflash_safe::{Device, Stream, Tensor, View, ViewMut};
use blockflash_sys::DType;

/// Attention of queries to the keys and values in a cache, where each query has a list of the
/// blocks of keys that it attends: what sparse attention with an indexer, a router or a top-k
/// computes.
///
/// ```
/// # use blockflash_ops::{
/// #     DType, Device, IndexAttention, IndexLists, KvCache, Mask, Tensor,
/// # };
/// # let stream = Device::cpu().stream()?;
/// // 40 pages of 64 slots with 2 heads; two sequences of 300 and 70 keys.
/// let k = Tensor::zeros(&stream, DType::BF16, &[40, 64, 2, 128])?;
/// let v = Tensor::zeros(&stream, DType::BF16, &[40, 64, 2, 128])?;
/// let block_table = Tensor::from_slice(&stream, &[7, 3, 9, 0, 5, 8, 2, 0, 0, 0], &[2, 5])?;
/// let seqused_kv = Tensor::from_slice(&stream, &[300, 70], &[2])?;
/// let cache = KvCache {
///     block_table: Some(block_table.view()),
///     seqused_kv: Some(seqused_kv.view()),
///     ..KvCache::new(k.view(), v.view())
/// };
/// // A query of each sequence in 8 heads. Heads that share keys share a list of at most 3 blocks
/// // of 16 tokens; −1 fills what is left.
/// let q = Tensor::zeros(&stream, DType::BF16, &[2, 1, 8, 128])?;
/// let entries = [0, 11, 18, 0, 4, -1, 0, 17, 18, 0, 3, 4];
/// let entries = Tensor::from_slice(&stream, &entries, &[2, 2, 3])?;
/// let lists = IndexLists { entries: entries.view(), granularity: 16 };
///
/// let attention =
///     IndexAttention { scores: Mask::causal().into(), ..IndexAttention::new(q.view(), lists) };
/// let output = attention.forward(cache, &stream)?;
/// assert_eq!((output.o.shape(), output.lse.shape()), (&[2, 1, 8, 128][..], &[2, 8, 1][..]));
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
///
/// Query `i` of `n` of a sequence with `length` keys stands at key `length - n + i` under a mask
/// that is aligned bottom-right, and sees a key if its list names the key's block and the mask of
/// the scores shows it: causal masks and windows cut inside of blocks. What
/// [`Attention`](crate::Attention) promises about NaN, about queries that see nothing and about
/// precision holds here, whatever the lists hold: see [`IndexLists`].
///
/// The cache is that of [`AttentionDecode`](crate::AttentionDecode): contiguous or in pages, with
/// lengths on the device, also one whose values are columns of its keys ([`KvCache::latent`]). With
/// [`packed_kv`](Self::packed_kv) keys are packed instead, for training and for prompts without a
/// cache. Lists, lengths, offsets and tables are read on the device at each launch, so a captured
/// graph follows them.
///
/// Results have the same bits in every run. With [`batch_invariant`](Self::batch_invariant) those
/// of a query depend on no other query, nor on how many there are.
///
/// A GPU takes f16 and bf16 with a `head_dim` of any multiple of 8 up to 256, latent rows of 576
/// with values in the first 512, granularities of 1, 4, 16, 64 and 128 tokens, pages of a multiple
/// of 16 slots, and pointers and strides of multiples of 16 bytes. The CPU takes every problem.
#[derive(Clone, Copy, Debug)]
pub struct IndexAttention<'a> {
    /// Queries, `[batch, seqlen_q, num_heads_q, head_dim]`, or packed
    /// `[total_q, num_heads_q, head_dim]`, in the element type of the cache; beside codes in f16,
    /// bf16 or f32.
    pub q: View<'a>,
    /// Set when the sequences have unequal numbers of queries.
    pub packed: Option<PackedTokens<'a>>,
    /// Which blocks of keys each query attends.
    pub lists: IndexLists<'a>,
    /// Set when keys are packed, one sequence after another: k and v of the cache are then
    /// `[1, total_kv, num_heads_kv, head_dim]`, without a block table and without lengths.
    pub packed_kv: Option<PackedTokens<'a>>,
    /// What happens to a score.
    pub scores: Scores<View<'a>>,
    /// Makes the bits of a query depend on no other query, nor on their number: lists are divided
    /// by their capacity alone. Otherwise they are divided so that all queries together fill the
    /// GPU.
    pub batch_invariant: bool,
    /// Memory for the results of parts of lists, of at least
    /// [`workspace_bytes`](Self::workspace_bytes). The same for any number of calls.
    pub workspace: Option<&'a AttentionDecodeWorkspace>,
}

/// What a call of [`IndexAttention`] works with besides the queries and their lists.
#[derive(Debug)]
pub struct IndexAttentionOperands<'o> {
    /// The cache.
    pub cache: KvCache<'o>,
    /// The output, in the shape of q with the `head_dim` of v, in the element type of q.
    pub o: ViewMut<'o>,
    /// The log-sum-exp, f32 `[batch, num_heads_q, seqlen_q]`, or `[num_heads_q, total_q]`.
    pub lse: Option<ViewMut<'o>>,
}

/// See [`Operation::prepare`].
pub type PreparedIndexAttention = Prepared<IndexAttentionProblem>;

impl<'a> IndexAttention<'a> {
    /// No mask but the lists, with the default scale and equally many queries for every sequence.
    pub const fn new(q: View<'a>, lists: IndexLists<'a>) -> Self {
        Self {
            q,
            packed: None,
            lists,
            packed_kv: None,
            scores: Scores::of(Mask::Full),
            batch_invariant: false,
            workspace: None,
        }
    }

    /// Computes into the caller's tensors. On a GPU nothing is allocated and the stream is not
    /// synchronised, so a graph can capture the call, and its replays follow lists and lengths. On
    /// the CPU it returns when the result is there. Packed rows before the first sequence and
    /// behind the last one become 0.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem) and `select`; [`Shape`](crate::Error::Shape) for
    /// outputs that do not fit and for a workspace that is too small;
    /// [`DeviceMismatch`](crate::Error::DeviceMismatch) if an operand is not on the stream's
    /// device; on the CPU [`InvalidCuSeqlens`](crate::Error::InvalidCuSeqlens).
    pub fn forward_into(
        &self,
        operands: IndexAttentionOperands<'_>,
        stream: &Stream,
    ) -> Result<()> {
        self.run(operands, stream)
    }

    /// Allocates the outputs, and a workspace if there is none, and computes.
    ///
    /// # Errors
    /// As [`forward_into`](Self::forward_into), and out of memory.
    pub fn forward(&self, cache: KvCache<'_>, stream: &Stream) -> Result<AttentionOutput> {
        let problem = self.problem(&cache)?;
        let attention = &problem.attention;
        let mut o = Tensor::zeros(stream, attention.types.o, &attention.o_shape())?;
        let mut lse = Tensor::zeros(stream, DType::F32, &attention.lse_shape())?;
        let own = match (self.workspace, problem.workspace_bytes(stream.device())?) {
            (None, bytes @ 1..) => Some(AttentionDecodeWorkspace::new(stream, bytes)?),
            _ => None,
        };
        let workspace = self.workspace.or(own.as_ref());
        let call = IndexAttention { workspace, ..*self };
        let operands = IndexAttentionOperands { cache, o: o.view_mut(), lse: Some(lse.view_mut()) };
        call.forward_into(operands, stream)?;
        Ok(AttentionOutput { o, lse })
    }

    /// Bytes of workspace that a call needs on a device; 0 on the CPU. They follow from the sizes
    /// of q and of the lists, not from what is in them.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem) and `select`.
    pub fn workspace_bytes(&self, cache: &KvCache<'_>, device: &Device) -> Result<usize> {
        self.problem(cache)?.workspace_bytes(device)
    }
}

#[cfg(test)]
mod select_tests;
#[cfg(test)]
mod tests;
