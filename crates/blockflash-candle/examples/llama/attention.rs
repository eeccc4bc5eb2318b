//! Attention of a layer to all tokens so far, in two ways.

use blockflash_candle::{Attention, BlockTopK, KvCache, Mask};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{kv_cache, ops::softmax_last_dim};

/// Whose attention runs.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// With `exact` in f32, whatever the type of the model is.
    Candle { exact: bool },
    /// With `blocks`, a prompt attends only to the blocks that are chosen.
    Blockflash { blocks: Option<BlockTopK> },
}

/// The keys and values of a layer.
pub(crate) enum Cache {
    /// `[heads, tokens, head_dim]`, and whether attention is exact
    Candle(Box<kv_cache::KvCache>, bool),
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
            Kind::Candle { exact } => {
                Self::Candle(Box::new(kv_cache::KvCache::new(1, capacity)), exact)
            }
            Kind::Blockflash { blocks } => {
                let cache = KvCache::new(device, dtype, [1, capacity], heads, head_dim)?;
                Self::Blockflash(Box::new(cache), blocks)
            }
        })
    }

    /// Tokens so far.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Candle(cache, _) => cache.current_seq_len(),
            Self::Blockflash(cache, _) => cache.len(),
        }
    }

    /// What candle adds to the scores of a prompt, for all layers. A single token sees all keys.
    pub(crate) fn hidden(&self, tokens: usize, like: &Tensor) -> Result<Option<Tensor>> {
        match self {
            Self::Candle(_, false) if tokens > 1 => later(0, tokens, like).map(Some),
            _ => Ok(None),
        }
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
        let call = Attention { scores: mask.into(), ..Attention::new(q, k, v) };
        match self {
            Self::Candle(cache, exact) => {
                let by_head = |tensor: &Tensor| tensor.squeeze(0)?.transpose(0, 1)?.contiguous();
                let (keys, values) = cache.append(&by_head(k)?, &by_head(v)?)?;
                if *exact { in_f32(q, &keys, &values) } else { plain(q, &keys, &values, hidden) }
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

/// −∞ for keys after the query, else 0: `[queries, first + queries]`, where the first query is at
/// the key `first`.
fn later(first: usize, queries: usize, like: &Tensor) -> Result<Tensor> {
    let (keys, dtype, device) = (first + queries, like.dtype(), like.device());
    let positions = Tensor::arange(0, keys as u32, device)?;
    let own = positions.narrow(0, first, queries)?.reshape((queries, 1))?;
    let later = own.broadcast_as((queries, keys))?.broadcast_lt(&positions.reshape((1, keys))?)?;
    let of = |value: f32| Tensor::full(value, (queries, keys), device)?.to_dtype(dtype);
    later.where_cond(&of(f32::NEG_INFINITY)?, &of(0.0)?)
}

/// [`plain`] in f32, for some queries after the other, so that their scores fit the memory.
fn in_f32(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    const QUERIES: usize = 1024;
    let [exact_q, k, v] = [q, k, v].map(|tensor| tensor.to_dtype(DType::F32));
    let (exact_q, k, v) = (exact_q?, k?, v?);
    let (tokens, keys) = (q.dim(1)?, k.dim(1)?);
    let part = |at: usize| {
        let (queries, first) = (QUERIES.min(tokens - at), keys - tokens + at);
        let [k, v] = [&k, &v].map(|tensor| tensor.narrow(1, 0, first + queries));
        let hidden = later(first, queries, &exact_q)?;
        plain(&exact_q.narrow(1, at, queries)?, &k?, &v?, Some(&hidden))
    };
    let parts: Vec<Tensor> = (0..tokens).step_by(QUERIES).map(part).collect::<Result<_>>()?;
    Tensor::cat(&parts, 1)?.to_dtype(q.dtype())
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
