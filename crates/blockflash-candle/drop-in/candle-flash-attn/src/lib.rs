pub use blockflash_candle::*;
