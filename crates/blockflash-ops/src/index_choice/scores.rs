use super::{IndexRows, TopK};
use crate::attention::{Mask, Strides};
use crate::check::{Operand, finite_positive};
use crate::kv_cache::{CacheSizes, FLOATS, KvCache, PackedTokens, packed_keys, token_sizes};
use crate::operation::Operation;
use crate::{Error, Result};
use blockflash_safe::{Stream, Tensor, View, ViewMut};
use blockflash_sys::DType;

/// How the scores of the keys of a block become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BlockReduction {
    /// The largest one.
    #[default]
    Max,
    /// Their mean. Keys that the query does not see do not count.
    Mean,
}

/// Scores every block of keys for each query, by heads of their own that are fewer or narrower than
/// those of attention: what an indexer of sparse attention computes. [`TopK`] chooses by them.
///
/// ```
/// # use blockflash_ops::{
/// #     DType, Device, IndexAttention, IndexLists, IndexScores, KvCache, Mask, Tensor,
/// # };
/// # let stream = Device::cpu().stream()?;
/// // 512 keys of one sequence, and 3 queries at their end in 4 heads of an index.
/// let keys = Tensor::zeros(&stream, DType::BF16, &[1, 512, 1, 128])?;
/// let q_index = Tensor::zeros(&stream, DType::BF16, &[1, 3, 4, 128])?;
/// let cache = KvCache::new(keys.view(), keys.view()); // values are not read
///
/// let scores =
///     IndexScores { mask: Mask::causal(), ..IndexScores::new(q_index.view(), cache, 16) };
/// let of_blocks = scores.compute(1, &stream)?; // all heads are one group
/// assert_eq!(of_blocks.shape(), [1, 3, 32]);
/// let lists = scores.top_k(of_blocks.view())?.choose(8, &stream)?;
/// assert_eq!(lists.shape(), [1, 3, 8]);
///
/// # let q = Tensor::zeros(&stream, DType::BF16, &[1, 3, 2, 64])?;
/// # let kv = Tensor::zeros(&stream, DType::BF16, &[1, 512, 1, 64])?;
/// let lists = IndexLists { entries: lists.view(), granularity: 16 };
/// let cache = KvCache::new(kv.view(), kv.view());
/// let call =
///     IndexAttention { scores: Mask::causal().into(), ..IndexAttention::new(q.view(), lists) };
/// let output = call.forward(cache, &stream)?;
/// # assert_eq!(output.o.shape(), q.shape());
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
///
/// The score of block `b` for row `t` and a group of heads is the maximum or the mean, over the
/// keys `j` in `b * granularity .. (b + 1) * granularity` that the query sees, of
///
/// ```text
/// Σ over heads h of the group:  weights[t, h] · activation(scale · q[t, h]·k[j])
/// ```
///
/// in f32, where the activation is that of [`relu`](Self::relu), and −∞ for a block without a key
/// that the query sees. A NaN among what is summed makes the score NaN, also the largest one of a
/// block. Scores have the same bits in every run, and those of a query depend on no other one.
///
/// Query `i` of `n` of a sequence with `length` keys stands at key `length - n + i` under a mask
/// that is aligned bottom-right. Lengths, offsets and tables are read on the device at each launch,
/// so a captured graph follows them; the output has a column for every block of the capacity.
///
/// A GPU takes f16 and bf16 with a `head_dim` of any multiple of 8 up to 256, granularities of 1,
/// 4, 16, 64 and 128 tokens, masks that are aligned bottom-right, pages of a multiple of 16 slots,
/// and pointers and strides of multiples of 16 bytes. The CPU takes every problem.
#[derive(Clone, Copy, Debug)]
pub struct IndexScores<'a> {
    /// Queries, `[batch, seqlen_q, num_heads, head_dim]`, or packed
    /// `[total_q, num_heads, head_dim]`, in the element type of the keys.
    pub q: View<'a>,
    /// Set when the sequences have unequal numbers of queries.
    pub packed: Option<PackedTokens<'a>>,
    /// The keys, in one or more heads. Values are not read: they may be the keys.
    pub cache: KvCache<'a>,
    /// Set when keys are packed, one sequence after another: k of the cache is then
    /// `[1, total_kv, num_heads_kv, head_dim]`, without a block table and without lengths.
    pub packed_kv: Option<PackedTokens<'a>>,
    /// f32 `[rows, num_heads]` with any strides, where rows are `total_q`, or
    /// `batch * seqlen_q`, sequence by sequence; `None` is 1.
    pub weights: Option<View<'a>>,
    /// Which keys a query sees.
    pub mask: Mask,
    /// Tokens of a block, at least 1. Pages need not be blocks.
    pub granularity: usize,
    /// How the scores of the keys of a block become one.
    pub reduction: BlockReduction,
    /// Whether scaled products below 0 become 0.
    pub relu: bool,
    /// What products are multiplied with; finite and positive.
    pub scale: f32,
    /// Allows the scores of blocks that a query does not see to stay as they are, in place of −∞,
    /// which saves time for [`TopK`] of the same queries, which does not read them.
    pub leaves_hidden: bool,
}

/// A call of [`IndexScores`] reduced to plain numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexScoresProblem {
    /// Queries and what they see.
    pub rows: IndexRows,
    /// The keys. Packed ones are one page for all sequences.
    pub cache: CacheSizes,
    /// Heads of q.
    pub num_heads: usize,
    /// Groups of heads, each of which has a score.
    pub groups: usize,
    /// Strides of q.
    pub q: Strides,
    /// Strides of the weights, from row to row and from head to head, if there are any.
    pub weights: Option<[usize; 2]>,
    /// Strides of the scores, from group to group and from row to row.
    pub scores: [usize; 2],
    /// How the scores of the keys of a block become one.
    pub reduction: BlockReduction,
    /// Whether scaled products below 0 become 0.
    pub relu: bool,
    /// What products are multiplied with.
    pub scale: f32,
    /// Whether blocks that a query does not see need no score.
    pub leaves_hidden: bool,
}

impl<'a> IndexScores<'a> {
    /// The largest product of each block, of equally many queries for every sequence that see all
    /// keys.
    pub const fn new(q: View<'a>, cache: KvCache<'a>, granularity: usize) -> Self {
        Self {
            q,
            packed: None,
            cache,
            packed_kv: None,
            weights: None,
            mask: Mask::Full,
            granularity,
            reduction: BlockReduction::Max,
            relu: false,
            scale: 1.0,
            leaves_hidden: false,
        }
    }

    /// Writes the scores, f32 `[groups, rows, blocks]` with contiguous rows of blocks and any other
    /// strides: groups are neighbouring heads, as many in each and of one head of keys each; blocks
    /// are those of the capacity. On a GPU nothing is allocated and the stream is not synchronised,
    /// so a graph can capture the call. On the CPU it returns when the result is there.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem); [`Error::DeviceMismatch`] if an operand is not on
    /// the stream's device; on the CPU [`Error::InvalidCuSeqlens`]; on a GPU
    /// [`Error::Unsupported`] for what no kernel takes, and [`Error::Misaligned`].
    pub fn compute_into(&self, scores: ViewMut<'_>, stream: &Stream) -> Result<()> {
        self.run(scores, stream)
    }

    /// Allocates the scores of this many groups of heads and computes them.
    ///
    /// # Errors
    /// As [`compute_into`](Self::compute_into), and out of memory.
    pub fn compute(&self, groups: usize, stream: &Stream) -> Result<Tensor> {
        let shape = self.shape(groups)?;
        let mut scores = Tensor::zeros(stream, DType::F32, &shape)?;
        // Nothing hidden is left of memory that is new.
        Self { leaves_hidden: false, ..*self }.compute_into(scores.view_mut(), stream)?;
        Ok(scores)
    }

    /// The shape of the scores of this many groups of heads, `[groups, rows, blocks]`.
    ///
    /// # Errors
    /// As [`problem`](Self::problem), and [`Error::Number`] for a number of groups that heads
    /// cannot be divided into.
    pub fn shape(&self, groups: usize) -> Result<[usize; 3]> {
        let (rows, [num_heads, num_heads_kv]) = (self.rows()?, self.heads()?);
        let fits = num_heads.is_multiple_of(groups) && groups.is_multiple_of(num_heads_kv);
        if groups == 0 || !fits {
            let expected = format!("a multiple of {num_heads_kv} that divides {num_heads} heads");
            return Err(Error::Number { what: "groups", value: groups, expected });
        }
        Ok([groups, rows.rows(), rows.blocks()])
    }

    /// Heads of queries and of keys.
    fn heads(&self) -> Result<[usize; 2]> {
        let q = token_sizes(&Operand::new("q", &self.q), self.packed.as_ref())?;
        let (num_heads_q, num_heads_kv) = (q.heads, self.cache()?.num_heads_kv);
        if num_heads_q == 0 || num_heads_kv == 0 || num_heads_q % num_heads_kv != 0 {
            return Err(Error::HeadGroups { num_heads_q, num_heads_kv });
        }
        Ok([num_heads_q, num_heads_kv])
    }

    /// The choice among scores of the same queries, by the same mask.
    ///
    /// # Errors
    /// As [`problem`](Self::problem).
    pub fn top_k<'s>(&self, scores: View<'s>) -> Result<TopK<'s>>
    where
        'a: 's,
    {
        let IndexRows { batch, capacity, .. } = self.rows()?;
        Ok(TopK {
            batch,
            packed: self.packed,
            capacity,
            packed_kv: self.packed_kv,
            seqused_kv: self.cache.seqused_kv,
            mask: self.mask,
            ..TopK::new(scores, self.granularity)
        })
    }

    /// The sizes of the keys.
    fn cache(&self) -> Result<CacheSizes> {
        let sizes = self.cache.sizes()?;
        Operand::new("cache.k", &self.cache.k).dtype_in(&FLOATS)?;
        match &self.packed_kv {
            None => Ok(sizes),
            Some(packed) => packed_keys(&self.cache, sizes, packed),
        }
    }

    /// The queries and what they see.
    fn rows(&self) -> Result<IndexRows> {
        let (cache, q) = (self.cache()?, Operand::new("q", &self.q));
        q.dtype_in(&[cache.dtype])?;
        let rows = token_sizes(&q, self.packed.as_ref())?;
        if [rows.batch, rows.head_dim] != [cache.batch, cache.head_dims.qk] {
            let (batch, head_dim) = (cache.batch, cache.head_dims.qk);
            return Err(q.wrong_shape(match rows.packed {
                None => format!("[{batch}, seqlen_q, num_heads, {head_dim}]"),
                Some(_) => format!("[total_q, num_heads, {head_dim}] of {batch} sequences"),
            }));
        }
        let sizes = IndexRows {
            batch: cache.batch,
            seqlen_q: rows.tokens,
            total_q: rows.packed,
            capacity: cache.capacity,
            packed_kv: self.packed_kv.is_some(),
            seqused_kv: cache.seqused_kv,
            mask: self.mask,
            granularity: self.granularity,
        };
        sizes.checked()
    }

    /// Everything that can be checked without reading a tensor, and the result as plain numbers.
    ///
    /// # Errors
    /// All checks of [`KvCache::sizes`]; [`Error::DType`], [`Error::Shape`], [`Error::Stride`],
    /// [`Error::HeadGroups`], [`Error::InvalidScale`], [`Error::MaxSeqlen`] and
    /// [`Error::TooLarge`].
    pub fn problem(&self, scores: &ViewMut<'_>) -> Result<IndexScoresProblem> {
        let (rows, cache) = (self.rows()?, self.cache()?);
        let q = token_sizes(&Operand::new("q", &self.q), self.packed.as_ref())?;
        let [num_heads, num_heads_kv] = self.heads()?;
        let operand = Operand::of_mut("scores", scores);
        operand.dtype_in(&[DType::F32])?;
        let (count, blocks) = (rows.rows(), rows.blocks());
        let groups = match *operand.shape {
            [groups @ 1..=usize::MAX, r, b]
                if [r, b] == [count, blocks]
                    && num_heads % groups == 0
                    && groups % num_heads_kv == 0 =>
            {
                groups
            }
            _ => {
                return Err(operand.wrong_shape(format!(
                    "[groups, {count}, {blocks}] with a multiple of {num_heads_kv} groups that \
                     divides {num_heads} heads"
                )));
            }
        };
        operand.last_dim_contiguous()?;
        let weights = self.weights.as_ref().map(|view| -> Result<_> {
            let weights = Operand::new("weights", view);
            weights.dtype_in(&[DType::F32])?;
            weights.shape_is(&[count, num_heads])?;
            Ok([weights.strides[0], weights.strides[1]])
        });
        Ok(IndexScoresProblem {
            rows,
            cache,
            num_heads,
            groups,
            q: q.strides,
            weights: weights.transpose()?,
            scores: [operand.strides[0], operand.strides[1]],
            reduction: self.reduction,
            relu: self.relu,
            scale: finite_positive("scale", self.scale)?,
            leaves_hidden: self.leaves_hidden,
        })
    }
}

impl IndexScoresProblem {
    /// Whether there is no score.
    pub fn is_empty(&self) -> bool {
        self.rows.rows() == 0 || self.rows.blocks() == 0
    }
}
