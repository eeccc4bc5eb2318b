//! Everything for tensors of candle 0.11.

pub use candle_core;

#[path = "line/mod.rs"]
mod line;

pub use line::*;
