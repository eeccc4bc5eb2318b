//! The functions of candle-flash-attn-v3 for candle 0.10, by blockflash-candle.
pub use blockflash_candle::candle_0_10::v3::*;
