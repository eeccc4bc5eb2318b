//! The functions of candle-flash-attn for candle 0.9, by blockflash-candle.
pub use blockflash_candle::candle_0_9::*;
