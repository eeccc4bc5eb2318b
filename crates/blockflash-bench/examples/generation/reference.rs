//! The same model without a cache: one pass over a whole sequence, with ordinary attention.

use super::engine::Sequence;
use super::layer::rounded;
use super::model::{Model, likeliest, parts};
use blockflash_bench::Result;
use blockflash_bench::io::Array;
use blockflash_ops::{Activation, Attention, DType, Mask, Operation, Stream, Tensor};

/// How many generated tokens agree with a pass without a cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct Agreement {
    pub equal: usize,
    /// Another token, whose logit is as large but for rounding.
    pub tied: usize,
    pub wrong: usize,
}

impl Agreement {
    /// Compares the tokens of a sequence.
    ///
    /// # Errors
    /// A device that has no such kernels or fails.
    pub fn add(&mut self, model: &Model, sequence: &Sequence, stream: &Stream) -> Result<()> {
        let tokens = &sequence.tokens;
        let logits = logits(model, &tokens[..tokens.len() - 1], stream)?;
        let rows = logits.chunks_exact(model.sizes.vocabulary).zip(&tokens[1..]);
        for (logits, &token) in rows.skip(sequence.prompt - 1) {
            let best = logits[likeliest(logits) as usize];
            // Attention with a cache sums in another order.
            let rounding = if model.sizes.dtype == DType::F32 { 1e-4 } else { 0.03 };
            match best - logits[token as usize] {
                0.0 => self.equal += 1,
                gap if gap <= rounding * best.abs() => self.tied += 1,
                _ => self.wrong += 1,
            }
        }
        Ok(())
    }
}

/// Logits of the tokens that follow each token.
fn logits(model: &Model, tokens: &[u32], stream: &Stream) -> Result<Vec<f32>> {
    let (sizes, count) = (model.sizes, tokens.len());
    let [heads_q, heads_kv] = sizes.heads;
    let zeros = |dtype, heads, dim| Tensor::zeros(stream, dtype, &[1, count, heads, dim]);
    let mut x = model.embedded(tokens, &[1, count, 1, sizes.width()], stream)?;
    let mut qkv = zeros(sizes.dtype, heads_q + 2 * heads_kv, sizes.head_dim)?;
    let mut o = zeros(sizes.dtype, heads_q, sizes.head_dim)?;
    let mut inner = zeros(sizes.dtype, 1, 4 * sizes.width())?;
    let (set, add) = ((Activation::None, 0.0), (Activation::None, 1.0));
    for layer in &model.layers {
        model.product(&layer.qkv, &x, &mut qkv, set, stream)?;
        let turned = turned(model, &qkv, stream)?;
        let [q, k, v] = parts(&turned, sizes.heads)?;
        let attention = Attention { mask: Mask::causal(), ..Attention::new(q, k, v) };
        attention.run((o.view_mut(), None), stream)?;
        model.product(&layer.out, &o, &mut x, add, stream)?;
        model.product(&layer.up, &x, &mut inner, (Activation::Gelu, 0.0), stream)?;
        model.product(&layer.down, &inner, &mut x, add, stream)?;
    }
    let mut logits = zeros(DType::F32, 1, sizes.vocabulary)?;
    model.product(&model.head, &x, &mut logits, set, stream)?;
    Ok(logits.to_vec(stream)?)
}

/// Turns queries and keys by their positions, on the host.
fn turned(model: &Model, qkv: &Tensor, stream: &Stream) -> Result<Tensor> {
    let [heads_q, heads_kv] = model.sizes.heads;
    let (half, heads) = (model.sizes.head_dim / 2, heads_q + 2 * heads_kv);
    let array = Array::download(qkv, stream)?;
    let mut values = array.to_f32(0..array.len());
    for (at, row) in values.chunks_exact_mut(2 * half).enumerate() {
        let (position, head) = (at / heads, at % heads);
        if head >= heads_q + heads_kv {
            continue;
        }
        for i in 0..half {
            let [cos, sin] = model.angles.each_ref().map(|table| table[position * half + i]);
            let (x, y) = (row[i], row[i + half]);
            (row[i], row[i + half]) = (x * cos - y * sin, x * sin + y * cos);
        }
    }
    Ok(rounded(&values, qkv.shape(), qkv.dtype())?.upload(stream)?)
}
