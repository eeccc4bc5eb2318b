//! The sizes of a model, as Hugging Face writes them, and a small one with random weights.

use candle_core::{DType, Device, Error, Result, Tensor, bail, safetensors};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs;
use std::path::Path;

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Config {
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) vocab_size: usize,
    pub(crate) num_hidden_layers: usize,
    pub(crate) num_attention_heads: usize,
    pub(crate) num_key_value_heads: usize,
    pub(crate) rms_norm_eps: f64,
    #[serde(default = "default_theta")]
    pub(crate) rope_theta: f64,
    #[serde(default)]
    pub(crate) rope_scaling: Option<RopeScaling>,
    #[serde(default)]
    pub(crate) tie_word_embeddings: bool,
}

/// Slower rotations of long waves, as from Llama 3.1 on.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct RopeScaling {
    rope_type: String,
    factor: f64,
    low_freq_factor: f64,
    high_freq_factor: f64,
    original_max_position_embeddings: f64,
}

fn default_theta() -> f64 {
    10_000.0
}

impl Config {
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let text = fs::read_to_string(&path)
            .map_err(|error| Error::msg(format!("{}: {error}", path.display())))?;
        let config: Self = serde_json::from_str(&text)
            .map_err(|error| Error::msg(format!("{}: {error}", path.display())))?;
        let (heads, heads_kv) = (config.num_attention_heads, config.num_key_value_heads);
        let even = heads > 0 && config.hidden_size.is_multiple_of(2 * heads);
        if !even || heads_kv == 0 || heads % heads_kv != 0 {
            bail!("{heads} heads, {heads_kv} of keys, do not fit {}", config.hidden_size);
        }
        match &config.rope_scaling {
            Some(scaling) if scaling.rope_type != "llama3" => {
                bail!("rope_scaling of type {} is not known here", scaling.rope_type)
            }
            _ => Ok(config),
        }
    }

    pub(crate) fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    /// Radians by which each pair of elements turns from one position to the next.
    pub(crate) fn frequencies(&self) -> Vec<f64> {
        let head_dim = self.head_dim();
        let plain = (0..head_dim / 2)
            .map(|pair| self.rope_theta.powf(-2.0 * pair as f64 / head_dim as f64));
        let Some(scaling) = &self.rope_scaling else { return plain.collect() };
        let scaled = |frequency: f64| {
            let waves =
                scaling.original_max_position_embeddings * frequency / (2.0 * std::f64::consts::PI);
            let [low, high] = [scaling.low_freq_factor, scaling.high_freq_factor];
            let own = ((waves - low) / (high - low)).clamp(0.0, 1.0);
            frequency * (own + (1.0 - own) / scaling.factor)
        };
        plain.map(scaled).collect()
    }
}

/// The size of a model that is made.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Size {
    /// 4 layers of 256, for a CPU
    Small,
    /// Llama 3.2 1B
    #[value(name = "1b")]
    Billion,
}

impl Size {
    fn config(self) -> Config {
        let small = Config {
            hidden_size: 256,
            intermediate_size: 512,
            vocab_size: 2000,
            num_hidden_layers: 4,
            num_attention_heads: 8,
            num_key_value_heads: 2,
            rms_norm_eps: 1e-5,
            rope_theta: default_theta(),
            rope_scaling: None,
            tie_word_embeddings: false,
        };
        match self {
            Self::Small => small,
            Self::Billion => Config {
                hidden_size: 2048,
                intermediate_size: 8192,
                vocab_size: 128_256,
                num_hidden_layers: 16,
                num_attention_heads: 32,
                num_key_value_heads: 8,
                rope_theta: 500_000.0,
                tie_word_embeddings: true,
                ..small
            },
        }
    }
}

/// Writes a model with random weights.
pub(crate) fn make(folder: &Path, size: Size, dtype: DType, device: &Device) -> Result<()> {
    let config = size.config();
    let Config { hidden_size: hidden, intermediate_size: inner, vocab_size: vocab, .. } = config;
    let kv = config.num_key_value_heads * config.head_dim();
    let mut weights = HashMap::new();
    let mut add = |name: String, shape: [usize; 2], gain: f32| -> Result<()> {
        let deviation = gain / (shape[1] as f32).sqrt();
        weights.insert(name, Tensor::randn(0., deviation, &shape, device)?.to_dtype(dtype)?);
        Ok(())
    };
    for layer in 0..config.num_hidden_layers {
        // Queries are long enough for attention to prefer some keys, so that tokens depend on it.
        for (part, shape, gain) in [
            ("self_attn.q_proj", [hidden, hidden], 2.0),
            ("self_attn.k_proj", [kv, hidden], 1.0),
            ("self_attn.v_proj", [kv, hidden], 1.0),
            ("self_attn.o_proj", [hidden, hidden], 1.0),
            ("mlp.gate_proj", [inner, hidden], 1.0),
            ("mlp.up_proj", [inner, hidden], 1.0),
            ("mlp.down_proj", [hidden, inner], 1.0),
        ] {
            add(format!("model.layers.{layer}.{part}.weight"), shape, gain)?;
        }
    }
    add("model.embed_tokens.weight".into(), [vocab, hidden], 1.0)?;
    if !config.tie_word_embeddings {
        add("lm_head.weight".into(), [vocab, hidden], 1.0)?;
    }
    let norms = (0..config.num_hidden_layers).flat_map(|layer| {
        ["input_layernorm", "post_attention_layernorm"]
            .map(|norm| format!("model.layers.{layer}.{norm}.weight"))
    });
    for name in norms.chain(["model.norm.weight".into()]) {
        weights.insert(name, Tensor::ones(hidden, dtype, device)?);
    }
    fs::create_dir_all(folder)?;
    let text = serde_json::to_string_pretty(&config).map_err(Error::msg)?;
    fs::write(folder.join("config.json"), text)?;
    safetensors::save(&weights, folder.join("model.safetensors"))
}
