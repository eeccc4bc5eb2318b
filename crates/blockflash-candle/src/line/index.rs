//! Attention of each query to the blocks of keys that a list names for it.

use super::candle_core::{Result, Tensor, bail};
use super::error::refused;
use super::memory::{Operand, Place, dtype_of, tensor};
use super::options::read_scores;
use super::paged::{read_scales, with_width_of};
use super::sequences::Sequences;
use super::{Mask, Scores};
use blockflash_ops::{DType, IndexAttentionOperands, IndexLists, KvCache};

/// Attention of each query to the blocks of keys that its list names: what sparse attention with an
/// indexer, a router or a top-k computes.
///
/// ```
/// # use blockflash_candle::{IndexAttention, IndexScores, IndexTopK, Mask, Sequences};
/// # use candle_core::{Device, Tensor};
/// let device = Device::cuda_if_available(0)?;
/// # let dtype = if device.is_cpu() { candle_core::DType::F32 } else { candle_core::DType::BF16 };
/// # let new = |shape: &[usize]| Tensor::randn(0f32, 1., shape, &device)?.to_dtype(dtype);
/// // Two sequences of 300 and 70 keys in pages, one query of each in 8 heads.
/// let (k, v, k_index) = (new(&[40, 64, 2, 64])?, new(&[40, 64, 2, 64])?, new(&[40, 64, 2, 32])?);
/// let (q, q_index) = (new(&[2, 1, 8, 64])?, new(&[2, 1, 2, 32])?);
/// let table = Tensor::new(&[[7u32, 3, 9, 0, 5], [8, 2, 0, 0, 0]], &device)?;
/// let lengths = Tensor::new(&[300u32, 70], &device)?;
/// let (lengths, block_table) = (Some(&lengths), Some(&table));
/// let sequences = Sequences { lengths, block_table, ..Sequences::default() };
/// let mask = Mask::causal();
///
/// // The first block, the last two, and those that fit an index of two heads best.
/// let index = IndexScores { sequences, mask, ..IndexScores::new(&q_index, &k_index, 16) };
/// let lists = index.top_k(2, IndexTopK { first: 1, last: 2, ..IndexTopK::new(8) })?;
/// let attention = IndexAttention::new(&q, &k, &v, &lists, 16);
/// let o = IndexAttention { sequences, scores: mask.into(), ..attention }.forward()?;
/// assert_eq!((lists.dims(), o.dims()), (&[2, 2, 8][..], q.dims()));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// Query `i` of `n` of a sequence with `length` keys stands at key `length - n + i`; causal masks
/// and windows hold inside of blocks, too. A query that sees no key gets the output 0. Lists,
/// lengths, offsets and tables are read on the device, so a graph follows them, and whatever they
/// hold, nothing outside of the tensors is touched. There are neither gradients nor the
/// log-sum-exp, and lists are divided so that all queries together fill a GPU.
///
/// A GPU takes f16 and bf16, a `head_dim` of a multiple of 8 up to 256, granularities of 1, 4, 16,
/// 64 and 128 tokens, and latent rows: v may be the first 512 columns of a k of 576. The CPU takes
/// f32, too, and any of these.
#[derive(Clone, Copy, Debug)]
pub struct IndexAttention<'a> {
    /// Queries, `[batch, seqlen_q, num_heads_q, head_dim]` or packed.
    pub q: &'a Tensor,
    /// Keys, `[batch, capacity, num_heads_kv, head_dim]`, in pages or packed; also `F8E4M3` with
    /// [`scales`](Self::scales).
    pub k: &'a Tensor,
    /// Values, in the shape of the keys but for their own `head_dim`, which is that of the output.
    pub v: &'a Tensor,
    /// u32 or i32 `[groups, rows, room]`: rows are the packed queries, or those of all sequences in
    /// their order; groups are 1, or the heads of k, or those of q. Entry `e` stands for the keys
    /// `e * granularity` to `(e + 1) * granularity`. Entries that are negative, which in u32 are
    /// those from 2³¹ on, and blocks beyond the sequence are skipped.
    pub lists: &'a Tensor,
    /// Tokens of a block.
    pub granularity: usize,
    /// Which queries and keys the sequences have.
    pub sequences: Sequences<&'a Tensor>,
    /// What happens to a score.
    pub scores: Scores<&'a Tensor>,
    /// What codes of k and of v are multiplied with, as in
    /// [`flash_attn_varlen_paged_windowed_scaled`](super::flash_attn_varlen_paged_windowed_scaled).
    pub scales: [Option<&'a Tensor>; 2],
}

impl<'a> IndexAttention<'a> {
    /// No mask but the lists, with the default scale and full sequences.
    pub fn new(
        q: &'a Tensor,
        k: &'a Tensor,
        v: &'a Tensor,
        lists: &'a Tensor,
        granularity: usize,
    ) -> Self {
        let (sequences, scores) = (Sequences::default(), Scores::of(Mask::Full));
        Self { q, k, v, lists, granularity, sequences, scores, scales: [None; 2] }
    }

    /// The output, in the shape of q with the `head_dim` of v, in the element type of q. Packed
    /// rows of no sequence are 0.
    ///
    /// # Errors
    /// Those of [`blockflash_ops::IndexAttention::forward`], as text; a tensor that needs a
    /// gradient.
    pub fn forward(&self) -> Result<Tensor> {
        let Self { q, lists, granularity, sequences, scales, .. } = *self;
        let given = self.scores.tensors().map(|(_, of)| *of).chain(scales.into_iter().flatten());
        if [q, self.k, self.v].into_iter().chain(given).any(Tensor::track_op) {
            bail!("attention by an index has no gradient here: detach its tensors");
        }
        sequences.check(self.k)?;
        let (k, v) = (sequences.pages(self.k)?, sequences.pages(self.v)?);
        let place = Place::of(q.device())?;
        let o_shape = with_width_of(q, &v);
        let is_packed = sequences.q.is_some();
        let mut o = place.allocate(dtype_of("q", q.dtype())?, &o_shape, is_packed)?;

        let rows = [q, &k, &v, lists].map(Tensor::storage_and_layout);
        let [of_q, of_k, of_v, of_lists] = &rows;
        let mut codes = [Vec::new(), Vec::new()];
        let [k_codes, v_codes] = &mut codes;
        let q = place.read(&Operand::of("q", of_q)?)?;
        let k = place.read_cached(&Operand::of("k", of_k)?, k_codes)?;
        let v = place.read_cached(&Operand::of("v", of_v)?, v_codes)?;
        let entries = place.read(&Operand::of("lists", of_lists)?)?;
        let scales = scales.map(|scale| scale.map(Tensor::storage_and_layout));
        let [k_scale, v_scale] = read_scales(&scales, &place)?;
        let locked = self.scores.map(Tensor::storage_and_layout);
        let scores = read_scores(&locked, &place)?;
        {
            let mut o = place.write(&mut o, &o_shape)?;
            sequences.with_views(&place, |sequences| {
                let [packed, packed_kv] = sequences.packed();
                let cache = KvCache {
                    k_scale: k_scale.as_ref().map(|scale| scale.view),
                    v_scale: v_scale.as_ref().map(|scale| scale.view),
                    // Latent rows of codes are keys and values at once.
                    ..sequences.cache(k.view, if is_bytes(&k.view) { k.view } else { v.view })
                };
                let lists = IndexLists { entries: entries.view, granularity };
                let call = blockflash_ops::IndexAttention {
                    packed,
                    packed_kv,
                    scores: scores.as_ref().map(|tensor| tensor.view),
                    ..blockflash_ops::IndexAttention::new(q.view, lists)
                };
                let bytes = call.workspace_bytes(&cache, &place.device()).map_err(refused)?;
                place.run_with_workspace(bytes, |stream, workspace| {
                    let call = blockflash_ops::IndexAttention { workspace, ..call };
                    let o = o.view.reborrow();
                    call.forward_into(IndexAttentionOperands { cache, o, lse: None }, stream)
                })
            })?;
        }
        Ok(tensor(o, &o_shape))
    }
}

fn is_bytes(view: &blockflash_ops::View<'_>) -> bool {
    view.dtype() == DType::U8
}
