use super::candle_core::{Device, Result, Tensor};
use super::error::refused;
use super::memory::{Operand, Place};
use blockflash_ops::{
    Align, BlockChoice, BlockGeometry, BlockMask, BlockMaskBuffer, BlockScores, BlockSource, Mask,
};
use std::sync::Arc;

/// A block mask on a device, for [`Attention::block_mask`](super::Attention::block_mask).
///
/// # Errors
/// Out of memory, or a failing device.
pub fn to_device(mask: &BlockMask, device: &Device) -> Result<Arc<BlockMask>> {
    Place::of(device)?.run(|stream| mask.to(stream)).map(Arc::new)
}

/// The block mask of a mask of pairs: u8 `[batch, heads, seqlen_q, seqlen_kv]`, where batch and
/// heads may be 1 for all, is not 0 where a query sees a key. Blocks are of `block` queries and
/// keys, a multiple of 64. It is on the device of the pairs, which are copied by way of the host.
///
/// ```
/// # use blockflash_candle::token_mask;
/// # use candle_core::{Device, Tensor};
/// // Each query sees the keys of its own parity.
/// let seen = |at: usize| u8::from(at / 100 % 2 == at % 2);
/// let pairs = Tensor::from_iter((0..100 * 100).map(seen), &Device::Cpu)?;
/// let mask = token_mask(&pairs.reshape((1, 1, 100, 100))?, 64)?;
/// assert!(mask.is_visible(0, 0, 5, 7)? && !mask.is_visible(0, 0, 5, 8)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Another type or number of dimensions, a block size that is not possible, out of memory.
pub fn token_mask(pairs: &Tensor, block: usize) -> Result<Arc<BlockMask>> {
    let (batch, heads, seqlen_q, seqlen_kv) = pairs.dims4()?;
    let shown: Vec<bool> =
        pairs.flatten_all()?.to_vec1::<u8>()?.into_iter().map(|shown| shown != 0).collect();
    let mask = BlockGeometry::new(seqlen_q, seqlen_kv, block, block)
        .and_then(|geometry| BlockMask::from_token_mask(geometry, batch, heads, &shown));
    to_device(&mask.map_err(refused)?, pairs.device())
}

/// Chooses the blocks of a long prompt: for each block of queries of each head the blocks of keys
/// whose mean key fits the mean query best, and always some at the start and at the diagonal.
///
/// ```
/// # use blockflash_candle::{Attention, BlockTopK, Mask};
/// # use candle_core::{Device, Tensor};
/// # let q = Tensor::randn(0f32, 1., (1, 1000, 4, 32), &Device::Cpu)?;
/// # let k = Tensor::randn(0f32, 1., (1, 1000, 2, 32), &Device::Cpu)?;
/// # let v = k.clone();
/// let mask = Mask::causal();
/// let blocks = BlockTopK { count: 4, ..BlockTopK::new(64) }.choose(&q, &k, mask)?;
/// let attention = Attention { block_mask: Some(&blocks), ..Attention::new(&q, &k, &v) };
/// let attention = Attention { scores: mask.into(), ..attention };
/// assert_eq!(attention.forward()?.dims(), q.dims());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockTopK {
    /// Queries and keys of a block: a multiple of 64.
    pub block: usize,
    /// Blocks of each row that are chosen by their means.
    pub count: usize,
    /// Blocks at the start of the keys that every row visits.
    pub first: usize,
    /// Blocks before the diagonal one that every row visits, besides that one.
    pub before: usize,
}

impl BlockTopK {
    /// 16 chosen blocks of this size, the first one and two at the diagonal.
    pub const fn new(block: usize) -> Self {
        Self { block, count: 16, first: 1, before: 1 }
    }

    /// The mask for a q `[batch, seqlen_q, num_heads_q, head_dim]` and a k
    /// `[batch, seqlen_kv, num_heads_kv, head_dim]` under a token mask that is aligned at the last
    /// query and key, on their device. On a GPU this waits for the number of blocks.
    ///
    /// # Errors
    /// A block size that is not possible; on a GPU f32, or a `head_dim` that is not a multiple of 8
    /// up to 256; NaN in q or k; out of memory.
    pub fn choose(&self, q: &Tensor, k: &Tensor, mask: Mask) -> Result<Arc<BlockMask>> {
        let ((batch, seqlen_q, heads, _), (_, seqlen_kv, _, _)) = (q.dims4()?, k.dims4()?);
        let place = Place::of(q.device())?;
        let locked = [q, k].map(|tensor| tensor.storage_and_layout());
        let q = place.read(&Operand::of("q", &locked[0])?)?;
        let k = place.read(&Operand::of("k", &locked[1])?)?;
        place.run(|stream| {
            let geometry = BlockGeometry::new(seqlen_q, seqlen_kv, self.block, self.block)?;
            let mut scores = BlockScores::new(geometry, q.view, k.view, stream)?;
            scores.compute(q.view, k.view, stream)?;
            let first = BlockMask::sink(geometry, self.first.min(geometry.cols()))?;
            let diagonal =
                BlockMask::window(geometry, Some(self.before), Some(0), Align::BottomRight)?;
            let always = first.union(&diagonal)?;
            let count = self.count.min(geometry.cols());
            let capacity = batch * heads * (geometry.rows() * count + always.nnz());
            let always = always.to(stream)?;
            let source = BlockSource::Scores { scores: scores.scores().view(), k: count };
            let choice = BlockChoice { always: Some(&always), mask, ..BlockChoice::new(source) };
            let mut buffer = BlockMaskBuffer::new(geometry, batch, heads, capacity, stream)?;
            buffer.build(&choice, stream)?;
            buffer.check(stream)?;
            // As many columns as there are, not as many as there is room for.
            Ok(Arc::new(buffer.to_host(stream)?.to(stream)?))
        })
    }
}
