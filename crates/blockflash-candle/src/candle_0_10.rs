//! Everything for tensors of candle 0.10.

pub use candle_core_0_10 as candle_core;

#[path = "line/mod.rs"]
mod line;

pub use line::*;
