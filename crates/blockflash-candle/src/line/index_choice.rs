//! Scores of blocks of keys for each query, and the choice of the largest.

use super::Mask;
use super::candle_core::{Result, Tensor, bail};
use super::error::refused;
use super::held::Writing;
use super::memory::{Operand, Place, tensor};
use super::sequences::Sequences;
use blockflash_ops::{BlockReduction, DType, TopK};

/// Scores of blocks of keys for each query, by an index beside q and k: what
/// [`IndexAttention`](super::IndexAttention), which has an example, takes its lists from.
///
/// The score of a block for a query and a group of heads is the largest, or the mean, over the keys
/// of the block that the query sees, of `Σ weights · activation(scale · q·k)` over the heads of the
/// group, in f32. The activation is none, or ReLU. Blocks that a query does not see have −∞.
///
/// A GPU takes f16 and bf16, a `head_dim` of a multiple of 8 up to 256, and granularities of 1, 4,
/// 16, 64 and 128 tokens. The CPU takes f32, too, and any of these.
#[derive(Clone, Copy, Debug)]
pub struct IndexScores<'a> {
    /// Queries of the index, `[batch, seqlen_q, num_heads, head_dim]` or packed.
    pub q: &'a Tensor,
    /// Its keys, in one or more heads, `[batch, capacity, num_heads_kv, head_dim]`, in pages or
    /// packed.
    pub k: &'a Tensor,
    /// Tokens of a block.
    pub granularity: usize,
    /// Which queries and keys the sequences have.
    pub sequences: Sequences<&'a Tensor>,
    /// f32 `[rows, num_heads]`, where rows are the packed queries, or those of all sequences in
    /// their order; `None` is 1.
    pub weights: Option<&'a Tensor>,
    /// Which keys a query sees.
    pub mask: Mask,
    /// How the scores of the keys of a block become one.
    pub reduction: BlockReduction,
    /// Whether scaled products below 0 become 0.
    pub relu: bool,
    /// What products are multiplied with; finite and positive.
    pub scale: f32,
}

/// How many blocks each query gets, and which of them whatever their scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexTopK {
    /// Room of a list: on a GPU up to 2048.
    pub count: usize,
    /// Blocks at the start of a sequence that are always chosen.
    pub first: usize,
    /// Blocks up to that of the last key that the query sees that are always chosen.
    pub last: usize,
}

impl IndexTopK {
    /// The largest scores alone.
    pub const fn new(count: usize) -> Self {
        Self { count, first: 0, last: 0 }
    }
}

impl<'a> IndexScores<'a> {
    /// The largest product of each block, of full sequences without a mask.
    pub fn new(q: &'a Tensor, k: &'a Tensor, granularity: usize) -> Self {
        Self {
            q,
            k,
            granularity,
            sequences: Sequences::default(),
            weights: None,
            mask: Mask::Full,
            reduction: BlockReduction::Max,
            relu: false,
            scale: 1.0,
        }
    }

    /// The scores of this many groups of neighbouring heads, f32 `[groups, rows, blocks]`.
    ///
    /// # Errors
    /// Those of [`blockflash_ops::IndexScores::compute`], as text; a tensor that needs a gradient.
    pub fn compute(&self, groups: usize) -> Result<Tensor> {
        self.with_call(|place, call| {
            let shape = call.shape(groups).map_err(refused)?;
            let mut scores = place.allocate(DType::F32, &shape, false)?;
            {
                let mut scores = place.write(&mut scores, &shape)?;
                place.run(|stream| call.compute_into(scores.view.reborrow(), stream))?;
            }
            Ok(tensor(scores, &shape))
        })
    }

    /// The blocks with the largest scores for each group of heads and each query, u32
    /// `[groups, rows, count]`, ascending, filled with −1, which is 2³² − 1 there. Of equal scores
    /// the lower block is taken, so the result is the same on every device.
    ///
    /// # Errors
    /// As [`compute`](Self::compute), and those of [`blockflash_ops::TopK::choose`].
    pub fn top_k(&self, groups: usize, choice: IndexTopK) -> Result<Tensor> {
        let IndexTopK { count, first, last } = choice;
        self.with_call(|place, call| {
            let scores_shape = call.shape(groups).map_err(refused)?;
            if count == 0 {
                bail!("count is 0, expected at least 1");
            }
            let shape = [groups, scores_shape[1], count];
            let mut scores = place.allocate(DType::F32, &scores_shape, false)?;
            let mut chosen = place.allocate(DType::I32, &shape, false)?;
            {
                let mut scores: Writing<'_> = place.write(&mut scores, &scores_shape)?;
                let mut chosen = place.write(&mut chosen, &shape)?;
                let call = blockflash_ops::IndexScores { leaves_hidden: true, ..call };
                place.run(|stream| call.compute_into(scores.view.reborrow(), stream))?;
                let top_k = call.top_k(scores.view.as_view()).map_err(refused)?;
                let top_k = TopK { first, last, ..top_k };
                let bytes = top_k.workspace_bytes(count, &place.device()).map_err(refused)?;
                place.run_with_workspace(bytes, |stream, workspace| {
                    TopK { workspace, ..top_k }.choose_into(chosen.view.reborrow(), stream)
                })?;
            }
            Ok(tensor(chosen, &shape))
        })
    }

    fn with_call<R>(
        &self,
        work: impl FnOnce(&Place, blockflash_ops::IndexScores<'_>) -> Result<R>,
    ) -> Result<R> {
        let Self { granularity, sequences, mask, reduction, relu, scale, .. } = *self;
        if [self.q, self.k].into_iter().chain(self.weights).any(Tensor::track_op) {
            bail!("scores of blocks have no gradient: detach their tensors");
        }
        sequences.check(self.k)?;
        let k = sequences.pages(self.k)?;
        let place = Place::of(self.q.device())?;
        let rows = [self.q, &k].map(Tensor::storage_and_layout);
        let q = place.read(&Operand::of("q", &rows[0])?)?;
        let k = place.read(&Operand::of("k", &rows[1])?)?;
        let locked = self.weights.map(Tensor::storage_and_layout);
        let weights = locked.as_ref().map(|of| place.read(&Operand::of("weights", of)?));
        let weights = weights.transpose()?;
        sequences.with_views(&place, |sequences| {
            let [packed, packed_kv] = sequences.packed();
            let cache = sequences.cache(k.view, k.view);
            work(
                &place,
                blockflash_ops::IndexScores {
                    packed,
                    packed_kv,
                    weights: weights.as_ref().map(|weights| weights.view),
                    mask,
                    reduction,
                    relu,
                    scale,
                    ..blockflash_ops::IndexScores::new(q.view, cache, granularity)
                },
            )
        })
    }
}
