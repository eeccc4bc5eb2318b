#![doc = include_str!("../README.md")]
// Each line of candle compiles the files of `line/` once, with types of its own.
#![allow(clippy::duplicate_mod)]

#[cfg(not(any(feature = "candle-0-9", feature = "candle-0-10", feature = "candle-0-11")))]
compile_error!(
    "blockflash-candle needs to know which candle: enable `candle-0-9`, `candle-0-10` or \
     `candle-0-11` (the default), or several of them"
);

#[cfg(feature = "candle-0-10")]
pub mod candle_0_10;
#[cfg(feature = "candle-0-11")]
pub mod candle_0_11;
#[cfg(feature = "candle-0-9")]
pub mod candle_0_9;

#[cfg(feature = "candle-0-11")]
#[doc(inline)]
pub use candle_0_11::*;
