use ::blockflash_candle::candle_0_10 as blockflash_candle;
use ::blockflash_candle::candle_0_10::candle_core;

#[path = "line/mod.rs"]
mod line;
