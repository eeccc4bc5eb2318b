//! A Llama of candle's operations, but for attention.

use crate::attention::{Cache, Kind};
use crate::config::Config;
use candle_core::{DType, Device, Result, Tensor, bail, safetensors};
use candle_nn::ops::{rms_norm, silu};
use candle_nn::rotary_emb::rope_thd;
use std::collections::HashMap;
use std::fs;
use std::path::Path;

pub(crate) struct Model {
    pub(crate) config: Config,
    layers: Vec<Layer>,
    embedding: Tensor,
    norm: Tensor,
    head: Tensor,
    /// `[positions, head_dim / 2]`
    cos: Tensor,
    sin: Tensor,
}

/// The weights of a layer, each `[outputs, inputs]`.
struct Layer {
    attention_norm: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    mlp_norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

impl Model {
    /// Reads all weights of a folder, for up to `positions` tokens.
    pub(crate) fn load(
        folder: &Path,
        config: Config,
        positions: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let mut weights = HashMap::new();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                weights.extend(safetensors::load(&path, device)?);
            }
        }
        let mut weight = |name: &str, shape: &[usize]| {
            let Some(tensor) = weights.remove(name) else { bail!("there is no weight {name}") };
            if tensor.dims() != shape {
                bail!("{name} is {:?}, not {shape:?}", tensor.dims());
            }
            tensor.to_dtype(dtype)
        };
        let Config { hidden_size: hidden, intermediate_size: inner, vocab_size, .. } = config;
        let kv = config.num_key_value_heads * config.head_dim();
        let mut layers = Vec::new();
        for at in 0..config.num_hidden_layers {
            let mut of = |name: &str, shape: &[usize]| {
                weight(&format!("model.layers.{at}.{name}.weight"), shape)
            };
            layers.push(Layer {
                attention_norm: of("input_layernorm", &[hidden])?,
                q: of("self_attn.q_proj", &[hidden, hidden])?,
                k: of("self_attn.k_proj", &[kv, hidden])?,
                v: of("self_attn.v_proj", &[kv, hidden])?,
                o: of("self_attn.o_proj", &[hidden, hidden])?,
                mlp_norm: of("post_attention_layernorm", &[hidden])?,
                gate: of("mlp.gate_proj", &[inner, hidden])?,
                up: of("mlp.up_proj", &[inner, hidden])?,
                down: of("mlp.down_proj", &[hidden, inner])?,
            });
        }
        let embedding = weight("model.embed_tokens.weight", &[vocab_size, hidden])?;
        let norm = weight("model.norm.weight", &[hidden])?;
        let head = match config.tie_word_embeddings {
            true => embedding.clone(),
            false => weight("lm_head.weight", &[vocab_size, hidden])?,
        };
        let frequencies = config.frequencies();
        let table = |of: fn(f64) -> f64| {
            let angles = (0..positions).flat_map(|position| {
                frequencies.iter().map(move |frequency| of(position as f64 * frequency) as f32)
            });
            let shape = (positions, frequencies.len());
            Tensor::from_vec(angles.collect(), shape, device)?.to_dtype(dtype)
        };
        let (cos, sin) = (table(f64::cos)?, table(f64::sin)?);
        Ok(Self { config, layers, embedding, norm, head, cos, sin })
    }

    /// Empty caches, one for each layer.
    pub(crate) fn caches(&self, kind: Kind, capacity: usize) -> Result<Vec<Cache>> {
        let sizes = [self.config.num_key_value_heads, self.config.head_dim()];
        let (dtype, device) = (self.head.dtype(), self.head.device());
        self.layers.iter().map(|_| Cache::new(kind, capacity, sizes, dtype, device)).collect()
    }

    /// The logits of the token after some more tokens, on the CPU.
    pub(crate) fn logits(&self, tokens: &[u32], caches: &mut [Cache]) -> Result<Vec<f32>> {
        let start = caches.first().map_or(0, Cache::len);
        let hidden = caches.first().map(|cache| cache.hidden(tokens.len(), &self.embedding));
        let hidden = hidden.transpose()?.flatten();
        let [cos, sin] = [&self.cos, &self.sin].map(|table| table.narrow(0, start, tokens.len()));
        let (cos, sin) = (cos?, sin?);
        let tokens = Tensor::new(tokens, self.embedding.device())?;
        let mut x = self.embedding.index_select(&tokens, 0)?;
        for (layer, cache) in self.layers.iter().zip(caches) {
            let h = self.normalized(&x, &layer.attention_norm)?;
            let heads = |weight: &Tensor| -> Result<Tensor> {
                let y = linear(&h, weight)?;
                let (tokens, width) = y.dims2()?;
                let head_dim = self.config.head_dim();
                y.reshape((1, tokens, width / head_dim, head_dim))
            };
            let q = rope_thd(&heads(&layer.q)?, &cos, &sin)?;
            let k = rope_thd(&heads(&layer.k)?, &cos, &sin)?;
            let o = cache.attend(&q, &k, &heads(&layer.v)?, hidden.as_ref())?;
            x = (&x + linear(&o.reshape(x.shape())?, &layer.o)?)?;
            let h = self.normalized(&x, &layer.mlp_norm)?;
            let inner = (silu(&linear(&h, &layer.gate)?)? * linear(&h, &layer.up)?)?;
            x = (&x + linear(&inner, &layer.down)?)?;
        }
        let last = x.narrow(0, x.dims2()?.0 - 1, 1)?;
        let logits = linear(&self.normalized(&last, &self.norm)?, &self.head)?;
        logits.squeeze(0)?.to_dtype(DType::F32)?.to_vec1()
    }

    fn normalized(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        rms_norm(x, weight, self.config.rms_norm_eps as f32)
    }
}

fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    x.matmul(&weight.t()?)
}
