//! The models of candle-transformers, with blockflash-candle under the name of candle-flash-attn.
pub use candle_transformers::models;
