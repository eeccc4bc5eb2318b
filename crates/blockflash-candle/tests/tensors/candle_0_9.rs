use ::blockflash_candle::candle_0_9 as blockflash_candle;
use ::blockflash_candle::candle_0_9::candle_core;

#[path = "line/mod.rs"]
mod line;
