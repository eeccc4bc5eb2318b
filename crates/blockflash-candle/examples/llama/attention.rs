//! Attention of a layer to all tokens so far, in two ways.

use blockflash_candle::{Attention, BlockTopK, KvCache, Mask};
use candle_core::{D, DType, Device, Result, Tensor};

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
    /// `[1, tokens, heads, head_dim]`
    Candle(Option<[Tensor; 2]>),
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
            Kind::Candle => Self::Candle(None),
            Kind::Blockflash { blocks } => {
                let cache = KvCache::new(device, dtype, [1, capacity], heads, head_dim)?;
                Self::Blockflash(Box::new(cache), blocks)
            }
        })
    }

    /// Tokens so far.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Candle(cache) => cache.as_ref().map_or(0, |[keys, _]| keys.dims()[1]),
            Self::Blockflash(cache, _) => cache.len(),
        }
    }

    /// Causal attention of new tokens, `[1, tokens, heads, head_dim]`.
    pub(crate) fn attend(&mut self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let mask = Mask::causal();
        let call = Attention { mask, ..Attention::new(q, k, v) };
        match self {
            Self::Candle(cache) => {
                let [keys, values] = match cache.take() {
                    None => [k.clone(), v.clone()],
                    Some([keys, values]) => {
                        [Tensor::cat(&[&keys, k], 1)?, Tensor::cat(&[&values, v], 1)?]
                    }
                };
                let o = plain(q, &keys, &values)?;
                *cache = Some([keys, values]);
                Ok(o)
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

/// Matrix products and a softmax of candle.
fn plain(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let (_, tokens, heads, head_dim) = q.dims4()?;
    let (_, keys, heads_kv, _) = k.dims4()?;
    let group = heads / heads_kv;
    // [heads_kv, group * tokens, head_dim]: heads that share keys are rows of one matrix.
    let q = q.squeeze(0)?.transpose(0, 1)?.contiguous()?;
    let q = q.reshape((heads_kv, group * tokens, head_dim))?;
    let by_head = |tensor: &Tensor| tensor.squeeze(0)?.transpose(0, 1)?.contiguous();
    let (k, v) = (by_head(k)?, by_head(v)?);
    let scores = (q.matmul(&k.t()?)? / (head_dim as f64).sqrt())?.to_dtype(DType::F32)?;
    let hidden: Vec<f32> = (0..tokens)
        .flat_map(|row| (0..keys).map(move |key| (row, key)))
        .map(|(row, key)| if key + tokens > row + keys { f32::NEG_INFINITY } else { 0.0 })
        .collect();
    let hidden = Tensor::from_vec(hidden, (1, tokens, keys), q.device())?;
    let scores = scores.reshape((heads, tokens, keys))?.broadcast_add(&hidden)?;
    let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?.to_dtype(q.dtype())?;
    let o = weights.reshape((heads_kv, group * tokens, keys))?.matmul(&v)?;
    o.reshape((heads, tokens, head_dim))?.transpose(0, 1)?.unsqueeze(0)
}
