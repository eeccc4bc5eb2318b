//! The functions of candle-flash-attn-v3 for candle 0.11, by blockflash-candle.
pub use blockflash_candle::candle_0_11::v3::*;
