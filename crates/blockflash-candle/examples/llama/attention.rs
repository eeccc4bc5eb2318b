//! Attention of a layer to all tokens so far, in two ways.

use blockflash_candle::{Attention, BlockTopK, KvCache, Mask};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{kv_cache, ops::softmax_last_dim};

/// Whose attention runs.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Candle,
    /// With `blocks`, a prompt attends only to the blocks that are chosen.
    Blockflash {
        blocks: Option<BlockTopK>,
    },
}

/// The keys and values of a layer.
pub(crate) enum Cache {
    /// `[heads, tokens, head_dim]`
    Candle(Box<kv_cache::KvCache>),
    Blockflash(Box<KvCache>, Option<BlockTopK>),
}

impl Cache {
    pub(crate) fn new(
        kind: Kind,
        capacity: usize,
        [heads, head_dim]: [usize; 2],
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        Ok(match kind {
            Kind::Candle => Self::Candle(Box::new(kv_cache::KvCache::new(1, capacity))),
            Kind::Blockflash { blocks } => {
                let cache = KvCache::new(device, dtype, [1, capacity], heads, head_dim)?;
                Self::Blockflash(Box::new(cache), blocks)
            }
        })
    }

    /// Tokens so far.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Candle(cache) => cache.current_seq_len(),
            Self::Blockflash(cache, _) => cache.len(),
        }
    }

    /// What candle adds to the scores of a prompt, for all layers: `[tokens, tokens]`, −∞ for keys
    /// after the query. A single token sees all keys.
    pub(crate) fn hidden(&self, tokens: usize, like: &Tensor) -> Result<Option<Tensor>> {
        if matches!(self, Self::Blockflash(..)) || tokens == 1 {
            return Ok(None);
        }
        let (dtype, device) = (like.dtype(), like.device());
        let positions = Tensor::arange(0, tokens as u32, device)?;
        let queries = positions.reshape((tokens, 1))?.broadcast_as((tokens, tokens))?;
        let later = queries.broadcast_lt(&positions.reshape((1, tokens))?)?;
        let of = |value: f32| Tensor::full(value, (tokens, tokens), device)?.to_dtype(dtype);
        later.where_cond(&of(f32::NEG_INFINITY)?, &of(0.0)?).map(Some)
    }

    /// Causal attention of new tokens, `[1, tokens, heads, head_dim]`: a whole prompt, or one.
    pub(crate) fn attend(
        &mut self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        hidden: Option<&Tensor>,
    ) -> Result<Tensor> {
        let mask = Mask::causal();
        let call = Attention { mask, ..Attention::new(q, k, v) };
        match self {
            Self::Candle(cache) => {
                let by_head = |tensor: &Tensor| tensor.squeeze(0)?.transpose(0, 1)?.contiguous();
                let (keys, values) = cache.append(&by_head(k)?, &by_head(v)?)?;
                plain(q, &keys, &values, hidden)
            }
            // A prompt does not need the cache, but fills it.
            Self::Blockflash(cache, blocks) if cache.is_empty() => {
                cache.append(k, v)?;
                let blocks = blocks.map(|blocks| blocks.choose(q, k, mask)).transpose()?;
                Attention { block_mask: blocks.as_ref(), ..call }.forward()
            }
            Self::Blockflash(cache, _) => call.append_to(cache),
        }
    }
}

/// Matrix products and the softmax of candle, with keys and values `[heads_kv, keys, head_dim]`.
fn plain(q: &Tensor, k: &Tensor, v: &Tensor, hidden: Option<&Tensor>) -> Result<Tensor> {
    let (_, tokens, heads, head_dim) = q.dims4()?;
    let (heads_kv, keys, _) = k.dims3()?;
    // Heads that share keys are rows of one matrix.
    let rows = heads / heads_kv * tokens;
    let q = q.squeeze(0)?.transpose(0, 1)?.reshape((heads_kv, rows, head_dim))?;
    let scores = (q.matmul(&k.t()?)? / (head_dim as f64).sqrt())?;
    let scores = scores.reshape((heads, tokens, keys))?;
    let weights = match hidden {
        Some(hidden) => softmax_last_dim(&scores.broadcast_add(hidden)?)?,
        None => softmax_last_dim(&scores)?,
    };
    let o = weights.reshape((heads_kv, rows, keys))?.matmul(v)?;
    o.reshape((heads, tokens, head_dim))?.transpose(0, 1)?.unsqueeze(0)
}
