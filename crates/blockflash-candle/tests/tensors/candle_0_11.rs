use ::blockflash_candle::candle_0_11 as blockflash_candle;
use ::blockflash_candle::candle_0_11::candle_core;

#[path = "line/mod.rs"]
mod line;
