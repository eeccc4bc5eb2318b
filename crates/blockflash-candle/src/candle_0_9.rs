//! Everything for tensors of candle 0.9, from 0.9.2 on.

pub use candle_core_0_9 as candle_core;

#[path = "line/mod.rs"]
mod line;

pub use line::*;
