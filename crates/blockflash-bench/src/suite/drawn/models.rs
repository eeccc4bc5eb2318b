//! The models whose shapes are drawn.

use serde::Deserialize;
use std::collections::BTreeMap;

/// Heads of attention and sizes of the MLP, as a published configuration has them.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Query heads, key-value heads, and elements of a row of q and k.
    pub heads: [usize; 3],
    /// Elements of a row of v, where that is another number.
    pub head_dim_v: Option<usize>,
    /// Hidden size and intermediate size, the latter of one expert where there are several.
    pub mlp: [usize; 2],
    /// Keys that a query sees in layers with a sliding window.
    pub window: Option<usize>,
    /// Soft cap of the scores.
    pub softcap: Option<f32>,
    /// Whether each head has a sink.
    #[serde(default)]
    pub sinks: bool,
}

/// All models, by the names of their configurations.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Models {
    /// Models under a causal mask, which have a cache of keys and values.
    pub decoders: BTreeMap<String, Model>,
    /// Models in which every token sees all.
    pub encoders: BTreeMap<String, Model>,
}

impl Models {
    /// The table of the crate, `models.toml`.
    ///
    /// # Errors
    /// What is wrong in it.
    pub fn published() -> Result<Self, String> {
        toml::from_str(include_str!("models.toml")).map_err(|error| error.to_string())
    }
}
